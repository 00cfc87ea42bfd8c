"""Which part of a global tensor a local parameter is: the one description that initialisation,
reduction, the norm, checkpoints and tests share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor, nn

# (offset, extent), both in elements of a tensor, one number a dim.
Rectangle = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Slice:
    """The rectangle ``[offset, offset + extent)`` of the global tensor ``name``.

    Attributes:
        name: global name, the same in every layout.
        shape: the global shape, without padding.
        offset: where the rectangle starts.
        extent: its size; smaller than the local parameter where that is padded (the surplus,
            at the end of each dim, is zero and stays zero). May be 0.
        init: ``("normal", std)`` or ``("constant", value)``.
        decay: whether weight decay applies.
        replica: this rank's number among the tp ranks that hold the same rectangle. Replica 0
            counts in the norm and is written.
        partial: each replica's gradient is a part of the sum over tp.
        slot: (index, count) of the rectangle among the distinct ones that tp ranks hold, for a
            partial gradient of a parameter that is both cut and replicated.
        tied: "copy" of a parameter that another pipeline rank holds as its "owner", "shared" by
            two uses on this rank, or neither ("").
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    init: tuple[str, float] = ("constant", 0.0)
    decay: bool = False
    replica: int = 0
    partial: bool = False
    slot: tuple[int, int] = (0, 1)
    tied: str = ""

    @property
    def counted(self) -> bool:
        """Exactly one rank of a (tp x pp) grid counts each element."""
        return self.replica == 0 and self.tied != "copy"

    def valid(self, tensor: Tensor) -> Tensor:
        """The view of a local tensor (parameter, gradient, moment) that exists globally."""
        for dim, size in enumerate(self.extent):
            tensor = tensor.narrow(dim, 0, size)
        return tensor


def set_slice(param: nn.Parameter, piece: Slice) -> nn.Parameter:
    """Attach the description to the parameter."""
    param.slice = piece  # type: ignore[attr-defined]
    return param


def get_slice(param: Tensor) -> Slice:
    """The description that a parallel layer attached."""
    found = getattr(param, "slice", None)
    assert isinstance(found, Slice), "a parameter was made outside megalite's layers"
    return found


@dataclass(frozen=True)
class Piece:
    """A rectangle of a global tensor and the local memory that holds it.

    ``tensor`` has the rectangle's extent and may be a view; ``owner`` is true on exactly one of
    the ranks of a (tp x pp) grid that hold an element.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor
    owner: bool = True


def rectangles(shape: Sequence[int], start: int, stop: int) -> list[Rectangle]:
    """The flat range [start, stop) of a row-major tensor as at most 2 d - 1 rectangles.

    They follow each other in the range, and each is contiguous in it: the k-th one's elements,
    in row-major order, are the next ``prod(extent)`` of the flat memory.

    Raises:
        ValueError: if the range is not within the tensor.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"[{start}, {stop}) is not a range of a tensor of shape {tuple(shape)}")
    if start == stop:
        return []
    if not shape:
        return [((), ())]
    inner = tuple(shape[1:])
    row_size = prod(inner)
    found: list[Rectangle] = []
    while start < stop:
        row, at = divmod(start, row_size)
        rows = (stop - start) // row_size if at == 0 else 0
        if rows:
            found.append(((row, *(0 for _ in inner)), (rows, *inner)))
            start += rows * row_size
        else:
            end = min(stop - row * row_size, row_size)
            found += [((row, *o), (1, *e)) for o, e in rectangles(inner, at, end)]
            start = row * row_size + end
    return found


def flat_pieces(param: nn.Parameter, flat: Tensor, start: int, prefix: str = "") -> Iterator[Piece]:
    """What a run of a parameter's elements holds of the global tensor, without padding.

    Args:
        flat: (n,) the elements ``start`` to ``start + n`` of the local parameter in row-major
            order, or what else is laid out like them (gradients, moments); the pieces are views.
        prefix: goes before the parameter's global name.
    """
    at = get_slice(param)
    for offset, extent in rectangles(param.shape, start, start + flat.numel()):
        part, flat = flat[: prod(extent)].view(extent), flat[prod(extent) :]
        ends = zip(offset, extent, at.extent, strict=True)
        kept = [max(0, min(o + e, size) - o) for o, e, size in ends]
        if all(kept):
            for dim, size in enumerate(kept):
                part = part.narrow(dim, 0, size)
            place = tuple(map(sum, zip(at.offset, offset, strict=True)))
            yield Piece(prefix + at.name, at.shape, place, part, at.counted)
