"""The one reduction of a step: every element counted once, clipping, and what is not finite."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from launch.build import build
from launch.config import check, load_config
from megalite.data_parallel.bucket import FlatParameters
from megalite.errors import ConfigError
from megalite.grads import main_grad
from megalite.mesh import Mesh, Transport
from megalite.optim.clip import StepTotals, Told, square_sum, step_totals
from megalite.parallel_config import mesh_shape
from megalite.slices import get_slice
from model.config import GPTConfig
from tests.grid import hold
from tests.parity.harness import GPT2, LLAMA, TRAIN, config
from tests.ranks import run_ranks

UNTIED = replace(GPT2, tied_embeddings=False)
TIED_LLAMA = replace(LLAMA, tied_embeddings=True)
SP, V2 = {"sequence_parallel": True}, {"schedule": "interleaved_1f1b", "virtual_stages": 2}

# LLAMA has 2 key/value heads (copies at tp 4), all have 65 tokens (padding at tp 2 and 4).
CASES: list[tuple[GPTConfig, int, dict[str, Any]]] = [
    (GPT2, 1, {}),
    (GPT2, 2, {"tp": 2}),
    (GPT2, 4, {"tp": 4, **SP}),
    (GPT2, 2, {"pp": 2}),
    (GPT2, 4, {"pp": 2, "tp": 2, **SP}),
    (GPT2, 2, {"pp": 2, **V2}),
    (UNTIED, 1, {}),
    (UNTIED, 4, {"pp": 4}),
    (UNTIED, 4, {"pp": 2, "tp": 2}),
    (LLAMA, 1, {}),
    (LLAMA, 2, {"tp": 2}),
    (LLAMA, 4, {"tp": 4}),
    (LLAMA, 4, {"tp": 4, **SP}),
    (LLAMA, 8, {"tp": 4, "pp": 2, **SP, **V2}),
    (TIED_LLAMA, 8, {"tp": 4, "pp": 2}),
    (GPT2, 2, {}),
    (GPT2, 3, {"zero1": True}),
    (LLAMA, 6, {"tp": 2, **SP}),
    (TIED_LLAMA, 12, {"tp": 2, "pp": 2, "zero1": True}),
]


def ones(flat: FlatParameters) -> None:
    """A gradient of 1 for every element that exists, on all who hold it."""
    for bucket in flat.buckets:
        bucket.grad.zero_()
        for piece in bucket.pieces(bucket.grad):
            piece.tensor.fill_(1.0)


@pytest.mark.parametrize(("model", "world_size", "layout"), CASES)
def test_the_squared_norm_of_ones_is_the_number_of_elements(
    model: GPTConfig, world_size: int, layout: dict[str, Any]
) -> None:
    total = torch.zeros((), dtype=torch.float64)
    everything = 0
    for rank in hold(config(model, **layout), world_size):
        ones(rank.flat)
        total += square_sum(rank.flat)
        everything += rank.flat.num_elements
    assert float(total) == pytest.approx(model.num_parameters(), abs=1e-6)
    if world_size > 1 and layout != {"pp": 4}:
        assert everything > model.num_parameters(), "counting all that ranks hold would be seen"


def test_untying_adds_the_vocabulary_once() -> None:
    layouts: list[dict[str, Any]] = [{}, {"pp": 2}, {"tp": 2}]
    for layout in layouts:
        world_size = math.prod(layout.values())
        norms = []
        for model in (GPT2, UNTIED):
            ranks = hold(config(model, **layout), world_size)
            for rank in ranks:
                ones(rank.flat)
            norms.append(sum(float(square_sum(rank.flat)) for rank in ranks))
        assert norms[1] - norms[0] == pytest.approx(65 * 32, abs=1e-6)


def norm_of_ones(transport: Transport, layout: dict[str, Any]) -> list[list[float]]:
    """What ``step_totals`` makes of ones, on this rank: norm, loss and tokens of each model."""
    found = []
    for model in (GPT2, LLAMA):
        cfg = config(model, **layout)
        mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
        training = build(cfg, mesh)
        ones(training.flat)
        loss = torch.tensor(30.0 + mesh.dp.index) if training.has_last_stage else None
        tokens = torch.tensor(10 + mesh.dp.index)
        totals = step_totals(training.flat, loss, tokens, mesh, constant=1.0, clip=0.0)
        found.append([float(t) for t in (totals.grad_norm, totals.loss, totals.tokens)])
        mesh.close()
    return found


@pytest.mark.parametrize("layout", [{"tp": 2, "pp": 2}, {"tp": 2, **SP}], ids=["tp-pp", "tp-dp"])
def test_every_rank_learns_the_same_totals_and_each_counts_once(layout: dict[str, Any]) -> None:
    dp = 4 // (layout["tp"] * layout.get("pp", 1))
    ranks = run_ranks(4, norm_of_ones, layout)
    assert all(rank == ranks[0] for rank in ranks)
    for model, (norm, loss, tokens) in zip((GPT2, LLAMA), ranks[0], strict=True):
        assert tokens == sum(10 + i for i in range(dp))
        assert loss == sum(30.0 + i for i in range(dp)) / tokens
        # The norm is of the mean's gradient: the sum's, divided by the tokens.
        assert (norm * tokens) ** 2 == pytest.approx(model.num_parameters(), abs=1e-6)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_norm_of_a_large_bucket_is_exact_enough_to_compare_layouts(dtype: Any) -> None:
    wide = replace(GPT2, num_layers=1, hidden_size=512, ffn_hidden_size=4096, vocab_size=64)
    (alone,) = hold(config(wide, train=replace(TRAIN, dtype=dtype)), 1)
    largest = max(alone.flat.buckets, key=lambda b: b.grad.numel())
    assert largest.grad.numel() >= 1 << 21
    draw = torch.Generator().manual_seed(0)
    for bucket in alone.flat.buckets:
        bucket.grad.copy_(torch.rand(bucket.grad.shape, generator=draw) * 1e-3)
    exact = sum(float(b.grad.double().square().sum()) for b in alone.flat.buckets)
    assert float(square_sum(alone.flat)) == pytest.approx(exact, rel=1e-8)
    at_once = float(largest.grad.norm().double().square())
    assert at_once != pytest.approx(float(largest.grad.double().square().sum()), rel=1e-5)


def totals_of(
    grad: float, *, clip: float, constant: float = 6.0, tokens: int = 6, loss: float = 12.0
) -> tuple[StepTotals, FlatParameters]:
    (alone,) = hold(config(GPT2, train=replace(TRAIN, dtype="fp32")), 1)
    for bucket in alone.flat.buckets:
        bucket.grad.fill_(grad)
    found = step_totals(
        alone.flat,
        torch.tensor(loss),
        torch.tensor(tokens),
        Mesh.single(),
        constant=constant,
        clip=clip,
    )
    return found, alone.flat


def element_count(flat: FlatParameters) -> int:
    return sum(b.grad.numel() for b in flat.buckets)


@pytest.mark.parametrize("clip", [0.0, 1e9])
def test_no_clipping_is_zero_or_out_of_reach(clip: float) -> None:
    totals, flat = totals_of(0.5, clip=clip)
    norm = 0.5 * math.sqrt(element_count(flat))
    assert float(totals.grad_norm) == pytest.approx(norm, rel=1e-6)
    assert float(totals.factor) == 1.0


def test_a_norm_above_the_bound_is_brought_to_it() -> None:
    totals, _ = totals_of(0.5, clip=1.0)
    assert float(totals.grad_norm) > 50, "what is reported is the norm before clipping"
    assert float(totals.factor * totals.grad_norm) == pytest.approx(1.0, rel=1e-6)
    below, _ = totals_of(1e-6, clip=1.0)
    assert float(below.factor) == 1.0


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_the_mean_is_over_the_tokens_that_there_were(clip: float) -> None:
    full, _ = totals_of(1e-5, clip=clip)
    half, _ = totals_of(1e-5, clip=clip, tokens=3)
    assert float(full.loss) == 2.0
    assert float(half.loss) == 4.0
    assert float(half.grad_norm) == pytest.approx(2 * float(full.grad_norm))
    assert float(half.factor) == pytest.approx(2 * float(full.factor))
    assert float(half.tokens) == 3


def test_a_batch_without_a_token_is_no_division_by_zero() -> None:
    totals, _ = totals_of(0.0, clip=1.0, tokens=0, loss=0.0)
    assert float(totals.loss) == 0
    assert float(totals.tokens) == 0
    assert float(totals.grad_norm) == 0
    assert bool(totals.factor.isfinite())
    assert float(totals.finite) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_told(bad: float) -> None:
    good, flat = totals_of(0.5, clip=1.0)
    assert float(good.finite) == 1
    assert float(totals_of(0.5, clip=1.0, loss=bad)[0].finite) == 0
    param = next(flat.parameters())
    main_grad(param).view(-1)[-1] = bad
    found = step_totals(
        flat, torch.tensor(1.0), torch.tensor(6), Mesh.single(), constant=6.0, clip=1.0
    )
    assert float(found.finite) == 0
    assert get_slice(param).counted
    assert len(found.stacked()) == len(Told._fields)


@pytest.mark.parametrize("value", ["None", "none", "-1"])
def test_a_bound_that_is_no_number_or_negative_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="clip_grad_norm"):
        check(load_config(["--optim.clip_grad_norm", value, "--data.path", "x"]), 1)
