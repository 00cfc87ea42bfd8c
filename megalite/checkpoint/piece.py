"""Rectangles of global tensors: where they meet, and whether they tile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from math import prod

from torch import Tensor

from megalite.slices import Rectangle


def inside(shape: Sequence[int], offset: Sequence[int], extent: Sequence[int]) -> bool:
    """Whether the rectangle lies in a tensor of this shape (it may be empty)."""
    if not len(shape) == len(offset) == len(extent):
        return False
    ends = zip(shape, offset, extent, strict=True)
    return all(o >= 0 and e >= 0 and o + e <= size for size, o, e in ends)


def overlap(a: Rectangle, b: Rectangle) -> Rectangle | None:
    """The rectangle common to both, or None where no element is."""
    start = [max(x, y) for x, y in zip(a[0], b[0], strict=True)]
    stops = zip(*a, *b, strict=True)
    size = [min(i + m, j + n) - s for (i, m, j, n), s in zip(stops, start, strict=True)]
    return (tuple(start), tuple(size)) if all(n > 0 for n in size) else None


def view(tensor: Tensor, offset: Sequence[int], rectangle: Rectangle) -> Tensor:
    """The part of a tensor, itself at ``offset`` of the global one, that is ``rectangle``."""
    for dim, (start, size) in enumerate(zip(*rectangle, strict=True)):
        tensor = tensor.narrow(dim, start - offset[dim], size)
    return tensor


def copy_overlap(
    target: Tensor, target_offset: tuple[int, ...], source: Tensor, source_offset: tuple[int, ...]
) -> int:
    """Copy what two rectangles of one global tensor have in common; the number of elements."""
    common = overlap((target_offset, tuple(target.shape)), (source_offset, tuple(source.shape)))
    if common is None:
        return 0
    view(target.detach(), target_offset, common).copy_(view(source, source_offset, common))
    return prod(common[1])


def miscounted(
    shape: Sequence[int], rectangles: Iterable[Rectangle]
) -> tuple[tuple[int, ...], int] | None:
    """The first element that is not in exactly one rectangle, and in how many it is.

    Linear in the number of rectangles, each of which must be ``inside`` the shape. A rectangle's
    indicator is the running sum, over all dims, of +-1 at its 2^d corners; so they tile the
    tensor if and only if their corners add up to the tensor's own. No other corner that does not
    cancel is at or before the first such one (in row-major order) in every dim, so the value
    there is the surplus of that very element.
    """
    surplus: Counter[tuple[int, ...]] = Counter()
    whole = (tuple(0 for _ in shape), tuple(shape))
    for (offset, extent), sign in [(whole, -1), *((r, 1) for r in rectangles)]:
        sides = [((o, 1), (o + e, -1)) for o, e in zip(offset, extent, strict=True)]
        for corner in product(*sides):
            surplus[tuple(at for at, _ in corner)] += sign * prod(s for _, s in corner)
    first = min((at for at, value in surplus.items() if value), default=None)
    return None if first is None else (first, 1 + surplus[first])
