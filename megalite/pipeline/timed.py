"""A stage that notes how long each of its passes takes, to set beside what was predicted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor

from megalite.pipeline.stage import Stage

Mark = float | torch.cuda.Event
LIMIT = 256
"""Passes of a kind that are kept; later ones are not timed."""


class TimedStage(Stage):
    """Times what the stage computes, with the messages of tp but without those of the pipeline.

    On a GPU by events in the stream: nothing waits for the device before ``seconds`` is asked.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._spans: dict[str, list[tuple[Mark, Mark]]] = {"F": [], "B": [], "I": [], "W": []}

    def forward(self, microbatch: int, *args: Any, **options: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(microbatch, *args, **options)
        with self._timed("F"):
            return super().forward(microbatch, *args, **options)

    def backward(self, microbatch: int, grad: Tensor | None) -> Tensor | None:
        with self._timed("B"):
            return super().backward(microbatch, grad)

    def input_grad(self, microbatch: int, grad: Tensor | None) -> Tensor | None:
        with self._timed("I"):
            return super().input_grad(microbatch, grad)

    def weight_grad(self, microbatch: int) -> None:
        with self._timed("W"):
            super().weight_grad(microbatch)

    def seconds(self) -> tuple[float, float]:
        """Median F and median B (or I + W) of the microbatches so far; 0 where there was none."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        split = self._median("I") + self._median("W")
        return self._median("F"), self._median("B") or split

    @contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        spans = self._spans[kind]
        if len(spans) >= LIMIT:
            yield
            return
        start = self._mark()
        yield
        spans.append((start, self._mark()))

    def _mark(self) -> Mark:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _median(self, kind: str) -> float:
        spans = self._spans[kind]
        return median(_seconds(start, end) for start, end in spans) if spans else 0.0


def _seconds(start: Mark, end: Mark) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    return float(start.elapsed_time(end)) / 1e3
