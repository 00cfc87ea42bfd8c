"""Numbers that stand for a tensor and do not know how it is cut.

Of a tensor of (rows, samples, columns), for each sample: the sum, the sum of squares, the largest
absolute value, a projection on a fixed random tensor (which feels an exchange of elements, as the
others do not), and a hash of the bits. All but the largest are sums over elements whose weights
depend on the element's place in the *global* tensor only; so parts held by several ranks add up
to the numbers of the whole. All of it stays on the device.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from megalite.rng import normal, stream_key, words

_CHUNK = 1 << 22  # elements looked at at a time: bounds the scratch memory
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


@torch.no_grad()
def statistics(x: Tensor, row: int = 0, column: int = 0) -> Tensor:
    """(b, 5) int64: the bits of four float64 (sum, squares, largest, projection), and the hash.

    Args:
        x: (rows, b, columns) any float dtype, a rectangle at (``row``, ``column``) of the global
            tensor of each of b samples.

    The hash is the sum modulo 2^64 of the elements' bits, in words of at most 32 bits, each times
    an odd multiplier of its own: it sees any single change, and others but for one in 2^32.
    """
    rows, b, columns = x.shape
    total = torch.zeros(3, b, dtype=torch.float64, device=x.device)
    largest = torch.zeros(b, dtype=torch.float64, device=x.device)
    hashed = torch.zeros(b, dtype=torch.int64, device=x.device)
    size = max(1, _CHUNK // max(1, b * columns))
    for start in range(0, rows, size):
        part = x[start : start + size]
        at = (row + start, row + start + part.shape[0])
        total += _sums(part, at, column)
        top = torch.linalg.vector_norm(part, torch.inf, dim=(0, 2)).double()
        largest = torch.maximum(largest, top)
        hashed += _hash(part, at, column)
    numbers = torch.stack([total[0], total[1], largest, total[2]], dim=1)
    return torch.cat([numbers.view(torch.int64), hashed.unsqueeze(1)], dim=1)


def _sums(x: Tensor, at: tuple[int, int], column: int) -> Tensor:
    """(3, b): sum, sum of squares, projection. Only a row is summed in less than float64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    down = _normals("rows", *at, x.device).unsqueeze(1)
    across = _normals("columns", column, column + x.shape[-1], x.device).to(wide.dtype)
    projected = (wide @ across).double() * down
    squares = torch.linalg.vector_norm(wide, dim=-1).double().square()
    return torch.stack([wide.sum(-1).double(), squares, projected]).sum(1)


def _hash(x: Tensor, at: tuple[int, int], column: int) -> Tensor:
    """(b,) of the bits, with multipliers by global place."""
    kind = _BITS[x.element_size()]
    k = x.element_size() // kind.itemsize
    bits = x.contiguous().view(kind).to(torch.int64)
    across = _odd("columns", k * column, k * (column + x.shape[-1]), x.device)
    down = _odd("rows", *at, x.device).unsqueeze(1)
    return (bits.mul_(across).sum(-1) * down).sum(0)


@lru_cache(maxsize=256)
def _normals(stream: str, start: int, stop: int, device: torch.device) -> Tensor:
    index = torch.arange(start, stop, device=device)
    return normal(stream_key(0, f"statistics.{stream}"), index)


@lru_cache(maxsize=256)
def _odd(stream: str, start: int, stop: int, device: torch.device) -> Tensor:
    index = torch.arange(start, stop, device=device)
    return words(stream_key(0, f"statistics.hash.{stream}"), index) | 1
