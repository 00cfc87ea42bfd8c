"""What the tests of NCCL's rules share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.mesh import Group, Transport, Work
from tests.nccl_rules import NcclRulesTransport
from tests.ranks import RankError, run_ranks

SHORT = 1.0  # seconds that a dead-lock may last; programs that keep the rules have the default


def broken(*args: Any, **options: Any) -> str:
    """The report of a run that must fail."""
    with pytest.raises(RankError) as caught:
        run_ranks(*args, transport="nccl_rules", **options)
    return str(caught.value)


def under_rules(transport: Transport) -> Any:
    assert isinstance(transport, NcclRulesTransport)
    return transport.device_rules()


def groups(transport: Transport, number: int, warm: bool = True) -> list[Group]:
    """Some groups of all ranks, used once where that blocks the host."""
    found = []
    for _ in range(number):
        group = transport.new_group(range(transport.world_size))
        assert group is not None
        if warm:
            group.all_reduce(torch.zeros(1)).wait()
        found.append(group)
    return found


def close(transport: Transport, made: list[Group]) -> None:
    for group in made:
        transport.close_group(group)


def exchange(group: Group, x: Tensor, rank: int) -> Work:
    return group.send(x, 1) if rank == 0 else group.recv(x, 0)
