"""Random numbers that do not know the layout: a value depends on (seed, name, global index).

The integer words are the contract: splitmix64 (Steele, Lea, Flood 2014, "Fast splittable
pseudorandom number generators", figure 13) of a key and a counter, in wrapping 64-bit arithmetic.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from megalite.slices import Slice, get_slice

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MUL_1, _MUL_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_CHUNK = 1 << 22  # elements drawn at a time: bounds the scratch memory


def _signed(word: int) -> int:
    """The int64 with the same 64 bits."""
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word


def stream_key(seed: int, name: str) -> int:
    """A 64-bit key for the stream ``name`` of ``seed``."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: int64's own is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def steps(index: Tensor) -> Tensor:
    """How much a stream's state grows in ``index`` (int64) words; word i is mixed from the state
    key + (i + 1) steps."""
    return index * _signed(_GAMMA)


def stir(x: Tensor) -> Tensor:
    """Mix states to words, in place."""
    scratch = torch.empty_like(x)
    for bits, factor in ((30, _MUL_1), (27, _MUL_2), (31, 1)):
        torch.bitwise_right_shift(x, bits, out=scratch)
        x ^= scratch.bitwise_and_((1 << (64 - bits)) - 1)  # int64's own shift is arithmetic
        if factor != 1:
            x *= _signed(factor)
    return x


def words(key: int, index: Tensor) -> Tensor:
    """The 64-bit words number ``index`` (int64, any shape) of a stream, as int64."""
    return stir(steps(index) + _signed(key + _GAMMA))


def uniform(key: int, index: Tensor) -> Tensor:
    """Float64 in (0, 1], one for each index, from the word's upper 53 bits."""
    return (_shift_right(words(key, index), 11).double() + 0.5) * 2.0**-53


def normal(key: int, index: Tensor) -> Tensor:
    """Float64 standard normal, one for each index (Box and Muller 1958)."""
    radius = torch.sqrt(-2.0 * torch.log(uniform(key, 2 * index)))
    return radius * torch.cos((2.0 * math.pi) * uniform(key, 2 * index + 1))


def _global_index(at: Slice, rows: range, device: torch.device) -> Tensor:
    """Row-major index in the global tensor of each element of some rows of a slice."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, size in enumerate(at.shape):
        span = rows if dim == 0 else range(at.extent[dim])
        place = torch.arange(span.start, span.stop, device=device) + at.offset[dim]
        index = index.unsqueeze(-1) * size + place
    return index


@torch.no_grad()
def initialize(parameters: Iterable[nn.Parameter], seed: int) -> None:
    """Fill every parameter from its ``Slice``; padding is set to zero.

    A value depends on (seed, global name, element index) only, so any two layouts agree to the
    bit wherever the same device type draws.
    """
    for param in parameters:
        at = get_slice(param)
        kind, value = at.init
        param.zero_()
        if not all(at.extent):
            continue
        target = at.valid(param)
        if kind == "constant":
            target.fill_(value)
            continue
        key = stream_key(seed, at.name)
        step = max(1, _CHUNK // max(1, math.prod(at.extent[1:])))
        for start in range(0, at.extent[0], step):
            rows = range(start, min(start + step, at.extent[0]))
            draw = normal(key, _global_index(at, rows, param.device)) * value
            target[rows.start : rows.stop].copy_(draw)
