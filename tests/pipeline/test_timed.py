"""A stage that notes its times, and one that has no layer at all."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from megalite.grads import GradSink
from megalite.pipeline.stage import Stage
from megalite.pipeline.timed import LIMIT, TimedStage


class Slow(torch.autograd.Function):
    """The identity, slowly: twice as slowly back."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        time.sleep(0.002)
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(0.004)
        return grad.clone()


class Layers:
    """Passes on what it gets, at once or slowly."""

    def __init__(self, slow: bool) -> None:
        self.slow = slow

    def __call__(self, x: Tensor, targets: Tensor | None = None, rows: Any = None) -> Tensor:
        return Slow.apply(x) if self.slow else x  # type: ignore[no-any-return]

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter(())

    def hidden_shape(self, micro_batch_size: int, seq_length: int) -> tuple[int, ...]:
        return (seq_length, micro_batch_size, 1)


def middle(kind: type[Stage], slow: bool) -> Stage:
    return kind(Layers(slow), 1, 3, GradSink(), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("split", [False, True])
def test_a_stage_notes_its_passes_in_training_and_not_in_evaluation(split: bool) -> None:
    stage, x = middle(TimedStage, slow=True), torch.ones(4)
    assert isinstance(stage, TimedStage) and stage.seconds() == (0.0, 0.0)
    with torch.no_grad():
        stage.forward(0, x)
    assert stage.seconds() == (0.0, 0.0)
    for m in range(3):
        stage.forward(m, x)
        if split:
            stage.input_grad(m, x)
            stage.weight_grad(m)
        else:
            stage.backward(m, x)
    forward, backward = stage.seconds()
    assert forward >= 0.002 and backward >= 0.004


def test_a_long_run_does_not_fill_the_memory_with_times() -> None:
    stage, x = middle(TimedStage, slow=False), torch.ones(4)
    assert isinstance(stage, TimedStage)
    for m in range(LIMIT + 5):
        stage.forward(m, x)
        stage.backward(m, x)
    assert {len(spans) for spans in stage._spans.values()} == {0, LIMIT}


def test_a_stage_without_layers_passes_on_copies() -> None:
    """What it gets lies in receive buffers, which are filled again while it is still sent."""
    stage, x, dy = middle(Stage, slow=False), torch.ones(4), torch.full((4,), 2.0)
    for split in (False, True):
        out = stage.forward(0, x)
        if split:
            dx = stage.input_grad(0, dy)
            stage.weight_grad(0)
        else:
            dx = stage.backward(0, dy)
        assert dx is not None and torch.equal(out, x) and torch.equal(dx, dy)
        assert out.data_ptr() != x.data_ptr() and dx.data_ptr() != dy.data_ptr()
    with torch.no_grad():
        out = stage.forward(0, x)
    assert out.data_ptr() != x.data_ptr() and stage.live_microbatches == 0
