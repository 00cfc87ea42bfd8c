"""The order of samples as a pure function of integers: a keyed permutation and a fair mix.

Nothing here has a state, so position 10^9 costs what position 0 costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_ROUNDS = 6
_MAX_PERIOD = 100_000


def splitmix64(x: Words) -> Words:
    """64 well-mixed bits for each word, elementwise.

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
    """
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def mix(*parts: int) -> int:
    """One 64-bit key from integers whose order counts."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        key = splitmix64(key ^ np.uint64(part & _WORD))
    return int(key[0])


def permute(index: Ints, n: int, key: int) -> Ints:
    """Where each of ``index`` stands in the ``key``-th shuffle of ``range(n)``.

    A bijection of [0, n): a Feistel network over the next power of two, walked on until the
    value falls into the range (on average less than twice).

    Raises:
        ValueError: for an index outside [0, n).
    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", section 4.
    """
    if index.size and (index.min() < 0 or index.max() >= n):
        raise ValueError(f"an index is outside [0, {n})")
    rounds = splitmix64(np.uint64(key & _WORD) ^ np.arange(1, _ROUNDS + 1, dtype=np.uint64))
    bits = max(2, (n - 1).bit_length())
    out = _feistel(index.astype(np.uint64), bits, rounds)
    far = np.flatnonzero(out >= np.uint64(n))
    while far.size:
        out[far] = _feistel(out[far], bits, rounds)
        far = far[out[far] >= np.uint64(n)]
    return out.astype(np.int64)


def _feistel(x: Words, bits: int, rounds: Words) -> Words:
    """A bijection of ``bits``-bit words."""
    low = bits // 2
    left, right = x >> np.uint64(low), x & np.uint64((1 << low) - 1)
    sizes = (bits - low, low)
    for secret in rounds:
        # The halves differ by a bit where bits is odd, so their sizes swap with them.
        word = splitmix64(right ^ secret)
        left, right = right, left ^ (word & np.uint64((1 << sizes[0]) - 1))
        sizes = (sizes[1], sizes[0])
    return (left << np.uint64(sizes[1])) | right


class Interleave:
    """Which source gives the g-th sample, for ever, so that shares hold at every prefix.

    Weights are read as decimals (0.3 is 3/10) and scaled to a sum of 1. With d their common
    denominator, a pattern of d samples repeats; if d is above 100,000, shares are first rounded
    to 1/100,000 (a positive one at least to that). ``shares`` has what is kept. At each prefix
    the count of each source is less than 1 away from its share times the prefix's length.

    Source: Tijdeman 1980, "The chairman assignment problem", algorithm 1.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        if not weights or min(weights) < 0 or not math.isfinite(sum(weights)) or not any(weights):
            raise ValueError(f"weights must be finite, not negative, and not all 0: {weights}")
        counts = _whole_counts(weights)
        self.shares = tuple(Fraction(c, sum(counts)) for c in counts)
        self._counts = np.array(counts, np.int64)
        self._pattern = np.array(_chairmen(counts), np.int64)
        turns = np.zeros_like(self._pattern)
        for source in range(len(counts)):
            mine = self._pattern == source
            turns[mine] = np.arange(mine.sum())
        self._turns = turns

    def locate(self, g: Ints) -> tuple[Ints, Ints]:
        """(source, how many samples that source gave before) of each sample number."""
        block, at = np.divmod(g, len(self._pattern))
        source = self._pattern[at]
        return source, block * self._counts[source] + self._turns[at]


def _whole_counts(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the proportion of ``weights``."""
    exact = [Fraction(repr(float(w))) for w in weights]
    shares = [w / sum(exact) for w in exact]
    period = math.lcm(*(s.denominator for s in shares))
    if period > _MAX_PERIOD:
        rounded = [max(1, round(s * _MAX_PERIOD)) if s else 0 for s in shares]
        divisor = math.gcd(*rounded)
        return [r // divisor for r in rounded]
    return [int(s * period) for s in shares]


def _chairmen(counts: Sequence[int]) -> list[int]:
    """A sequence in which source j stands ``counts[j]`` times, evenly.

    Of the sources that may take the next place without running too far ahead, the one whose
    deadline is the earliest takes it.
    """
    active = [j for j, c in enumerate(counts) if c]
    if len(active) == 1:
        return active * counts[active[0]]
    period, half = sum(counts), 2 * len(active) - 2
    taken = dict.fromkeys(active, 0)
    pattern = []
    for place in range(1, period + 1):
        owed = {j: half * (place * counts[j] - period * taken[j]) for j in active}
        ready = [j for j in active if owed[j] >= period]
        chosen = min(ready, key=lambda j: (((half - 1) * period - owed[j]) / counts[j], j))
        taken[chosen] += 1
        pattern.append(chosen)
    return pattern
