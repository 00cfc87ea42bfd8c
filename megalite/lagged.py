"""The numbers of a step, read from the device when it has them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reading:
    """What ``Lagged`` gives back of one step: host values as pushed, the tensor's as floats."""

    step: int
    values: list[float]
    host: dict[str, Any]


class Lagged:
    """Reads a step's numbers from the device one step later, so that no step waits for them.

    ``push`` starts the copy and returns at once. ``pop`` gives the steps before the last pushed,
    which the device has done by then; ``flush`` waits for all, as must be before a checkpoint
    counts: a step that is saved must have its line.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[int, Tensor, torch.cuda.Event | None, dict[str, Any]]] = deque()

    def push(self, step: int, tensor: Tensor, **host: Any) -> None:
        """Take a copy of ``tensor`` (any shape, small), which may be overwritten afterwards."""
        source = tensor.detach().reshape(-1)
        if source.device.type != "cuda":
            self._pending.append((step, source.clone(), None, host))
            return
        copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        copy.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(source.device))
        self._pending.append((step, copy, done, host))

    def pop(self) -> list[Reading]:
        """The readings of all steps but the last pushed, oldest first, each given once."""
        return [self._read() for _ in range(len(self._pending) - 1)]

    def flush(self) -> list[Reading]:
        """The readings of all steps, oldest first, each given once."""
        return [self._read() for _ in range(len(self._pending))]

    def _read(self) -> Reading:
        step, tensor, done, host = self._pending.popleft()
        if done is not None:
            done.synchronize()
        return Reading(step, tensor.tolist(), host)
