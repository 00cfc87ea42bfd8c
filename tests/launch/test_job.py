from __future__ import annotations

import pytest
import torch.distributed as dist

from launch.job import is_secondhand


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"),
        dist.DistBackendError("NCCL error"),
        ConnectionResetError(),
    ],
)
def test_the_loss_of_a_peer_is_told_from_an_error_of_our_own(error: Exception) -> None:
    assert is_secondhand(error)


@pytest.mark.parametrize("error", [ValueError("gloo"), RuntimeError("shape"), ZeroDivisionError()])
def test_an_error_of_our_own_is_shown_at_once(error: Exception) -> None:
    assert not is_secondhand(error)
