"""Sizes of the three axes and the arithmetic between a rank and its coordinates; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

AXES = ("pp", "dp", "tp")


@dataclass(frozen=True)
class MeshShape:
    """How ``tp * pp * dp`` ranks are arranged.

    ``order`` names the axes from the slowest to the fastest varying: with the default, the ranks
    of one tp group are neighbours, and so on one node.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        if sorted(self.order) != sorted(AXES):
            raise ValueError(f"order must name each of {AXES} once, got {self.order}")
        if min(self.tp, self.pp, self.dp) < 1:
            raise ValueError(f"axis sizes must be at least 1, got {self}")

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def size(self, axis: str) -> int:
        return {"tp": self.tp, "pp": self.pp, "dp": self.dp}[axis]

    def coords(self, rank: int) -> dict[str, int]:
        """The index of ``rank`` on each axis."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a world of {self.world_size}")
        found = {}
        for axis in reversed(self.order):
            rank, found[axis] = divmod(rank, self.size(axis))
        return found

    def rank(self, coords: Mapping[str, int]) -> int:
        """The rank at ``coords``; a missing axis counts as index 0."""
        rank = 0
        for axis in self.order:
            rank = rank * self.size(axis) + coords.get(axis, 0)
        return rank

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Every group of ranks that differ in ``axis`` only, each in the order of its index."""
        others = [a for a in self.order if a != axis]
        found = []
        for fixed in product(*(range(self.size(a)) for a in others)):
            at = dict(zip(others, fixed, strict=True))
            found.append(tuple(self.rank({**at, axis: i}) for i in range(self.size(axis))))
        return found

    def table(self) -> str:
        """A line a rank with its coordinates, for the log."""
        lines = [f"{self} ranks by {', '.join(self.order)} (slowest first)", "rank  pp  dp  tp"]
        for rank in range(self.world_size):
            at = self.coords(rank)
            lines.append(f"{rank:4d}  {at['pp']:2d}  {at['dp']:2d}  {at['tp']:2d}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"tp {self.tp} x pp {self.pp} x dp {self.dp}"
