"""How far clocks of several hosts are apart, measured over real messages."""

from __future__ import annotations

import time

import torch

from megalite.clock import clock_of, clock_offset, host_id
from megalite.mesh import Axis, Mesh, Transport
from megalite.mesh_shape import MeshShape
from megalite.trace import HostClock, Offset
from tests.ranks import run_ranks

HOSTS = (7, 5, 7, 5)  # ranks 1 and 3 share a host whose clock is ahead
AHEAD_S = 1234.5


def measure(transport: Transport) -> tuple[Offset, Offset]:
    mesh = Mesh.create(MeshShape(dp=4), transport)
    real = clock_offset(mesh.world, mesh.device)
    host = HOSTS[mesh.rank]
    ahead = AHEAD_S if host == 5 else 0.0
    faked = clock_offset(mesh.world, mesh.device, host=host, now=lambda: time.monotonic() + ahead)
    mesh.close()
    return real, faked


def test_ranks_of_a_host_share_a_clock_and_others_measure_theirs() -> None:
    found = run_ranks(4, measure)
    for rank, (real, faked) in enumerate(found):
        assert (real.seconds, real.uncertainty_s, real.shared) == (0.0, 0.0, True)
        if HOSTS[rank] == 7:
            assert (faked.seconds, faked.uncertainty_s, faked.shared) == (0.0, 0.0, True)
            continue
        assert not faked.shared and 0 < faked.uncertainty_s < 1.0
        # The true value lies in the bounds, whatever the load of the machine.
        assert abs(faked.seconds - AHEAD_S) <= faked.uncertainty_s
    assert found[1][1].seconds == found[3][1].seconds


def test_a_rank_alone_asks_nobody() -> None:
    assert clock_offset(Axis("world"), torch.device("cpu")).shared
    assert isinstance(clock_of(torch.device("cpu")), HostClock)
    assert host_id() == host_id() and 0 <= host_id() < 2**63
