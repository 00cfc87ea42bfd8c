from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.order import Interleave, mix, permute, splitmix64

WORDS = st.integers(0, 2**64 - 1)


def test_splitmix64_gives_the_published_words() -> None:
    # The first outputs of the reference generator at state 0 are the mixes of its successive
    # states 0, golden, 2 * golden.
    states = np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [int(w) for w in splitmix64(states)] == expected


@given(st.integers(1, 3000), WORDS)
def test_a_shuffle_is_a_bijection(n: int, key: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


@given(st.integers(1, 2**40), WORDS, st.lists(st.integers(0, 2**40), max_size=20, unique=True))
def test_a_shuffle_of_a_large_range_stays_inside_and_never_meets(
    n: int, key: int, index: list[int]
) -> None:
    inside = np.array([i for i in index if i < n], np.int64)
    out = permute(inside, n, key)
    assert len(set(out.tolist())) == len(inside)
    assert not len(out) or (out.min() >= 0 and out.max() < n)


def test_a_place_does_not_depend_on_what_else_is_asked() -> None:
    whole = permute(np.arange(1000), 1000, 7)
    assert permute(np.array([31, 999, 31]), 1000, 7).tolist() == whole[[31, 999, 31]].tolist()


def test_shuffles_of_three_are_equally_frequent() -> None:
    seen = Counter(tuple(permute(np.arange(3), 3, mix(key)).tolist()) for key in range(3000))
    assert len(seen) == 6
    # 500 of each are expected; six standard deviations are 122.
    assert max(abs(count - 500) for count in seen.values()) < 122


def test_a_shuffle_keeps_no_neighbours() -> None:
    out = permute(np.arange(10_000), 10_000, 3)
    assert abs(np.corrcoef(out[:-1], out[1:])[0, 1]) < 0.05
    # The check can fail: the identity has perfectly correlated neighbours.
    assert np.corrcoef(np.arange(9_999), np.arange(1, 10_000))[0, 1] > 0.99


@pytest.mark.parametrize("index", [-1, 10])
def test_an_index_outside_the_range_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=r"outside \[0, 10\)"):
        permute(np.array([index]), 10, 0)


def test_keys_depend_on_every_part_and_on_their_order() -> None:
    keys = {mix(1, 2), mix(2, 1), mix(1), mix(1, 2, 0), mix(-1, 2)}
    assert len(keys) == 5


def prefix_errors(weights: list[float], length: int) -> float:
    """The largest distance of a count from its share of a prefix."""
    interleave = Interleave(weights)
    source, turn = interleave.locate(np.arange(length))
    worst = 0.0
    for number, share in enumerate(interleave.shares):
        counts = np.cumsum(source == number)
        worst = max(worst, float(np.abs(counts - np.arange(1, length + 1) * float(share)).max()))
        assert turn[source == number].tolist() == list(range(counts[-1]))
    return worst


@pytest.mark.parametrize("weights", [[0.001, 0.999], [1, 0], [0, 1], [1, 1, 1], [0.7, 0.2, 0.1]])
def test_every_prefix_of_a_mix_keeps_the_shares(weights: list[float]) -> None:
    assert prefix_errors(weights, 3000) < 1


@given(st.lists(st.integers(0, 40), min_size=1, max_size=7).filter(any))
def test_every_prefix_of_any_mix_keeps_the_shares(weights: list[int]) -> None:
    assert prefix_errors([w / 8 for w in weights], 2 * sum(weights) + 5) < 1


def test_a_mix_in_runs_would_break_the_shares() -> None:
    # The check above can fail: the same counts, not interleaved, are far off.
    source = np.repeat([0, 1], [500, 500])
    counts = np.cumsum(source == 1)
    assert np.abs(counts - np.arange(1, 1001) * 0.5).max() > 100


def test_weights_without_a_short_period_are_rounded_and_say_so() -> None:
    interleave = Interleave([2**0.5, 1, 1e-9])
    assert sum(interleave.shares) == 1
    assert abs(float(interleave.shares[0]) - 2**0.5 / (2**0.5 + 1)) < 1e-4
    assert interleave.shares[2] > 0


def test_a_mix_is_found_at_any_place_without_a_walk() -> None:
    interleave = Interleave([0.25, 0.75])
    source, turn = interleave.locate(np.array([10**15, 10**15 + 1, 10**15 + 2, 10**15 + 3]))
    assert sorted(source.tolist()) == [0, 1, 1, 1]
    assert turn[source == 0].tolist() == [10**15 // 4]


@pytest.mark.parametrize("weights", [[], [0, 0], [-1, 2], [float("nan")], [float("inf"), 1]])
def test_weights_that_are_none_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        Interleave(weights)
