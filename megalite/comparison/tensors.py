"""From what ranks have recorded of a step to whole tensors, however they were cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.comparison.record import MADE, Entry, Floats, RankStep, Rectangle, Words
from megalite.errors import ConfigError

Ints = npt.NDArray[np.int64]
SUM, SQUARES, LARGEST, PROJECTION = range(4)


class Key(NamedTuple):
    """What is compared. ``stage`` is -1 for what was made: there only one stage makes it."""

    phase: str
    name: str
    role: str
    stage: int


@dataclass
class Part:
    """A rectangle of a tensor as one rank (of each replica) has it, by sample of the global batch.

    ``rank`` is -1 where nothing is recorded of a sample.
    """

    numbers: Floats
    hashes: Words
    rank: Ints
    microbatch: Ints
    stage: int

    @classmethod
    def blank(cls, num_samples: int, stage: int) -> Part:
        none = np.full(num_samples, -1, np.int64)
        hashes = np.zeros(num_samples, np.uint64)
        return cls(np.zeros((num_samples, 4)), hashes, none, none.copy(), stage)

    def same_bits(self, other: Part) -> bool:
        return bool(
            np.array_equal(self.hashes, other.hashes)
            and np.array_equal(self.rank < 0, other.rank < 0)
        )


@dataclass(frozen=True)
class Whole:
    """The numbers of a whole tensor by sample, and the parts that were added up; ``alike`` other
    sets of ranks have it with the same bits."""

    numbers: Floats
    hashes: Words
    present: npt.NDArray[np.bool_]
    size: int
    parts: tuple[tuple[Rectangle, Part], ...] = field(repr=False)
    alike: int = 0

    @classmethod
    def of(cls, parts: Sequence[tuple[Rectangle, Part]]) -> Whole:
        numbers = sum((p.numbers for _, p in parts[1:]), parts[0][1].numbers.copy())
        numbers[:, LARGEST] = np.max([p.numbers[:, LARGEST] for _, p in parts], axis=0)
        hashes = np.add.reduce([p.hashes for _, p in parts], axis=0, dtype=np.uint64)
        present = np.all([p.rank >= 0 for _, p in parts], axis=0)
        size = sum(prod(extent) for (_, extent), _ in parts)
        return cls(numbers, hashes, present, size, tuple(parts))

    def norms(self) -> Floats:
        return np.sqrt(self.numbers[:, SQUARES])


class Floor(NamedTuple):
    """To what differences are relative at least: a norm, and a largest entry."""

    norm: float
    top: float


def distances(a: Whole, b: Whole, floor: Floor) -> Floats:
    """(samples,) how far two tensors are apart, relative to them; infinite where only one is.

    An error e shows in the difference of norms, of projections (whose variance is |e|^2), of sums
    (at most sqrt(size) |e|) and of largest entries; the worst of them counts.
    """
    norms = np.maximum(np.maximum(a.norms(), b.norms()), floor.norm)
    tops = np.maximum(np.maximum(a.numbers[:, LARGEST], b.numbers[:, LARGEST]), floor.top)
    with np.errstate(invalid="ignore", divide="ignore"):
        delta = np.abs(a.numbers - b.numbers)
        seen = [
            np.abs(a.norms() - b.norms()) / norms,
            delta[:, PROJECTION] / norms,
            delta[:, SUM] / (norms * sqrt(a.size)),
            delta[:, LARGEST] / tops,
        ]
    found: Floats = np.max(seen, axis=0)
    lost = [~np.isfinite(w.numbers).all(axis=1) for w in (a, b)]
    found[np.isnan(found)] = inf
    # Not finite in both, or nothing but zeros.
    found[(lost[0] & lost[1]) | (norms == 0) | (a.hashes == b.hashes)] = 0.0
    found[a.present != b.present] = inf
    return found


@dataclass
class Tensor:
    """All that a run has recorded of a tensor in one step."""

    key: Key
    shape: tuple[int, int]
    parts: dict[Rectangle, dict[int, Part]] = field(default_factory=dict)
    owned: set[Rectangle] = field(default_factory=set)

    def variants(self) -> list[Whole]:
        """The tensor as each set of ranks that hold it together has it; those that differ.

        Raises:
            ConfigError: if the parts do not make up the tensor.
        """
        owned = {rect: list(self.parts[rect].values()) for rect in sorted(self.owned)}
        if sum(prod(extent) for _, extent in owned) != prod(self.shape):
            raise ConfigError(
                "run.record", f"{self.key.name} is recorded in part only", "Record the run anew"
            )
        found: list[Whole] = []
        for k in range(max(map(len, owned.values()))):
            parts = [(rect, copies[min(k, len(copies) - 1)]) for rect, copies in owned.items()]
            for i, other in enumerate(found):
                if all(_same(a, b) for a, b in zip(parts, other.parts, strict=True)):
                    found[i] = replace(other, alike=other.alike + 1)
                    break
            else:
                found.append(Whole.of(parts))
        return found


def _same(a: tuple[Rectangle, Part], b: tuple[Rectangle, Part]) -> bool:
    return a[1] is b[1] or a[1].same_bits(b[1])


def tensors_of(ranks: Sequence[RankStep]) -> dict[Key, Tensor]:
    """Every tensor of a step."""
    found: dict[Key, Tensor] = {}
    for rank in ranks:
        for entry, rows in _rows(rank):
            stage = -1 if entry.role == MADE else entry.stage
            key = Key(entry.phase, entry.name, entry.role, stage)
            tensor = found.setdefault(key, Tensor(key, entry.shape))
            _take(tensor, rank, entry, rows)
    return found


def _rows(rank: RankStep) -> Iterator[tuple[Entry, slice]]:
    at = 0
    for entry in rank.entries:
        yield entry, slice(at, at + len(entry.samples))
        at += len(entry.samples)


def _take(tensor: Tensor, rank: RankStep, entry: Entry, rows: slice) -> None:
    """Replicas have other samples of an activation, and copies of a parameter."""
    origin, activation = rank.origin, entry.microbatch >= 0
    rect = (entry.offset, entry.extent)
    if entry.owner:
        tensor.owned.add(rect)
    copies = tensor.parts.setdefault(rect, {})
    number = origin.tp if activation else origin.rank
    if number not in copies:
        copies[number] = Part.blank(origin.num_samples if activation else 1, entry.stage)
    part = copies[number]
    samples = np.array(entry.samples)
    here = samples >= 0
    part.numbers[samples[here]] = rank.numbers[rows][here]
    part.hashes[samples[here]] = rank.hashes[rows][here]
    part.rank[samples[here]] = origin.rank
    part.microbatch[samples[here]] = entry.microbatch
