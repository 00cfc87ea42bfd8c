from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.mesh import Axis, Group, Mesh, Transport
from megalite.mesh_shape import MeshShape
from tests.counting import CountingTransport
from tests.ranks import RankError, run_ranks

NAMES = ("tp", "pp", "dp", "tie", "world")
TRANSPORTS = pytest.mark.parametrize("transport", ["gloo", "nccl_rules"])


# --- bodies ------------------------------------------------------------------------------------


def axes(mesh: Mesh) -> dict[str, Axis]:
    return {name: getattr(mesh, name) for name in NAMES}


def members_seen(mesh: Mesh, transport: Transport) -> dict[str, tuple[int, ...]]:
    """Whom a sum of one-hot vectors reaches on each axis: the ranks that are in it."""
    found = {}
    for name, axis in axes(mesh).items():
        mine = torch.zeros(transport.world_size)
        mine[transport.rank] = 1.0
        axis.all_reduce(mine).wait()
        counts = [x.item() for x in mine]
        assert set(counts) <= {0.0, 1.0}
        found[name] = tuple(rank for rank, count in enumerate(counts) if count)
    return found


def places(transport: Transport, shape: MeshShape) -> list[dict[str, tuple[int, ...]]]:
    """What each axis reaches, in two meshes made one after the other."""
    found = []
    for _ in range(2):
        mesh = Mesh.create(shape, transport)
        assert mesh.rank == transport.rank and mesh.device == torch.device("cpu")
        for name, axis in axes(mesh).items():
            assert axis.name == name
            if axis.size > 1:
                assert axis.ranks[axis.index] == transport.rank
        found.append(members_seen(mesh, transport))
        mesh.close()
    return found


def use_every_operation(transport: Transport) -> dict[str, Tensor]:
    mesh = Mesh.create(MeshShape(dp=2), transport)
    mine = torch.tensor([[1.0 + mesh.rank, 10.0]])
    both = torch.cat([mine, mine + 2.0])
    found = {
        "all_reduce": mine.clone(),
        "max": mine.clone(),
        "all_gather": torch.empty(2, 2),
        "reduce_scatter": torch.empty(1, 2),
        "broadcast": mine.clone(),
    }
    mesh.dp.all_reduce(found["all_reduce"]).wait()
    mesh.dp.all_reduce(found["max"], "max").wait()
    mesh.dp.all_gather(found["all_gather"], mine).wait()
    mesh.dp.reduce_scatter(found["reduce_scatter"], both).wait()
    mesh.dp.broadcast(found["broadcast"], 1).wait()
    whole, sums = torch.zeros(4, 3), torch.cat([both, both + 10.0])
    part = whole[2 * mesh.rank : 2 * mesh.rank + 2]
    mesh.dp.all_gather(whole, part.fill_(1.0 + mesh.rank)).wait()
    part = sums[2 * mesh.rank : 2 * mesh.rank + 2]
    mesh.dp.reduce_scatter(part, sums).wait()
    found |= {"all_gather in place": whole, "reduce_scatter in place": part.clone()}
    mesh.close()
    return found


def train(w: float, axis: Axis, steps: int = 3) -> float:
    """Gradient descent of (w - target)^2 / 2, each rank of the axis with its own target."""
    for _ in range(steps):
        gradient = torch.tensor([w - axis.index])
        axis.all_reduce(gradient).wait()
        w -= 0.5 * gradient.item() / axis.size
    return w


def two_models(transport: Transport) -> tuple[list[str], float]:
    """Ranks 0 and 1 train one model over dp, ranks 2 and 3 another over tp, in one job."""
    first = Mesh.create(MeshShape(dp=2), transport, first_rank=0)
    second = Mesh.create(MeshShape(tp=2), transport, first_rank=2)
    joined = [
        f"{which}.{name} {axis.ranks}"
        for which, mesh in (("first", first), ("second", second))
        for name, axis in axes(mesh).items()
        if axis.size > 1
    ]
    result = train(0.0, first.dp) if transport.rank < 2 else train(8.0, second.tp)
    second.close()
    first.close()
    return joined, result


def group_counts(transport: Transport, shape: MeshShape, cycles: int) -> list[tuple[int, int]]:
    """Groups made and process groups alive, after each of some meshes."""
    counting = CountingTransport(transport)
    found: list[tuple[int, int]] = []
    for _ in range(cycles):
        made = counting.num_groups
        mesh = Mesh.create(shape, counting)
        mesh.world.all_reduce(torch.ones(1)).wait()
        mesh.close()
        mesh.close()
        found.append((counting.num_groups - made, len(dist.distributed_c10d._world.pg_map)))
    return found


def further_groups(transport: Transport) -> list[float | None]:
    mesh = Mesh.create(MeshShape(pp=3), transport)
    found: list[float | None] = []
    for group in mesh.new_group([(0, 1), (1, 2)]):
        x = torch.tensor([float(mesh.rank)])
        if group is not None:
            group.all_reduce(x).wait()
        found.append(x.item() if group is not None else None)
    mesh.close()
    return found


def forget_to_close(transport: Transport) -> None:
    Mesh.create(MeshShape(dp=2), transport)


# --- tests -------------------------------------------------------------------------------------


