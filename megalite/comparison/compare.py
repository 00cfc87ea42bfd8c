"""The first place, in the order of cause and effect, at which two recorded runs part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, sqrt

import numpy as np
import numpy.typing as npt

from megalite.comparison.record import MADE, PHASES, Records
from megalite.comparison.tensors import LARGEST, Floor, Key, Tensor, Whole, distances, tensors_of
from megalite.errors import ConfigError

EPSILON = {"fp64": 2.0**-52, "fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7}
_LEAST = 1e-3
_GROWTH = 10.0
_CHAINED = ("forward", "backward")
"""Phases in which one tensor leads to the next."""
_NOISE = 8
"""A gradient smaller than so many epsilons of the largest is what is left of an exact zero."""


def tolerance_of(dtypes: Sequence[str]) -> float:
    """Half of the digits of the coarsest: what rounding leaves is well below, a fault above."""
    return sqrt(max(EPSILON[d] for d in dtypes))


@dataclass(frozen=True)
class Side:
    """A tensor as one of the runs has it, at the sample that differs most.

    Attributes:
        ranks: those that computed it: one, or all that have a part, or all if no copy is right.
        norm: the root of its sum of squares.
        alike: how many others have a copy with the same bits.
        copies: how many copies that differ from each other the run's ranks have of it.
        deviates: another of them agrees with the other run.
    """

    stage: int
    microbatch: int
    ranks: tuple[int, ...]
    norm: float
    alike: int = 0
    copies: int = 1
    deviates: bool = False


@dataclass(frozen=True)
class Difference:
    """How far two runs are apart at a tensor.

    Attributes:
        sample: the row of the global batch that differs most; of ``num_samples`` ``num_apart``
            differ by more than the tolerance. -1 for a parameter.
        relative: the largest difference, relative to the tensor's norm (or largest entry).
        same_bits: all hashes are equal.
        computed_by: the layer that computed it.
        missing: the run ("a" or "b") that has recorded nothing of it, if any.
    """

    step: int
    phase: str
    name: str
    role: str
    computed_by: str
    relative: float = inf
    same_bits: bool = False
    sample: int = -1
    num_apart: int = 1
    num_samples: int = 1
    a: Side | None = None
    b: Side | None = None
    missing: str = ""


@dataclass(frozen=True)
class Comparison:
    """What came out.

    Attributes:
        steps: those that were compared; ``common`` those that both have.
        first: where the runs part; None if they agree.
        after: the places after it in that step that differ too.
        before: the largest difference before it; of all, if the runs agree.
        by_step: step -> the largest difference of each phase.
        drifts: the runs have grown apart by more than the tolerance, but nowhere at once.
        alone: the recorded steps that one run has and the other has not, by run.
        same_bits, num_tensors: how many of the tensors before it were equal to the bit.
    """

    steps: tuple[int, ...]
    tolerance: float
    exact: bool
    first: Difference | None
    after: tuple[Difference, ...]
    before: Difference | None
    by_step: Mapping[int, Mapping[str, float]]
    same_bits: int
    num_tensors: int
    alone: tuple[tuple[int, ...], ...] = ((), ())

    @property
    def agrees(self) -> bool:
        return self.first is None and not self.drifts

    @property
    def drifts(self) -> bool:
        worst = self.before.relative if self.before else 0.0
        return self.first is None and worst > self.tolerance


def compare(
    a: Records, b: Records, tolerance: float | None = None, *, exact: bool = False
) -> Comparison:
    """Compare two records, step by step.

    Args:
        tolerance: what no difference may be above. By default that of the coarser dtype, or
            ten times the worst that led to it (for each step since the last that both recorded),
            for training lets rounding grow; what a fault adds is there at once. To a gradient
            or an updated weight others of its step lead not.
        exact: any difference of a bit counts.
    Raises:
        ConfigError: if they are not of one model and batch, or have no step in common.
    """
    _check_alike(a, b)
    common = [step for step in a.steps if step in set(b.steps)]
    if not common:
        raise ConfigError(
            "run.record",
            f"no step is in both records: {_span(a.steps)} in {a.run_dir}, {_span(b.steps)} in "
            f"{b.run_dir}",
            "Record both with the same --run.record_every, for as many steps",
        )
    epsilon = max(EPSILON[a.origin.dtype], EPSILON[b.origin.dtype])
    limit = tolerance_of([a.origin.dtype, b.origin.dtype]) if tolerance is None else tolerance
    first: Difference | None = None
    before: Difference | None = None
    after: list[Difference] = []
    by_step: dict[int, dict[str, float]] = {}
    same, seen, last = 0, 0, common[0] - 1
    led, at = 0.0, (0, "")
    for step in common:
        growth = _GROWTH * (step - last) if tolerance is None else 0.0
        last = step
        judge = _Step(step, a, b, limit, epsilon, exact)
        worst = by_step.setdefault(step, {})
        for found in judge.differences():
            if found.phase in _CHAINED or (step, found.phase) != at:
                led = before.relative if before else 0.0
            at = step, found.phase
            usual = growth * led
            apart = found.relative > max(limit, usual) or (exact and not found.same_bits)
            worst[found.phase] = max(worst.get(found.phase, 0.0), found.relative)
            if first is None and not apart:
                same, seen = same + found.same_bits, seen + 1
                if before is None or found.relative > before.relative:
                    before = found
            elif first is None:
                first = found
            elif found.relative > limit and first.step == step:
                after.append(found)
    alone = tuple(tuple(s for s in run.steps if s not in by_step) for run in (a, b))
    return Comparison(
        tuple(common), limit, exact, first, tuple(after), before, by_step, same, seen, alone
    )


def _check_alike(a: Records, b: Records) -> None:
    ours, theirs = a.origin, b.origin
    if ours.places != theirs.places:
        raise ConfigError(
            "model",
            f"{a.run_dir} and {b.run_dir} have other models: {len(ours.places)} and "
            f"{len(theirs.places)} places are recorded",
            "Compare runs of one model",
        )
    if ours.num_samples != theirs.num_samples:
        raise ConfigError(
            "train.global_batch_size",
            f"is {ours.num_samples} in {a.run_dir} and {theirs.num_samples} in {b.run_dir}",
            "Compare runs whose steps consume the same samples",
        )


def _check_shapes(
    a: Records, b: Records, ours: Mapping[Key, Tensor], theirs: Mapping[Key, Tensor]
) -> None:
    for key in [k for k in (*ours, *theirs) if k.phase == "weight" or k in ours and k in theirs]:
        shapes = [side[key].shape if key in side else None for side in (ours, theirs)]
        if shapes[0] != shapes[1]:
            told = " and ".join(
                f"{shape or 'nothing'} in {records.run_dir}"
                for shape, records in zip(shapes, (a, b), strict=True)
            )
            raise ConfigError("model", f"{key.name} is {told}", "Compare runs of one model")


def _span(steps: Sequence[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]} ({len(steps)})"


class _Step:
    """One step of both runs."""

    def __init__(
        self, step: int, a: Records, b: Records, limit: float, epsilon: float, exact: bool
    ) -> None:
        self.step, self.limit, self.epsilon, self.exact = step, limit, epsilon, exact
        self.places = a.origin.places
        self._index = {name: i for i, name in enumerate(self.places)}
        self.tensors = tensors_of(a.load(step)), tensors_of(b.load(step))
        _check_shapes(a, b, *self.tensors)
        self.made = tuple(
            {k: t.variants() for k, t in side.items() if k.role == MADE} for side in self.tensors
        )
        self._largest = {phase: self._largest_rms(phase) for phase in ("gradient", "weight")}

    def differences(self) -> Iterator[Difference]:
        """Of each tensor, in the order of cause and effect."""
        keys = sorted({*self.tensors[0], *self.tensors[1]}, key=self._order)
        for key in keys:
            if key.role == MADE:
                if not self._is_noise(key):
                    yield self._judge(key, self._variants(0, key), self._variants(1, key))
                continue
            # What a stage received is what the other run made.
            made = key._replace(role=MADE, stage=-1)
            for side in (0, 1):
                if key in self.tensors[side]:
                    pair = [self._variants(0, made), self._variants(1, made)]
                    pair[side] = self.tensors[side][key].variants()
                    yield self._judge(key, *pair)

    def _variants(self, side: int, key: Key) -> list[Whole]:
        return self.made[side].get(key, [])

    def _order(self, key: Key) -> tuple[int, int, int, str, int]:
        at = self._place(key.name)
        if key.phase == "backward":
            at = -at
        return PHASES.index(key.phase), at, key.role != MADE, key.name, key.stage

    def _place(self, name: str) -> int:
        """The place that a parameter belongs to; the head's are at the end."""
        while name not in self._index and "." in name:
            name = name.rpartition(".")[0]
        return self._index.get(name, len(self.places))

    def _computed_by(self, key: Key) -> str:
        if key.phase == "backward" and key.role == MADE:
            return self.places[self._index[key.name] + 1]
        return key.name

    def _largest_rms(self, phase: str) -> float:
        keys = {key for made in self.made for key in made if key.phase == phase}
        return max((rms for key in keys if isfinite(rms := self._rms(key))), default=0.0)

    def _rms(self, key: Key) -> float:
        wholes = [whole for made in self.made for whole in made.get(key, [])]
        return max(float(w.norms()[0]) / sqrt(w.size) for w in wholes)

    def _is_noise(self, key: Key) -> bool:
        """Weights whose gradient is zero in exact arithmetic, such as a key bias: Adam makes
        steps of any size of its rounding errors."""
        if key.phase != "weight":
            return False
        grad = key._replace(phase="gradient")
        known = all(grad in made for made in self.made)
        return known and self._rms(grad) <= _NOISE * self.epsilon * self._largest["gradient"]

    def _judge(self, key: Key, ours: list[Whole], theirs: list[Whole]) -> Difference:
        found = Difference(
            step=self.step,
            phase=key.phase,
            name=key.name,
            role=key.role,
            computed_by=self._computed_by(key),
        )
        if not ours or not theirs:
            return replace(found, missing="b" if ours else "a")
        floor = self._floor(key, [*ours, *theirs])
        pairs = {
            (i, j): distances(mine, other, floor)
            for i, mine in enumerate(ours)
            for j, other in enumerate(theirs)
        }
        near = min(pairs, key=lambda at: float(pairs[at].max()))
        far = near
        if pairs[near].max() <= self.limit:
            # Beside the copies that agree, the one that is farthest off.
            beside = [at for at in pairs if at[0] == near[0] or at[1] == near[1]]
            far = max(beside, key=lambda at: float(pairs[at].max()))
        apart = pairs[far]
        sample = int(apart.argmax())
        mine, other = ours[far[0]], theirs[far[1]]
        one = len(ours) == len(theirs) == 1
        return replace(
            found,
            relative=float(apart[sample]),
            same_bits=one and bool(np.array_equal(mine.hashes, other.hashes)),
            sample=sample if key.phase in ("forward", "backward") else -1,
            num_apart=int(((apart > self.limit) | self._bits_apart(mine, other)).sum()),
            num_samples=len(apart),
            a=self._side(ours, mine, ours[near[0]], other, sample, floor),
            b=self._side(theirs, other, theirs[near[1]], mine, sample, floor),
        )

    def _bits_apart(self, a: Whole, b: Whole) -> npt.NDArray[np.bool_]:
        """(samples,) where a bit differs, if every bit counts."""
        unlike: npt.NDArray[np.bool_] = np.logical_and(a.hashes != b.hashes, self.exact)
        return unlike

    def _floor(self, key: Key, wholes: Sequence[Whole]) -> Floor:
        """To what a difference is relative at least: a thousandth (or the tolerance, if that is
        more) of the largest tensor of a phase, or of the largest sample of an activation. What is
        far below is rounding, such as a key bias's gradient."""
        size = wholes[0].size
        rms = self._largest.get(key.phase)
        norms = [float(n) for w in wholes for n in w.norms() if isfinite(n)]
        tops = [float(n) for w in wholes for n in w.numbers[:, LARGEST] if isfinite(n)]
        norm = max(norms, default=0.0) if rms is None else rms * sqrt(size)
        share = max(self.limit, _LEAST)
        return Floor(share * norm, share * max([*tops, rms or 0.0]))

    def _side(
        self,
        copies: list[Whole],
        whole: Whole,
        agreed: Whole,
        other: Whole,
        sample: int,
        floor: Floor,
    ) -> Side:
        """Who computed it: the ranks whose parts are not those of the copy that agrees, or not
        those of the other run where that is cut alike; else all that have a part."""
        parts, odd = list(whole.parts), agreed is not whole
        against = agreed if odd else other
        if len(parts) > 1 and [r for r, _ in against.parts] == [r for r, _ in parts]:
            apart = [
                distances(Whole.of([mine]), Whole.of([theirs]), floor)[sample]
                for mine, theirs in zip(parts, against.parts, strict=True)
            ]
            parts = [p for p, far in zip(parts, apart, strict=True) if far > self.limit] or parts
        if not odd and len(copies) > 1 and distances(whole, other, floor).max() > self.limit:
            parts = [part for copy in copies for part in copy.parts]
        first = parts[0][1]
        return Side(
            stage=first.stage,
            microbatch=int(first.microbatch[sample]),
            ranks=tuple(sorted({int(p.rank[sample]) for _, p in parts})),
            norm=float(whole.norms()[sample]),
            alike=whole.alike,
            copies=len(copies),
            deviates=odd,
        )
