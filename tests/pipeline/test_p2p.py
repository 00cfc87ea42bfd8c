"""Channels: one group for each sender, receiver and kind, made and joined in one order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megalite.mesh import DONE, Axis, Mesh, Work
from megalite.mesh_shape import MeshShape
from megalite.pipeline.p2p import Channels, channels_of
from megalite.schedule.action import Action, Plan
from megalite.schedule.generators import build_schedule, forward_only
from megalite.schedule.lower import lower


class Wire:
    """A group that writes down who says what to whom."""

    def __init__(self, log: list[tuple[str, int, int]], ranks: tuple[int, ...]) -> None:
        self.log, self.ranks = log, ranks

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Work:
        return DONE

    def send(self, tensor: Tensor, dst: int) -> Work:
        self.log.append(("send", self.ranks[1 - dst], self.ranks[dst]))
        return DONE

    def recv(self, tensor: Tensor, src: int) -> Work:
        self.log.append(("recv", self.ranks[src], self.ranks[1 - src]))
        return DONE


class Switch:
    """A transport whose groups are wires; ``made`` are the groups that were asked for."""

    device = torch.device("cpu")

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.made: list[tuple[int, ...]] = []
        self.log: list[tuple[str, int, int]] = []

    def new_group(self, ranks: Sequence[int]) -> Wire | None:
        self.made.append(tuple(ranks))
        return Wire(self.log, tuple(ranks)) if self.rank in ranks else None

    def close_group(self, group: Wire) -> None:
        pass


def plan_of(name: str, pp: int, virtual_stages: int = 1) -> Plan:
    return lower(build_schedule(name, pp, 6, virtual_stages))


V_SHAPE = lower(
    Plan(
        "v",
        1,
        (0, 1, 1, 0),
        tuple(
            tuple(map(Action.parse, text.split()))
            for text in ("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")
        ),
    )
)


def test_neighbours_have_a_channel_each_way() -> None:
    assert channels_of(plan_of("1f1b", 3)) == [(0, 1, "F"), (1, 0, "B"), (1, 2, "F"), (2, 1, "B")]
    assert channels_of(plan_of("1f1b", 1)) == []


def test_with_more_stages_the_ends_are_neighbours_too() -> None:
    found = channels_of(plan_of("interleaved_1f1b", 3, 2))
    assert found == [
        (0, 1, "F"),
        (0, 2, "B"),
        (1, 0, "B"),
        (1, 2, "F"),
        (2, 0, "F"),
        (2, 1, "B"),
    ]


def test_in_a_v_both_kinds_go_the_same_way_on_channels_of_their_own() -> None:
    assert channels_of(V_SHAPE) == [(0, 1, "B"), (0, 1, "F"), (1, 0, "B"), (1, 0, "F")]


@pytest.mark.parametrize(
    "plan",
    [plan_of("1f1b", 3), plan_of("interleaved_1f1b", 3, 2), plan_of("looped_bfs", 2, 3), V_SHAPE],
    ids=lambda p: f"{p.name}-{p.pp}",
)
def test_an_evaluation_needs_no_further_channel(plan: Plan) -> None:
    evaluation = lower(forward_only(plan.rank_of, 5))
    assert set(channels_of(evaluation)) < set(channels_of(plan))


@pytest.mark.parametrize(
    "plan",
    [plan_of("1f1b", 2), plan_of("interleaved_1f1b", 4, 2), V_SHAPE],
    ids=lambda p: f"{p.name}-{p.pp}",
)
def test_all_ranks_make_the_same_groups_and_join_them_without_waiting_in_a_ring(
    plan: Plan,
) -> None:
    shape = MeshShape(tp=2, pp=plan.pp, dp=2)
    switches = [Switch(rank, shape.world_size) for rank in range(shape.world_size)]
    meshes = [Mesh.create(shape, switch) for switch in switches]  # type: ignore[arg-type]
    before = len(switches[0].made)
    channels = [Channels(mesh, plan) for mesh in meshes]
    made = switches[0].made[before:]
    assert all(switch.made[before:] == made for switch in switches)
    assert len(made) == 4 * len(channels_of(plan))
    columns = set(shape.groups("pp"))
    for sender, receiver in made:
        assert any({sender, receiver} <= set(column) for column in columns)

    # Blocking, one message at a time: whatever order the ranks come in, it ends.
    waiting = [list(switch.log) for switch in switches]
    assert all(waiting)
    while any(waiting):
        heads = [log[0] for log in waiting if log]
        pairs = [h for h in heads if h[0] == "send" and ("recv", *h[1:]) in heads]
        assert pairs, "every rank waits for another"
        _, sender, receiver = pairs[0]
        waiting[sender].pop(0)
        waiting[receiver].pop(0)

    for switch in switches:
        switch.log.clear()
    for mesh, mine in zip(meshes, channels, strict=True):
        for sender, receiver, kind in channels_of(plan):
            if sender == mesh.pp.index:
                mine.send(kind, receiver, torch.zeros(1))
            if receiver == mesh.pp.index:
                mine.recv(kind, sender, torch.zeros(1))
    for rank, switch in enumerate(switches):
        assert all((s if what == "send" else r) == rank for what, s, r in switch.log)
    sends = [e[1:] for switch in switches for e in switch.log if e[0] == "send"]
    recvs = [e[1:] for switch in switches for e in switch.log if e[0] == "recv"]
    assert sorted(sends) == sorted(recvs)
    assert len(sends) == len(made)


def test_a_rank_has_only_its_own_channels() -> None:
    shape = MeshShape(pp=3)
    mesh = Mesh.create(shape, Switch(0, 3))  # type: ignore[arg-type]
    channels = Channels(mesh, plan_of("1f1b", 3))
    channels.send("F", 1, torch.zeros(1))
    with pytest.raises(KeyError):
        channels.send("F", 2, torch.zeros(1))
    with pytest.raises(KeyError):
        channels.recv("F", 1, torch.zeros(1))
    assert mesh.tp == Axis("tp")


def test_without_a_pipeline_nothing_is_made() -> None:
    Channels(Mesh.single(), plan_of("1f1b", 1))
