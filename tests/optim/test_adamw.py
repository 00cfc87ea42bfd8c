"""AdamW on buckets against the textbook, the learning rate, and steps that must not count."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from launch.build import Training, build
from launch.config import Config
from megalite.data_parallel.bucket import FlatParameters
from megalite.grads import main_grad
from megalite.mesh import Mesh
from megalite.optim.adamw import AdamW, learning_rate
from megalite.optim.config import OptimConfig
from megalite.slices import get_slice
from tests.grid import hold
from tests.parity.harness import GPT2, LLAMA, TRAIN, batch_of, config, parts

CFG = OptimConfig(lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
FINITE = torch.tensor(1.0)


def textbook(
    value: Tensor, grads: list[Tensor], lrs: list[float], cfg: OptimConfig, decay: bool
) -> Tensor:
    """Loshchilov and Hutter 2019, algorithm 2, in fp64."""
    (beta_1, beta_2), theta = cfg.betas, value.double()
    m, v = torch.zeros_like(theta), torch.zeros_like(theta)
    for t, (g, lr) in enumerate(zip(grads, lrs, strict=True), start=1):
        m = beta_1 * m + (1 - beta_1) * g.double()
        v = beta_2 * v + (1 - beta_2) * g.double() ** 2
        m_hat, v_hat = m / (1 - beta_1**t), v / (1 - beta_2**t)
        shrink = lr * cfg.weight_decay * theta if decay else 0.0
        theta = theta - lr * m_hat / (v_hat.sqrt() + cfg.eps) - shrink
    return theta


def flat_of(dtype: Any) -> FlatParameters:
    return hold(config(GPT2, train=replace(TRAIN, dtype=dtype)), 1)[0].flat


def put(flat: FlatParameters, step: int) -> dict[str, Tensor]:
    """A gradient for every parameter; returns them by name."""
    draw = torch.Generator().manual_seed(step)
    found = {}
    for param in flat.parameters():
        grad = torch.randn(param.shape, generator=draw, dtype=torch.float64)
        main_grad(param).copy_(grad)
        found[get_slice(param).name] = main_grad(param).clone()
    return found


@pytest.mark.parametrize(("dtype", "bound"), [("fp64", 1e-12), ("fp32", 1e-5), ("bf16", 1e-5)])
def test_five_steps_are_those_of_the_textbook(dtype: str, bound: float) -> None:
    flat = flat_of(dtype)
    optimizer = AdamW(flat, CFG)
    start = {get_slice(p).name: p.detach().clone() for p in flat.parameters()}
    decays = {get_slice(p).name: get_slice(p).decay for p in flat.parameters()}
    lrs = [1e-2, 3e-2, 1e-3, 0.0, 2e-2]
    factors = [1.0, 0.5, 2.0, 1.0, 0.25]
    given = []
    for step, (lr, factor) in enumerate(zip(lrs, factors, strict=True)):
        given.append({n: g * factor for n, g in put(flat, step).items()})
        optimizer.step(lr, torch.tensor(factor, dtype=torch.float64), FINITE)
    masters = {
        get_slice(p).name: view
        for bucket, master in zip(flat.buckets, optimizer.masters, strict=True)
        for p, view in bucket.views(master)
    }
    for param in flat.parameters():
        name = get_slice(param).name
        expected = textbook(start[name], [g[name] for g in given], lrs, CFG, decays[name])
        off = float((masters[name].double() - expected).abs().max())
        assert off < bound, f"{name} is off by {off:.1e}"
        assert torch.equal(param.detach(), masters[name].to(param.dtype))
        wrong = textbook(start[name], [g[name] for g in given], lrs, CFG, not decays[name])
        if bool(start[name].any()):
            assert float((wrong - expected).abs().max()) > 1e-5, "decay would not be seen"


def test_matrices_decay_and_norms_biases_and_positions_do_not() -> None:
    for model in (GPT2, LLAMA):
        (alone,) = hold(config(model), 1)
        for param in alone.flat.parameters():
            at = get_slice(param)
            free = at.name.endswith(".bias") or "norm" in at.name or "positions" in at.name
            assert at.decay is not free, at.name
            assert alone.flat.bucket_of[id(param)].decay is at.decay


def test_a_tied_copy_decays_like_its_owner() -> None:
    ranks = hold(config(GPT2, pp=2), 2)
    found = [b for rank in ranks for b in rank.flat.buckets if b.late == "tied"]
    assert [b.decay for b in found] == [True, True]
    assert [b.counted for b in found] == [True, False]


def rates(cfg: OptimConfig, steps: int) -> list[float]:
    return [learning_rate(cfg, step, steps) for step in range(1, steps + 1)]


def test_ten_cosine_rates_are_those_of_the_formula() -> None:
    cfg = OptimConfig(lr=3e-3, min_lr=1e-4, warmup_steps=3, lr_schedule="cosine")
    got = rates(cfg, 10)
    expected = [1e-3, 2e-3, 3e-3]
    expected += [1e-4 + 2.9e-3 * (1 + math.cos(math.pi * k / 7)) / 2 for k in range(1, 8)]
    assert got == pytest.approx(expected, rel=1e-14)
    assert got[0] > 0
    assert got[2] == 3e-3
    assert got[-1] == 1e-4, "the last step has the least rate exactly"


def test_ten_linear_and_constant_rates() -> None:
    cfg = OptimConfig(lr=1.0, min_lr=0.2, warmup_steps=2, lr_schedule="linear")
    assert rates(cfg, 10) == pytest.approx([0.5, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2])
    assert rates(cfg, 10)[-1] == 0.2
    constant = OptimConfig(lr=1.0, warmup_steps=4, lr_schedule="constant")
    assert rates(constant, 10) == [0.25, 0.5, 0.75] + [1.0] * 7


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_a_run_may_be_shorter_than_its_warm_up_and_have_none(schedule: Any) -> None:
    short = OptimConfig(lr=1.0, warmup_steps=20, lr_schedule=schedule)
    assert rates(short, 4) == [0.05, 0.1, 0.15, 0.2]
    none = OptimConfig(lr=1.0, min_lr=0.5, lr_schedule=schedule)
    assert rates(none, 1) == [1.0 if schedule == "constant" else 0.5]
    assert all(rate > 0 for rate in rates(OptimConfig(lr=1.0, lr_schedule=schedule), 10)[:-1])


def state_of(training: Training) -> dict[str, Tensor]:
    found = {
        p.name: p.tensor.clone()
        for p in [*training.flat.weight_pieces(), *training.optimizer.pieces()]
    }
    for n, state in enumerate(training.optimizer.inner.state.values()):
        found[f"step {n}"] = state["step"].clone()
    return found


def trained(cfg: Config) -> Training:
    training = build(cfg, Mesh.single())
    training.step(batch_of(cfg, 0, 0, 1), cfg.optim.lr)
    return training


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing(dtype: Any, bad: float) -> None:
    cfg = config(LLAMA, train=replace(TRAIN, dtype=dtype))
    training, twin = trained(cfg), trained(cfg)
    before = state_of(training)
    totals = training.gradients(batch_of(cfg, 1, 0, 1))
    assert float(totals.finite) == 1
    param = next(training.flat.parameters())
    main_grad(param).view(-1)[0] = bad
    nan = torch.tensor(math.nan, dtype=torch.float64)
    training.optimizer.step(cfg.optim.lr, nan, torch.zeros(()))
    after = state_of(training)
    assert after.keys() == before.keys()
    assert len(before) > 60
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    # Nothing of it is left in the next step, nor of an evaluation.
    training.losses(batch_of(cfg, 7, 0, 1))
    for each in (training, twin):
        each.step(batch_of(cfg, 2, 0, 1), cfg.optim.lr)
    assert state_of(training).keys() == state_of(twin).keys()
    for name, value in state_of(twin).items():
        assert torch.equal(value, state_of(training)[name]), name
    moved = state_of(twin)
    assert not all(torch.equal(value, moved[name]) for name, value in before.items())


def test_clipping_changes_the_weights_only_where_the_norm_is_above_the_bound() -> None:
    def weights(clip: float) -> list[Tensor]:
        base = config(GPT2)
        cfg = replace(base, optim=replace(base.optim, clip_grad_norm=clip))
        training = build(cfg, Mesh.single())
        for step in range(2):  # with one step, Adam cancels any factor
            totals = training.step(batch_of(cfg, step, 0, 1), cfg.optim.lr)
            assert float(totals.grad_norm) > 0.05
        return [part[3] for part in parts(training.flat.weight_pieces())]

    free, far, tight, at_most_one = (weights(clip) for clip in (0.0, 1e9, 0.05, 1.0))
    assert all(map(torch.equal, free, far))
    assert not all(map(torch.equal, free, tight))
    assert not all(map(torch.equal, free, at_most_one)), "norms above 1.0 are clipped"


def test_the_state_has_a_name_for_everything() -> None:
    expected: list[tuple[Any, list[str]]] = [
        ("bf16", ["master", "exp_avg", "exp_avg_sq"]),
        ("fp32", ["exp_avg", "exp_avg_sq"]),
    ]
    for dtype, kinds in expected:
        training = build(config(GPT2, train=replace(TRAIN, dtype=dtype)), Mesh.single())
        weights = {p.name for p in training.flat.weight_pieces()}
        got = [p.name for p in training.optimizer.pieces()]
        assert sorted(got) == sorted(f"optim.{kind}.{name}" for kind in kinds for name in weights)
        assert all(p.tensor.dtype is torch.float32 for p in training.optimizer.pieces())
        training.optimizer.set_num_steps(7)
        steps = [float(s["step"]) for s in training.optimizer.inner.state.values()]
        assert steps == [7.0] * len(training.flat.buckets)
