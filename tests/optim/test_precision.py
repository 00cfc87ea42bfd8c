"""bf16 models: masters and gradient sums are fp32, and that matters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from launch.build import Training, build, describe
from launch.config import Config
from megalite.mesh import Mesh, Transport
from megalite.mesh_shape import MeshShape
from megalite.optim.config import OptimConfig
from megalite.slices import get_slice
from tests.counting import CountingTransport
from tests.parity.harness import GPT2, LLAMA, TRAIN, batch_of, config
from tests.ranks import run_ranks

SMALL = replace(GPT2, num_layers=2)
SLOW = OptimConfig(lr=1e-4, lr_schedule="constant", weight_decay=0.0)


def in_dtype(dtype: Any, **train: Any) -> Config:
    cfg = config(SMALL, train=replace(TRAIN, dtype=dtype, **train))
    return replace(cfg, optim=SLOW)


def norms(training: Training) -> dict[str, Tensor]:
    """What each norm's weight has moved from 1, in the masters."""
    pairs = zip(training.flat.buckets, training.optimizer.masters, strict=True)
    return {
        get_slice(p).name: view.double() - 1
        for bucket, master in pairs
        for p, view in bucket.views(master)
        if get_slice(p).name.endswith("norm.weight")
    }


@pytest.fixture(scope="module")
def hundred_steps() -> dict[str, Training]:
    found = {}
    for dtype in ("fp32", "bf16"):
        cfg = in_dtype(dtype, global_batch_size=4, micro_batch_size=4)
        found[dtype] = build(cfg, Mesh.single())
        batches = [batch_of(cfg, step, 0, 1) for step in range(4)]
        for step in range(100):
            found[dtype].step(batches[step % 4], cfg.optim.lr)
    return found


def test_a_hundred_small_updates_move_every_norm_as_in_fp32(
    hundred_steps: dict[str, Training],
) -> None:
    wide, narrow = norms(hundred_steps["fp32"]), norms(hundred_steps["bf16"])
    assert len(narrow) == 5
    assert narrow.keys() == wide.keys()
    for name, moved in narrow.items():
        assert bool((moved != 0).all()), f"an element of {name} has not moved"
        size, expected = float(moved.norm()), float(wide[name].norm())
        assert size == pytest.approx(expected, rel=0.05), name
        assert expected > 1e-3
    published = [
        p
        for p in hundred_steps["bf16"].flat.parameters()
        if get_slice(p).name.endswith("norm.weight")
    ]
    for param in published:
        assert param.dtype is torch.bfloat16
        assert bool((param != 1).any()), "the model does not see that its norm has moved"


def test_without_masters_the_norms_would_stand_still(hundred_steps: dict[str, Training]) -> None:
    weight = torch.ones(32, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([weight], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert bool((weight == 1).all())


def test_masters_sums_and_moments_are_fp32_and_the_log_says_so(
    hundred_steps: dict[str, Training],
) -> None:
    training = hundred_steps["bf16"]
    for bucket, master in zip(training.flat.buckets, training.optimizer.masters, strict=True):
        assert bucket.weight.dtype is torch.bfloat16
        assert bucket.grad.dtype is master.dtype is torch.float32
        assert torch.equal(master.bfloat16(), bucket.weight)
        state = training.optimizer.inner.state[master]
        assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is torch.float32
    text = describe(training)
    assert "in bf16" in text
    assert "master weights and moments in float32" in text


def gradients(dtype: str, num_microbatches: int, *, narrow_sums: bool = False) -> Tensor:
    """The gradient of a step, one vector; from the same (bf16) weights in every dtype."""
    cfg = in_dtype(dtype, global_batch_size=num_microbatches, micro_batch_size=1)
    training = build(cfg, Mesh.single())
    for bucket in training.flat.buckets:
        bucket.weight.copy_(bucket.weight.bfloat16())
    if narrow_sums:
        for param in training.flat.parameters():
            param.main_grad = torch.zeros_like(param)  # type: ignore[attr-defined]
    training.gradients(batch_of(cfg, 0, 0, 1))
    grads = [p.main_grad for p in training.flat.parameters()]  # type: ignore[attr-defined]
    return torch.cat([g.double().flatten() for g in grads])


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def test_the_error_of_bf16_gradients_does_not_grow_with_the_number_of_microbatches() -> None:
    few, many = gradients("fp32", 4), gradients("fp32", 64)
    error = relative(gradients("bf16", 4), few), relative(gradients("bf16", 64), many)
    assert max(error) < 1e-2, error
    assert error[1] < 1.2 * error[0], error
    # That of sums in the dtype of the weights does.
    narrow = (
        relative(gradients("bf16", 4, narrow_sums=True), few),
        relative(gradients("bf16", 64, narrow_sums=True), many),
    )
    assert narrow[1] > 1.5 * narrow[0], narrow


def dtypes_of_a_step(transport: Transport) -> tuple[set[str], set[str], list[float]]:
    """What is sent over dp and over tp in a bf16 step of tp 2 x dp 2; losses of two steps."""
    counting = CountingTransport(transport)
    mesh = Mesh.create(MeshShape(tp=2, dp=2), counting)
    cfg = config(LLAMA, train=replace(TRAIN, dtype="bf16"), tp=2, sequence_parallel=True)
    training = build(cfg, mesh)
    counting.reset()
    losses = []
    for step in range(2):
        totals = training.step(batch_of(cfg, step, mesh.dp.index, 2), 1e-3)
        losses.append(float(totals.loss))
    over_dp, over_tp = (
        {f"{r.op} {r.dtype}" for r in counting.select(ranks=axis.ranks)}
        for axis in (mesh.dp, mesh.tp)
    )
    mesh.close()
    return over_dp, over_tp, losses


def test_bf16_activations_travel_as_they_are_and_gradients_as_fp32() -> None:
    ranks = run_ranks(4, dtypes_of_a_step)
    alone = build(config(LLAMA), Mesh.single())
    expected = [float(alone.step(batch_of(alone.cfg, s, 0, 1), 1e-3).loss) for s in range(2)]
    for over_dp, over_tp, losses in ranks:
        assert over_dp == {"all_reduce torch.float32"}
        assert over_tp == {
            "all_gather torch.bfloat16",
            "reduce_scatter torch.bfloat16",
            "all_reduce torch.float32",
        }
        assert losses == pytest.approx(expected, rel=1e-3)
