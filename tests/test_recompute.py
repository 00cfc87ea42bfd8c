"""Recompute: every bit as without it, in all orders of F, B, I and W, and less kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launch.config import Config
from megalite.grads import main_grad
from megalite.mesh import Axis, Mesh, Transport
from megalite.mesh_shape import MeshShape
from megalite.recompute import recomputed
from model.config import GPTConfig
from tests.parity.harness import GPT2, LLAMA, TRAIN, batch_of, config
from tests.pipeline.test_stage import KINDS, SWAPPED, WHOLE, inputs, outcome, stage_of
from tests.ranks import run_ranks

ORDERS = (WHOLE, "F0 F1 I0 I1 W0 W1", SWAPPED)
MODES = ("selective", "full")


def config_of(base: GPTConfig, mode: str, dtype: Any, tp: int = 1, **more: Any) -> Config:
    """Six layers, two a stage, with dropout and documents."""
    train = replace(TRAIN, global_batch_size=4, dtype=dtype)
    model = replace(base, dropout=0.2, num_layers=6)
    return config(model, train=train, tp=tp, recompute=mode, reset_at_document=True, **more)


def compare(
    base: GPTConfig,
    dtype: str,
    tp: Axis,
    kinds: tuple[str, ...] = KINDS,
    orders: tuple[str, ...] = ORDERS,
    **more: Any,
) -> None:
    for kind in kinds:
        for order in orders:
            plain = outcome(kind, config_of(base, "none", dtype, tp.size, **more), tp, order)
            for mode in MODES:
                again = outcome(kind, config_of(base, mode, dtype, tp.size, **more), tp, order)
                for a, b in zip(plain, again, strict=True):
                    assert torch.equal(a, b), (kind, order, mode, dtype)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("base", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_gradients_are_equal_to_the_bit(base: GPTConfig, dtype: str) -> None:
    compare(base, dtype, Axis("tp"))


def compare_on_ranks(transport: Transport) -> None:
    mesh = Mesh.create(MeshShape(tp=2), transport)
    for base in (GPT2, LLAMA):
        for cut in (False, True):
            kinds, orders = ("middle", "alone"), ("F0 F1 B0 I1 W1",)
            compare(base, "fp32", mesh.tp, kinds, orders, sequence_parallel=cut)
    mesh.close()


def test_so_they_are_with_tensor_and_sequence_parallelism() -> None:
    run_ranks(2, compare_on_ranks)


def queued(mode: str) -> tuple[list[int], int]:
    """Weights of each product that I puts off, and matrices that have a gradient before W."""
    cfg = config_of(GPT2, mode, "fp32")
    stage = stage_of("middle", cfg, Axis("tp"))
    (x, _, dy), _ = inputs("middle", cfg, stage)
    stage.forward(0, x, None, batch_of(cfg, 0, 0, 1).rows(0))
    stage.input_grad(0, dy)
    weights = stage._saved[0].weights
    assert weights is not None
    early = sum(bool(main_grad(p).any()) for p in stage.module.parameters() if p.ndim == 2)
    stage.weight_grad(0)
    return [len(product.weights) for product in weights], early


def test_weight_products_of_recomputed_blocks_are_put_off_to_w_too() -> None:
    plain = queued("none")
    assert plain == ([1, 1, 1, 3] * 2, 0)
    assert queued("selective") == queued("full") == plain


# --- the function itself -----------------------------------------------------------------------


class Part(nn.Module):
    """Counts how often it runs; ``fault`` makes the second time come out otherwise."""

    def __init__(self, fault: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64))
        self.runs, self.fault = 0, fault

    def forward(self, x: Tensor, power: int, other: Tensor) -> Tensor:
        self.runs += 1
        y = (x * self.weight) ** power * other
        return y * 2 if self.fault and self.runs > 1 else y


def grads_of(part: Part, again: bool) -> tuple[Tensor | None, ...]:
    x = torch.arange(6.0, dtype=torch.float64).requires_grad_()
    other = torch.full((6,), 0.5, dtype=torch.float64)
    out = (recomputed(part) if again else part)(x * 1.0, 3, other)
    out.sum().backward()
    assert other.grad is None
    return x.grad, part.weight.grad


def same(a: tuple[Tensor | None, ...], b: tuple[Tensor | None, ...]) -> bool:
    return all(
        x is not None and y is not None and torch.equal(x, y) for x, y in zip(a, b, strict=True)
    )


def test_a_part_runs_twice_and_only_in_training() -> None:
    part = Part()
    assert same(grads_of(part, True), grads_of(Part(), False))
    assert part.runs == 2
    assert not same(grads_of(Part(fault=True), True), grads_of(Part(), False))
    with torch.no_grad():
        recomputed(part)(torch.ones(6), 2, torch.ones(6))
    assert part.runs == 3


def test_an_input_that_was_written_since_is_an_error() -> None:
    x = torch.ones(6, dtype=torch.float64, requires_grad=True) * 1.0
    out = recomputed(Part())(x, 2, torch.ones(6, dtype=torch.float64))
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
