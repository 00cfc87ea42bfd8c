"""Each rule by the smallest program that breaks it, beside one that keeps it.

Programs that gloo forgives run there, too: this transport must see more than that one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.collectives import copy_to, gather_from, reduce_from, reduce_scatter_to, scatter_to
from megalite.mesh import Mesh, Transport
from megalite.mesh_shape import MeshShape
from tests.nccl_programs import SHORT, broken, close, exchange, groups, under_rules
from tests.nccl_rules import NcclRulesTransport
from tests.ranks import RankError, run_ranks

# --- the host ----------------------------------------------------------------------------------


def send_after_the_peer_is_past_wait(transport: Transport, flag: str) -> float:
    (group,) = made = groups(transport, 1)
    rules = under_rules(transport) if isinstance(transport, NcclRulesTransport) else torch.no_grad()
    with rules:
        x = torch.full((1,), 7.0 * transport.rank)
        if transport.rank == 0:
            group.recv(x, 1).wait()
            Path(flag).touch()
        else:
            while not Path(flag).exists():
                time.sleep(0.001)
            group.send(x, 0).wait()
    close(transport, made)
    return x.item()


def test_wait_stops_the_device_and_not_the_host(tmp_path: Path) -> None:
    body, flag = send_after_the_peer_is_past_wait, str(tmp_path / "flag")
    assert run_ranks(2, body, flag, transport="nccl_rules") == [7.0, 7.0]
    with pytest.raises(RankError):
        run_ranks(2, body, str(tmp_path / "other"), transport="gloo", group_timeout_s=SHORT)


def read_on_the_host(transport: Transport, allowed: int) -> float:
    (group,) = made = groups(transport, 1)
    assert isinstance(transport, NcclRulesTransport)
    with transport.device_rules(host_reads=allowed):
        x = torch.ones(1)
        group.all_reduce(x).wait()
        value = x.item()
    close(transport, made)
    return value


def test_a_host_read_in_a_step_raises() -> None:
    assert "HostReadError: aten._local_scalar_dense" in broken(2, read_on_the_host, 0)
    assert run_ranks(2, read_on_the_host, 1, transport="nccl_rules") == [2.0, 2.0]


# --- one queue a communicator ------------------------------------------------------------------


def send_and_receive(transport: Transport, num_groups: int, rank_1_first: str) -> float:
    """Both ranks send and receive, rank 0 in that order, on one group or on one a direction."""
    made = groups(transport, num_groups)
    to_1, to_0 = made[0], made[-1]
    with under_rules(transport):
        mine, theirs = torch.full((1,), float(transport.rank)), torch.empty(1)
        if transport.rank == 0:
            works = [to_1.send(mine, 1), to_0.recv(theirs, 1)]
        elif rank_1_first == "recv":
            works = [to_1.recv(theirs, 0), to_0.send(mine, 0)]
        else:
            works = [to_0.send(mine, 0), to_1.recv(theirs, 0)]
        for work in works:
            work.wait()
    close(transport, made)
    return theirs.item()


def test_two_sends_that_face_each_other_in_one_communicator_dead_lock() -> None:
    report = broken(2, send_and_receive, 1, "send", group_timeout_s=SHORT)
    assert "is at send to rank 1 of float32[1]" in report
    assert "is at send to rank 0 of float32[1]" in report


@pytest.mark.parametrize(("num_groups", "rank_1_first"), [(1, "recv"), (2, "recv"), (2, "send")])
def test_a_communicator_a_direction_or_the_same_order_does_not(
    num_groups: int, rank_1_first: str
) -> None:
    body = send_and_receive
    assert run_ranks(2, body, num_groups, rank_1_first, transport="nccl_rules") == [1.0, 0.0]


def wait_in_a_circle(transport: Transport, rank_1_first: str) -> list[float]:
    """Rank 0 receives on a, then sends on b; in between it waits."""
    a, b = made = groups(transport, 2)
    with under_rules(transport):
        got, mine = torch.empty(1), torch.full((1,), float(transport.rank))
        if transport.rank == 0:
            a.recv(got, 1).wait()
            b.send(mine, 1).wait()
        elif rank_1_first == "send":
            a.send(mine, 0).wait()
            b.recv(got, 0).wait()
        else:
            b.recv(got, 0).wait()
            a.send(mine, 0).wait()
    close(transport, made)
    return got.tolist()


def test_a_circle_through_two_communicators_is_told_with_what_each_rank_waits_for() -> None:
    report = broken(2, wait_in_a_circle, "recv", group_timeout_s=SHORT)
    assert f"has waited {SHORT:g} s for rank" in report
    for line in (
        "rank 0, compute stream: at wait for recv from rank 1 of float32[1] in group 0 (0, 1)",
        "group 0 of ranks (0, 1): at recv from rank 1 of float32[1]",
        "group 1 of ranks (0, 1): at send to rank 1 of float32[1] in group 1 (0, 1), which the "
        "compute stream has not come to",
        "rank 1, compute stream: at wait for recv from rank 0 of float32[1] in group 1 (0, 1)",
    ):
        assert line in report, report
    assert run_ranks(2, wait_in_a_circle, "send", transport="nccl_rules") == [[1.0], [0.0]]


def collective_beside_a_message(transport: Transport, num_groups: int) -> float:
    """Rank 0 reduces, then sends; rank 1 receives, then reduces."""
    made = groups(transport, num_groups)
    reducing, sending = made[0], made[-1]
    with under_rules(transport):
        x, y = torch.ones(1), torch.full((1,), float(transport.rank))
        works = [lambda: reducing.all_reduce(x), lambda: exchange(sending, y, transport.rank)]
        for issued in [issue() for issue in works[:: 1 - 2 * transport.rank]]:
            issued.wait()
    close(transport, made)
    return x.item() + y.item()


def test_collectives_and_messages_share_the_queue() -> None:
    report = broken(2, collective_beside_a_message, 1, group_timeout_s=SHORT)
    assert "is at all_reduce sum" in report and "is at recv from rank 0" in report
    assert run_ranks(2, collective_beside_a_message, 2, transport="nccl_rules") == [2.0, 2.0]


def use_two_groups_first_in_two_orders(transport: Transport, lazy_init: bool) -> float:
    assert isinstance(transport, NcclRulesTransport)
    transport.lazy_init = lazy_init
    a, b = made = groups(transport, 2, warm=False)
    with under_rules(transport):
        mine, theirs = torch.full((1,), float(transport.rank)), torch.empty(1)
        if transport.rank == 0:
            works = [a.recv(theirs, 1), b.send(mine, 1)]
        else:
            works = [b.recv(theirs, 0), a.send(mine, 0)]
        for work in works:
            work.wait()
    close(transport, made)
    return theirs.item()


def test_the_first_use_of_a_communicator_blocks_the_host() -> None:
    report = broken(2, use_two_groups_first_in_two_orders, True, group_timeout_s=SHORT)
    assert "the host-blocking first use of group 0 (0, 1)" in report
    assert "at the host-blocking first use of group 1 (0, 1)" in report
    body = use_two_groups_first_in_two_orders
    assert run_ranks(2, body, False, transport="nccl_rules") == [1.0, 0.0]


# --- what both ends must agree on --------------------------------------------------------------


def exchange_unlike(transport: Transport, kind: str, like: Any) -> None:
    (group,) = made = groups(transport, 1)
    x = torch.ones(4) if transport.rank == 0 else torch.ones(like[0], dtype=like[1])
    (group.all_reduce(x) if kind == "all_reduce" else exchange(group, x, transport.rank)).wait()
    close(transport, made)


@pytest.mark.parametrize("kind", ["all_reduce", "message"])
@pytest.mark.parametrize(
    ("like", "shown"), [((8, torch.bfloat16), "bfloat16[8]"), ((3, torch.float32), "float32[3]")]
)
def test_a_size_or_type_that_differs_is_named_by_both(kind: str, like: Any, shown: str) -> None:
    report = broken(2, exchange_unlike, kind, like)
    first = "all_reduce sum" if kind == "all_reduce" else "send to rank 1"
    second = "all_reduce sum" if kind == "all_reduce" else "recv from rank 0"
    assert f"rank 0 is at {first} of float32[4]" in report
    assert f"rank 1 is at {second} of {shown}" in report


def test_the_same_bytes_in_another_type_pass_gloo() -> None:
    run_ranks(2, exchange_unlike, "message", (8, torch.bfloat16), transport="gloo")


def mismatch_of_three(transport: Transport) -> None:
    (group,) = made = groups(transport, 1)
    x = torch.ones(2)
    (group.broadcast(x, 0) if transport.rank == 2 else group.all_reduce(x)).wait()
    close(transport, made)


def test_a_mismatch_reaches_the_members_that_agree() -> None:
    report = broken(3, mismatch_of_three)
    assert report.count("rank 2 is at broadcast from rank 0") >= 2
    assert "Peer is gone" not in report.partition("\nrank ")[0]


def refuse(transport: Transport) -> list[str]:
    (group,) = made = groups(transport, 1)
    x = torch.ones(2, 2)
    attempts: list[Callable[[], object]] = [
        lambda: group.all_reduce(x.t()[:1]),
        lambda: group.all_reduce(x.to(torch.int16)),
        lambda: group.all_reduce(x, "avg"),
        lambda: group.all_gather(torch.ones(3), torch.ones(2)),
        lambda: group.reduce_scatter(torch.ones(2), torch.ones(4, dtype=torch.float64)),
        lambda: group.send(x, 1 - transport.rank, tag=1),  # type: ignore[call-arg]
    ]
    found = []
    for attempt in attempts:
        try:
            attempt()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    close(transport, made)
    return found


def test_what_nccl_has_not_is_refused() -> None:
    for found in run_ranks(2, refuse, transport="nccl_rules"):
        contiguous, int16, average, gather, scatter, tag = found
        assert contiguous.startswith("RuleError") and "contiguous" in contiguous
        assert int16.startswith("RuleError") and "int16" in int16
        assert average.startswith("ValueError") and "avg" in average
        assert gather == "ValueError: float32[3] is not 2 times float32[2]"
        assert scatter == "ValueError: float64[4] is not 2 times float32[2]"
        assert tag.startswith("TypeError") and "tag" in tag


# --- a program that keeps every rule -----------------------------------------------------------


def train_an_mlp(transport: Transport) -> list[Tensor]:
    """Tensor parallel with and without sequence parallelism, in two steps of training."""
    mesh = Mesh.create(MeshShape(tp=2), transport)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, target, up, down = draw(4, 3, 8), draw(4, 3, 8), draw(16, 8), draw(8, 16)
    rank = mesh.tp.index
    weights = [
        torch.nn.Parameter(w.contiguous()) for w in (up.chunk(2)[rank], down.chunk(2, 1)[rank])
    ]

    def loss(sequence_parallel: bool) -> Tensor:
        if not sequence_parallel:
            y = F.gelu(F.linear(copy_to(x, mesh.tp), weights[0]))
            return F.mse_loss(reduce_from(F.linear(y, weights[1]), mesh.tp), target)
        y = F.gelu(F.linear(gather_from(scatter_to(x, mesh.tp), mesh.tp), weights[0]))
        y = reduce_scatter_to(F.linear(y, weights[1]), mesh.tp)
        return F.mse_loss(y, target.chunk(2)[rank]) * 0.5

    def steps() -> list[Tensor]:
        losses = []
        for sequence_parallel in (False, True):
            value = loss(sequence_parallel)
            value.backward()
            with torch.no_grad():
                for w in weights:
                    assert w.grad is not None
                    w.sub_(0.1 * w.grad)
                    w.grad = None
            losses.append(value.detach())
        return losses

    mesh.tp.all_reduce(torch.zeros(1)).wait()
    if isinstance(transport, NcclRulesTransport):
        with transport.device_rules():
            found = steps()
    else:
        found = steps()
    mesh.close()
    return found + [w.detach() for w in weights]


def test_a_program_that_keeps_the_rules_computes_what_gloo_computes() -> None:
    expected, got = run_ranks(2, train_an_mlp), run_ranks(2, train_an_mlp, transport="nccl_rules")
    assert expected[0][0] > 0.1
    for a, b in zip(expected, got, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
