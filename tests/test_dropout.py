"""Dropout's masks: the words behind them, their statistics, and that they know no layout."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from launch.build import build
from megalite.dropout import Draw, dropout, keep_mask, levels
from megalite.mesh import Mesh
from megalite.rng import stream_key, words
from tests.parity.harness import GPT2, batch_of, config
from tests.test_rng import splitmix

SITES = ("embedding", "layers.0.attention", "layers.0.mlp", "layers.1.attention", "layers.10.mlp")


def draw(samples: int = 2, *, seed: int = 7, step: int = 3, first: int = 0) -> Draw:
    return Draw(seed, step, torch.arange(first, first + samples))


def mask(
    d: Draw, name: str = SITES[1], *, first: int = 0, s: int = 64, width: int = 48, p: float = 0.1
) -> Tensor:
    return keep_mask(d.keys(name), first, (s, width), levels(p))


# --- the words ---------------------------------------------------------------------------------


def kept(seed: int, step: int, name: str, sample: int, place: int, feature: int, d: int) -> int:
    """The 16 bits that decide on an element, in Python's integers."""
    site = stream_key(seed, f"dropout.{step}.{name}")
    key = splitmix(site + sample * 0x9E3779B97F4A7C15, 1)[0]
    number = place * -(-d // 4) + feature // 4
    word = splitmix(key + number * 0x9E3779B97F4A7C15, 1)[0]
    return (word >> 16 * (feature % 4)) & 0xFFFF


@pytest.mark.parametrize("d", [8, 7, 1])
def test_an_element_is_decided_by_its_own_part_of_a_word(d: int) -> None:
    p, first = 0.3, 5
    got = mask(draw(2, first=1 << 40), first=first, s=3, width=d, p=p)
    assert got.shape == (3, 2, d)
    for place in range(3):
        for row in range(2):
            for feature in range(d):
                bits = kept(7, 3, SITES[1], (1 << 40) + row, first + place, feature, d)
                signed = bits - (1 << 16) if bits >> 15 else bits
                assert bool(got[place, row, feature]) is (signed >= levels(p) - (1 << 15))


def test_the_masks_are_those_of_every_version() -> None:
    keys = [f"{key % (1 << 64):016x}" for key in draw(3).keys(SITES[1]).tolist()]
    assert keys == GOLDEN_KEYS
    bits = bytes(mask(draw(3), s=32, width=100).flatten().byte().tolist())
    assert hashlib.sha256(bits).hexdigest() == GOLDEN_MASK


GOLDEN_KEYS = ["86bf7a2c26637142", "d70706992b038102", "81ab3523a92ba47c"]
GOLDEN_MASK = "6ac261e0b77edf68f7ecf73a40233e66cf7f86f09921e95f6feaa86be07a67be"


# --- no layout ---------------------------------------------------------------------------------


@given(
    first=st.integers(0, 40),
    length=st.integers(1, 24),
    rows=st.lists(st.integers(0, 5), min_size=1, max_size=4),
)
def test_a_part_of_the_sequence_and_any_rows_see_their_part_of_the_mask(
    first: int, length: int, rows: list[int]
) -> None:
    whole = mask(draw(6))
    part = Draw(7, 3, torch.tensor(rows))
    got = mask(part, first=first, s=length)
    assert torch.equal(got, whole[first : first + length][:, rows])


def test_the_type_of_the_features_does_not_matter() -> None:
    ones = {dtype: torch.ones(8, 2, 12, dtype=dtype) for dtype in (torch.float64, torch.bfloat16)}
    got = {d: dropout(x, 0.4, draw(), "embedding") for d, x in ones.items()}
    a, b = got.values()
    assert [t.dtype for t in got.values()] == list(ones)
    assert torch.equal(a != 0, b != 0) and 0 < int((a == 0).sum()) < a.numel()


# --- statistics --------------------------------------------------------------------------------

BIG = {"s": 256, "width": 256}


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_the_rate(p: float) -> None:
    for name in SITES:
        got = mask(draw(8), name, p=p, **BIG)
        rate, error = levels(p) / 65536, math.sqrt(p * (1 - p) / got.numel())
        assert rate == pytest.approx(p, abs=2.0**-17)
        assert abs(float((~got).double().mean()) - rate) < 5 * error


def correlation(a: Tensor, b: Tensor) -> float:
    """Times the root of the count: a standard normal number for independent masks."""
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    return float((a * b).sum() / (a.norm() * b.norm())) * math.sqrt(a.numel())


def neighbours(make: Callable[[Draw, str], Tensor]) -> dict[str, float]:
    """How masks, and parts of a mask, that differ in one thing hang together."""
    m = make(draw(8), SITES[1])
    found = {
        "position": correlation(m[1:], m[:-1]),
        "sample": correlation(m[:, 1:], m[:, :-1]),
        "two and two": correlation(m[:-1, :, :-1] ^ m[1:, :, :-1], m[:-1, :, 1:] ^ m[1:, :, 1:]),
    }
    for by in (1, 2, 3, 4, 8):
        found[f"feature {by}"] = correlation(m[..., by:], m[..., :-by])
    for by in (1, 2, 4):  # what a raw key in the index exchanges
        swapped = m[..., torch.arange(m.shape[-1]) ^ by]
        found[f"sample, feature xor {by}"] = correlation(m[:, 1:], swapped[:, :-1])
    for a, b in combinations(SITES, 2):
        found[f"{a}, {b}"] = correlation(make(draw(8), a), make(draw(8), b))
    found["step"] = correlation(m, make(draw(8, step=4), SITES[1]))
    found["seed"] = correlation(m, make(draw(8, seed=8), SITES[1]))
    found["step and sample"] = correlation(m, make(draw(8, step=4, first=8), SITES[1]))
    return found


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_of_neighbours_are_independent(p: float) -> None:
    found = neighbours(lambda d, name: mask(d, name, p=p, **BIG))
    for what, score in found.items():
        assert abs(score) < 4.5, f"{what}: {score:.1f} standard errors"
    assert math.fsum(s * s for s in found.values()) / len(found) < 2.5


def test_sums_over_any_direction_spread_as_those_of_independent_elements() -> None:
    got = mask(draw(64), p=0.1, s=64, width=64).double()
    rate = levels(0.1) / 65536
    for dim in range(3):
        counts = (1 - got).sum(dim).flatten()
        expected = got.shape[dim] * rate * (1 - rate)
        spread = float(((counts - got.shape[dim] * rate) ** 2).mean()) / expected
        # The mean of n squares of nearly normal numbers is 1 with an error of sqrt(2 / n).
        assert abs(spread - 1) < 6 * math.sqrt(2 / counts.numel()), dim


def test_raw_keys_in_the_index_would_be_seen() -> None:
    def raw(d: Draw, name: str) -> Tensor:
        place = torch.arange(256).view(-1, 1, 1) * 256 + torch.arange(256)
        word = words(stream_key(d.seed, name), place ^ d.samples.view(-1, 1) ^ d.step)
        return word >= torch.iinfo(torch.int64).min // 10 * 8

    found = neighbours(raw)
    assert abs(found["sample, feature xor 1"]) > 100
    assert abs(found["feature 1"]) < 4.5, "a mask by itself would look well"


# --- the function ------------------------------------------------------------------------------


def test_what_is_kept_is_scaled_and_so_is_its_gradient() -> None:
    x = torch.randn(16, 2, 10, dtype=torch.float64, requires_grad=True)
    keep = mask(draw(), "embedding", s=16, width=10, p=0.25)
    y = dropout(x, 0.25, draw(), "embedding")
    torch.testing.assert_close(y, x * keep / 0.75, rtol=1e-15, atol=0)
    dy = torch.randn(y.shape, dtype=torch.float64)
    y.backward(dy)
    torch.testing.assert_close(x.grad, dy * keep / 0.75, rtol=1e-15, atol=0)


def test_the_mean_over_many_samples_is_the_input() -> None:
    x = torch.ones(4, 1, 8, dtype=torch.float64).expand(4, 20_000, 8)
    for p in (0.1, 0.9):
        mean = dropout(x, p, draw(20_000), "embedding").mean(1)
        error = math.sqrt(p / (1 - p) / 20_000)
        assert float((mean - 1).abs().max()) < 5 * error


@pytest.mark.parametrize("p", [0.0, 1e-6])
def test_nothing_is_done_where_nothing_is_dropped(p: float) -> None:
    x = torch.randn(4, 2, 8)
    assert dropout(x, p, draw(), "embedding") is x
    assert dropout(x, 0.5, None, "embedding") is x


def test_a_rate_just_below_one_gives_finite_numbers() -> None:
    y = dropout(torch.ones(64, 2, 64), 1 - 1e-9, draw(), "embedding")
    assert bool(torch.isfinite(y).all())


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


def calls(rate: float, with_samples: bool = True) -> int:
    """Operations of one step."""
    cfg = config(replace(GPT2, dropout=rate))
    training, batch = build(cfg, Mesh.single()), batch_of(cfg, 0, 0, 1)
    assert batch.samples is not None
    if not with_samples:
        batch.samples = None
    counter = Calls()
    with counter:
        training.gradients(batch)
    return counter.count


def test_a_rate_of_zero_costs_nothing() -> None:
    assert calls(0.0) - 3 <= calls(0.0, with_samples=False) == calls(0.1, with_samples=False)
    assert calls(0.1) > calls(0.0) + 100


def test_an_evaluation_drops_nothing() -> None:
    found = []
    for rate in (0.0, 0.5):
        cfg = config(replace(GPT2, dropout=rate))
        training = build(cfg, Mesh.single())
        batch = batch_of(cfg, 0, 0, 1)
        assert batch.samples is not None
        found.append(training.losses(batch))
        trained = training.gradients(batch).loss
    assert torch.equal(found[0], found[1])
    assert float(trained) != float(found[1][0] / found[1][1])
