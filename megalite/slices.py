"""Which part of a global tensor a local parameter is: the one description that initialisation,
reduction, the norm, checkpoints and tests share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn


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
    the ranks of a (tp x pp) grid that hold the rectangle.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor
    owner: bool = True


def pieces(named: Iterator[tuple[nn.Parameter, Tensor]], prefix: str = "") -> Iterator[Piece]:
    """A piece for each (parameter, tensor of the parameter's local shape)."""
    for param, tensor in named:
        at = get_slice(param)
        if all(at.extent):
            yield Piece(prefix + at.name, at.shape, at.offset, at.valid(tensor), at.counted)
