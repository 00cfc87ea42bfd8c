"""Numbers of a step are read a step later, each once and as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalite.lagged import Lagged


def test_readings_come_one_step_late_in_order_and_once() -> None:
    lagged = Lagged()
    lagged.push(1, torch.tensor([1.0, 2.0]), lr=0.1)
    assert lagged.pop() == []
    lagged.push(2, torch.tensor(3.0, dtype=torch.float64), lr=0.2)
    (first,) = lagged.pop()
    assert (first.step, first.values, first.host) == (1, [1.0, 2.0], {"lr": 0.1})
    assert lagged.pop() == []
    (second,) = lagged.flush()
    assert (second.step, second.values, second.host) == (2, [3.0], {"lr": 0.2})
    assert lagged.flush() == [] == lagged.pop()


def test_a_buffer_that_the_next_step_overwrites_keeps_its_reading() -> None:
    lagged, buffer = Lagged(), torch.zeros(2)
    lagged.push(1, buffer)
    buffer.fill_(7.0)
    assert lagged.flush()[0].values == [0.0, 0.0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_host_does_not_wait_for_the_device_that_still_computes() -> None:
    cuda: Any = torch.cuda
    lagged, buffer, busy = Lagged(), torch.zeros(2, device="cuda"), cuda.Event()
    cuda._sleep(10**9)
    busy.record()
    lagged.push(1, buffer + 1.0)
    assert not busy.query(), "the push waited for the device"
    assert lagged.flush()[0].values == [1.0, 1.0]
    assert busy.query(), "the flush did not wait for the device"
