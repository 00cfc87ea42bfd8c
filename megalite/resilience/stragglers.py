"""Ranks that have become slow, from how long each computes: named before anything stalls.

A rank is compared with the ranks that compute the same for other replicas, and with its own past
as the other ranks have changed since. The ranks of one tp group wait for each other inside of
their passes, so they are slow together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from megalite.mesh_shape import MeshShape

FACTOR = 1.5
LOOKS = 5
"""In a row, before a rank is named."""
_KEPT = 20  # looks that make up a rank's past


class Passes(NamedTuple):
    """Median seconds of a microbatch's F, B (or I) and W on a rank, without the waits for
    messages; 0: there was none."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0


@dataclass(frozen=True)
class Straggler:
    """A rank that is ``ratio`` times slower than it should be; ``text`` says by what it is
    measured."""

    rank: int
    ratio: float
    text: str


class Stragglers:
    """Follows the ranks of a job."""

    def __init__(self, shape: MeshShape) -> None:
        self._shape = shape
        self._coords = [shape.coords(rank) for rank in range(shape.world_size)]
        self._past: list[list[float]] = [[] for _ in self._coords]
        self._slow = [0] * len(self._coords)
        self._named: set[int] = set()

    def look(self, ranks: Sequence[Passes]) -> list[Straggler]:
        """What there is to say after another look at all ranks: each slow rank once, until it has
        been as fast as the others again."""
        found = []
        times = [sum(passes) for passes in ranks]
        for rank, time in enumerate(times):
            ratio, than = self._ratio(rank, times)
            if ratio <= FACTOR:
                self._slow[rank] = 0
                self._named.discard(rank)
                self._past[rank] = [*self._past[rank], time][-_KEPT:]
                continue
            self._slow[rank] += 1
            if self._slow[rank] >= LOOKS and rank not in self._named:
                self._named.add(rank)
                found.append(Straggler(rank, ratio, self._text(rank, ratio, than, ranks[rank])))
        return found

    def _ratio(self, rank: int, times: Sequence[float]) -> tuple[float, str]:
        """The larger of two: to the replicas, and to the past."""
        at = self._coords[rank]
        replicas = [
            t
            for t, c in zip(times, self._coords, strict=True)
            if c["pp"] == at["pp"] and c["dp"] != at["dp"]
        ]
        found = [(0.0, "")]
        if replicas and (usual := median(replicas)) > 0:
            found.append((times[rank] / usual, "its replicas"))
        others = [
            times[r] / median(self._past[r])
            for r, c in enumerate(self._coords)
            if (c["pp"], c["dp"]) != (at["pp"], at["dp"]) and self._is_known(r)
        ]
        if others and self._is_known(rank):
            change = times[rank] / median(self._past[rank])
            found.append((change / max(median(others), 1e-9), "before, beside the other ranks"))
        return max(found)

    def _is_known(self, rank: int) -> bool:
        return len(self._past[rank]) >= LOOKS and median(self._past[rank]) > 0

    def _text(self, rank: int, ratio: float, than: str, passes: Passes) -> str:
        at = ", ".join(f"{axis} {index}" for axis, index in self._coords[rank].items())
        shown = zip(("F", "B", "W"), passes, strict=True)
        parts = ", ".join(f"{name} {1e3 * t:.1f} ms" for name, t in shown if t)
        text = f"rank {rank} ({at}) is slow: {ratio:.1f} times {than} ({parts} a microbatch)"
        return text + ("; its tp group waits in step" if self._shape.tp > 1 else "")
