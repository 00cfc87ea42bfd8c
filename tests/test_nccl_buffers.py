"""Buffers belong to an operation until ``wait()``: programs that break this, and that keep it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.mesh import Group, Transport, Work
from tests.nccl_programs import broken, close, exchange, groups, under_rules
from tests.nccl_rules import NcclRulesTransport
from tests.ranks import run_ranks


def begin(kind: str, group: Group, mine: Tensor, rank: int) -> tuple[Tensor, Work]:
    """A buffer that will be written on rank 1, and the work that does it."""
    out = torch.zeros(4)
    match kind:
        case "recv":
            return mine, exchange(group, mine, rank)
        case "broadcast":
            return mine, group.broadcast(mine, 0)
        case "all_reduce":
            return mine, group.all_reduce(mine)
        case "all_gather":
            return out, group.all_gather(out, mine)
        case _:
            return mine, group.reduce_scatter(mine, torch.ones(4))


def read_before_and_after_wait(transport: Transport, kind: str) -> list[Tensor]:
    """Outside of the rules, where the host can look."""
    (group,) = made = groups(transport, 1)
    buffer, work = begin(kind, group, torch.full((2,), 1.0 + transport.rank), transport.rank)
    early = buffer.clone()
    work.wait()
    close(transport, made)
    return [early, buffer]


def read_in_a_step(transport: Transport, kind: str, wait_first: bool) -> Tensor:
    (group,) = made = groups(transport, 1)
    with under_rules(transport):
        mine = torch.full((2,), 1.0 + transport.rank)
        buffer, work = begin(kind, group, mine, transport.rank)
        if wait_first or transport.rank == 0:
            work.wait()
        double = buffer.view(-1)[1:] * 2.0
        work.wait()
    close(transport, made)
    return double


RESULTS = pytest.mark.parametrize(
    ("kind", "result"),
    [
        ("recv", [1.0, 1.0]),
        ("broadcast", [1.0, 1.0]),
        ("all_reduce", [3.0, 3.0]),
        ("all_gather", [1.0, 1.0, 2.0, 2.0]),
        ("reduce_scatter", [2.0, 2.0]),
    ],
)


@RESULTS
def test_a_result_is_poison_until_it_was_waited_for(kind: str, result: list[float]) -> None:
    body = read_before_and_after_wait
    (sent, _), (early, late) = run_ranks(2, body, kind, transport="nccl_rules")
    assert early.isnan().all() and late.tolist() == result
    # Who only gives keeps what it has.
    assert sent.isnan().any().item() == (kind not in ("recv", "broadcast"))


@RESULTS
def test_reading_a_result_in_a_step_before_its_wait_raises(kind: str, result: list[float]) -> None:
    report = broken(2, read_in_a_step, kind, False)
    assert report.startswith("rank 1 raised")
    assert f"BorrowedError: aten.mul.Tensor reads the buffer of {kind}" in report
    _, double = run_ranks(2, read_in_a_step, kind, True, transport="nccl_rules")
    assert double.tolist() == [2 * x for x in result[1:]]


def write_in_flight(
    transport: Transport, kind: str, in_a_step: bool, wait_first: bool
) -> list[float]:
    (group,) = made = groups(transport, 1)
    with under_rules(transport) if in_a_step else torch.no_grad():
        x = torch.full((2,), 1.0 + transport.rank)
        work = exchange(group, x, transport.rank) if kind == "send" else group.all_reduce(x)
        if wait_first or transport.rank == 1:
            work.wait()
        if transport.rank == 0:
            x.copy_(torch.full((2,), 9.0))
        work.wait()
    close(transport, made)
    return x.tolist()


@pytest.mark.parametrize(
    ("kind", "later"),
    [
        ("send", "send to rank 1 of float32[2] in group 0 (0, 1): its buffer was overwritten"),
        ("all_reduce", "all_reduce sum of float32[2] in group 0 (0, 1): its result's buffer was"),
    ],
)
def test_a_buffer_in_flight_may_not_be_written(kind: str, later: str) -> None:
    at_once = f"BorrowedError: aten.copy_.default writes the buffer of {kind}"
    assert at_once in broken(2, write_in_flight, kind, True, False)
    assert later in broken(2, write_in_flight, kind, False, False)
    for in_a_step in True, False:
        kept = run_ranks(2, write_in_flight, kind, in_a_step, True, transport="nccl_rules")
        assert kept == [[9.0, 9.0], [1.0, 1.0] if kind == "send" else [3.0, 3.0]]


def never_wait(transport: Transport) -> None:
    groups(transport, 1)[0].all_reduce(torch.zeros(2))


def test_a_work_that_nothing_waited_for_is_named() -> None:
    report = broken(2, never_wait)
    assert "nothing waited for all_reduce sum of float32[2] in group 0 (0, 1)" in report


def synchronize_instead_of_wait(transport: Transport) -> float:
    (group,) = made = groups(transport, 1)
    assert isinstance(transport, NcclRulesTransport)
    with under_rules(transport):
        x = torch.ones(1)
        group.all_reduce(x)
        transport.synchronize()
    close(transport, made)
    return x.item()


def test_synchronize_waits_for_every_queue() -> None:
    assert run_ranks(2, synchronize_instead_of_wait, transport="nccl_rules") == [2.0, 2.0]


def chain_without_wait(transport: Transport, wait_between: bool) -> list[float]:
    """A second communicator takes what the first one gives."""
    a, b = made = groups(transport, 2)
    with under_rules(transport):
        x, y = torch.ones(1), torch.zeros(2)
        first = a.all_reduce(x)
        if wait_between:
            first.wait()
        second = b.all_gather(y, x)
        for work in first, second:
            work.wait()
    close(transport, made)
    return y.tolist()


def test_another_communicator_may_take_a_result_only_after_wait() -> None:
    report = broken(2, chain_without_wait, False)
    assert "BorrowedError: aten.clone.default reads the buffer of all_reduce sum" in report
    assert run_ranks(2, chain_without_wait, True, transport="nccl_rules") == [[2.0, 2.0]] * 2
