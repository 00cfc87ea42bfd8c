"""A stage that says which microbatch it is at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from megalite.grads import GradSink
from megalite.pipeline.stage import Stage
from megalite.pipeline.timed import TimedStage
from megalite.pipeline.watched import WatchedStage, stage_kind
from megalite.rows import Rows


class Double(nn.Module):
    def hidden_shape(self, micro_batch_size: int, seq_length: int) -> tuple[int, ...]:
        return (micro_batch_size, seq_length)

    def forward(self, x: Tensor, targets: Tensor | None = None, rows: Rows | None = None) -> Tensor:
        return 2 * x


class Log:
    def __init__(self) -> None:
        self.passes: list[tuple[int, bool, str]] = []

    @contextmanager
    def at(self, microbatch: int, *, forward: bool) -> Iterator[None]:
        self.passes.append((microbatch, forward, "begins"))
        yield
        self.passes.append((microbatch, forward, "ends"))


@pytest.mark.parametrize("timed", [False, True])
def test_each_pass_of_training_is_announced_and_no_other(timed: bool) -> None:
    kind = stage_kind(timed=timed, watched=True)
    stage = kind(Double(), 1, 3, GradSink(), torch.float64, torch.device("cpu"))
    assert isinstance(stage, WatchedStage) and isinstance(stage, TimedStage) is timed
    x = torch.ones(2, dtype=torch.float64)
    stage.forward(7, x)  # before it has a watcher
    stage.watcher = log = Log()
    assert torch.equal(stage.backward(7, x), 2 * x)  # type: ignore[arg-type]
    stage.forward(3, x)
    stage.input_grad(3, x)
    stage.weight_grad(3)
    with torch.no_grad():
        stage.forward(4, x)
    order = [(7, False), (3, True), (3, False)]
    assert log.passes == [(*p, when) for p in order for when in ("begins", "ends")]
    if isinstance(stage, TimedStage):
        assert stage.seconds()[0] > 0


def test_a_stage_that_nobody_watches_is_the_plain_one() -> None:
    assert stage_kind(timed=False, watched=False) is Stage
    assert stage_kind(timed=True, watched=False) is TimedStage
