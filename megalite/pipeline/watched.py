"""A stage that says which microbatch it is at, to whatever looks at its layers from outside."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from megalite.pipeline.stage import Stage
from megalite.pipeline.timed import TimedStage


class Watcher(Protocol):
    """Follows a stage; hooks on its modules ask it where they are."""

    def at(self, microbatch: int, *, forward: bool) -> AbstractContextManager[None]: ...


class WatchedStage(Stage):
    """Tells ``watcher``, once it has one, of each pass of training that begins and ends."""

    watcher: Watcher | None = None

    def forward(self, microbatch: int, *args: Any, **options: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(microbatch, *args, **options)
        with self._at(microbatch, forward=True):
            return super().forward(microbatch, *args, **options)

    def backward(self, microbatch: int, grad: Tensor | None) -> Tensor | None:
        with self._at(microbatch, forward=False):
            return super().backward(microbatch, grad)

    def input_grad(self, microbatch: int, grad: Tensor | None) -> Tensor | None:
        with self._at(microbatch, forward=False):
            return super().input_grad(microbatch, grad)

    def _at(self, microbatch: int, *, forward: bool) -> AbstractContextManager[None]:
        return self.watcher.at(microbatch, forward=forward) if self.watcher else nullcontext()


class TimedWatchedStage(WatchedStage, TimedStage):
    """Both; the times then include what the watcher does inside."""


def stage_kind(*, timed: bool, watched: bool) -> type[Stage]:
    """The class of stages that does what is asked, and no more."""
    if watched:
        return TimedWatchedStage if timed else WatchedStage
    return TimedStage if timed else Stage