@TRANSPORTS
def test_each_group_joins_its_ranks_and_no_other_also_in_a_second_mesh(transport: str) -> None:
    results = run_ranks(8, places, MeshShape(tp=2, pp=2, dp=2), transport=transport)
    tp, dp = [(0, 1), (2, 3), (4, 5), (6, 7)], [(0, 2), (1, 3), (4, 6), (5, 7)]
    pp, world = [(0, 4), (1, 5), (2, 6), (3, 7)], [tuple(range(8))]
    expected: Mapping[str, Sequence[tuple[int, ...]]]
    expected = {"tp": tp, "pp": pp, "dp": dp, "tie": pp, "world": world}
    for rank, (first, second) in enumerate(results):
        assert first == second
        for name, groups in expected.items():
            assert first[name] == next(g for g in groups if rank in g), (rank, name)


@TRANSPORTS
def test_the_tie_joins_only_the_ends_of_a_pipeline(transport: str) -> None:
    results = run_ranks(3, places, MeshShape(pp=3), transport=transport)
    assert [first["tie"] for first, _ in results] == [(0, 2), (1,), (0, 2)]
    assert [first["pp"] for first, _ in results] == [(0, 1, 2)] * 3


def test_another_order_of_axes_gives_other_groups() -> None:
    results = run_ranks(4, places, MeshShape(tp=2, pp=2, order=("tp", "dp", "pp")))
    assert [first["tp"] for first, _ in results] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [first["pp"] for first, _ in results] == [(0, 1), (0, 1), (2, 3), (2, 3)]


@TRANSPORTS
def test_every_operation_of_an_axis_means_what_it_says(transport: str) -> None:
    first, second = run_ranks(2, use_every_operation, transport=transport)
    for found in first, second:
        assert found["all_reduce"].tolist() == [[3.0, 20.0]]
        assert found["max"].tolist() == [[2.0, 10.0]]
        assert found["all_gather"].tolist() == [[1.0, 10.0], [2.0, 10.0]]
        assert found["broadcast"].tolist() == [[2.0, 10.0]]
    assert first["reduce_scatter"].tolist() == [[3.0, 20.0]]
    assert second["reduce_scatter"].tolist() == [[7.0, 24.0]]
    for found in (first, second):
        assert found["all_gather in place"].tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2
    assert first["reduce_scatter in place"].tolist() == [[3.0, 20.0], [7.0, 24.0]]
    assert second["reduce_scatter in place"].tolist() == [[23.0, 40.0], [27.0, 44.0]]


@TRANSPORTS
def test_two_models_live_in_one_job(transport: str) -> None:
    results = run_ranks(4, two_models, transport=transport)
    first = ["first.dp (0, 1)", "first.world (0, 1)"]
    second = ["second.tp (2, 3)", "second.world (2, 3)"]
    assert [joined for joined, _ in results] == [first, first, second, second]
    # Each goes half of the way to the mean target 0.5 a step, from 0 and from 8.
    assert [w for _, w in results] == [0.4375, 0.4375, 1.4375, 1.4375]


def test_meshes_come_and_go_without_a_trace() -> None:
    shape = MeshShape(tp=2, pp=2)
    results = run_ranks(4, group_counts, shape, 3, full_exit=True, silent=True)
    # Two of tp, two of pp, two ties and the world; the default group stays.
    assert results == [[(7, 1)] * 3] * 4


def test_a_mesh_left_open_is_noticed() -> None:
    with pytest.raises(RankError, match="2 groups were left open"):
        run_ranks(2, forget_to_close)


@TRANSPORTS
def test_further_groups_join_the_ranks_that_they_name(transport: str) -> None:
    results = run_ranks(3, further_groups, transport=transport)
    assert results == [[1.0, None], [1.0, 3.0], [None, 3.0]]


class NotedTransport:
    """Makes no groups, only notes which it was asked for."""

    world_size, device = 4, torch.device("cpu")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.asked: list[tuple[int, ...]] = []

    def new_group(self, ranks: Sequence[int]) -> Group | None:
        self.asked.append(tuple(ranks))
        return None

    def close_group(self, group: Group) -> None:
        raise AssertionError("no group was made")


def test_every_rank_of_the_job_asks_for_the_same_groups_in_the_same_order() -> None:
    asked = []
    for rank in range(4):
        transport = NotedTransport(rank)
        Mesh.create(MeshShape(pp=2), transport, first_rank=2).new_group([(0, 1), (1, 0)])
        asked.append(transport.asked)
    # The pipeline, its tie, the world, and the two groups that follow.
    assert asked == [[(2, 3), (2, 3), (2, 3), (2, 3), (3, 2)]] * 4


def test_an_axis_of_size_1_is_the_identity_without_processes() -> None:
    mesh = Mesh.single()
    x, out = torch.arange(4.0), torch.empty(4)
    for axis in axes(mesh).values():
        assert (axis.index, axis.size, axis.group) == (0, 1, None)
    mesh.tp.all_reduce(x).wait()
    mesh.dp.broadcast(x, 0).wait()
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
    mesh.dp.all_gather(out, x).wait()
    assert torch.equal(out, x)
    mesh.dp.reduce_scatter(out.zero_(), x).wait()
    assert torch.equal(out, x)
    assert mesh.rank == 0 and mesh.device == torch.device("cpu")
    mesh.close()
