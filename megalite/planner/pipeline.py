"""A pipeline's time and peaks, by the runtime's own generators, lowering and simulator. No torch.

Every microbatch of a short plan is simulated. A long one repeats itself: from some round on, pp
microbatches more make it longer by the same time, which is never less than the dearest rank's work
on them. Computations and messages alone (``earliest``, never later than the simulation) tell when
that begins: where one round more adds the same time twice. Plans of that length and a round more
are simulated; once they differ by the same time, the rest follows; else the whole plan is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalite.planner.earliest import Earliest
from megalite.schedule.action import Op, Plan
from megalite.schedule.costs import Costs
from megalite.schedule.generators import SCHEDULES, build_schedule
from megalite.schedule.lower import lower
from megalite.schedule.placement import place_stages
from megalite.schedule.simulate import Simulator

_PEAK_ROUNDS = 2
"""Rounds of pp microbatches in which a rank's memory has its peak; of groups of them, one more."""
_EXACT = 1e-9
MOST_SIMULATED = 4_000
"""Stages x microbatches up to which a plan is simulated as it is."""


@dataclass(frozen=True)
class Pipelined:
    """Seconds of a step's pipeline, and of each rank's computing."""

    makespan: float
    busy: tuple[float, ...]
    exact: bool

    @property
    def bubble_fraction(self) -> float:
        whole = len(self.busy) * self.makespan
        return 1 - sum(self.busy) / whole if whole else 0.0


class _Start(NamedTuple):
    """From so many microbatches on, pp more add ``growth`` seconds to ``end_s``."""

    microbatches: int
    end_s: float
    growth: float


_HOLD_ALL = ("gpipe", "looped_bfs")


@lru_cache(maxsize=32)
def _computations(schedule: str, pp: int, microbatches: int, virtual_stages: int) -> Plan:
    return build_schedule(schedule, pp, microbatches, virtual_stages)


def placed(schedule: str, pp: int, virtual_stages: int) -> tuple[int, ...]:
    """The rank of each stage; an unknown schedule's lie in a loop."""
    v = schedule in SCHEDULES and SCHEDULES[schedule].chunks == "two"
    return place_stages("v" if v else "loop", pp, virtual_stages)


def lowered(schedule: str, pp: int, microbatches: int, virtual_stages: int) -> Plan:
    """The plan as the runtime has it."""
    return _simulator(schedule, pp, microbatches, virtual_stages).plan


@lru_cache(maxsize=64)
def _simulator(schedule: str, pp: int, microbatches: int, virtual_stages: int) -> Simulator:
    """Of the plan as the runtime has it, and kept: many layouts differ in their costs alone."""
    return Simulator(lower(_computations(schedule, pp, microbatches, virtual_stages)))


@lru_cache(maxsize=256)
def _earliest(schedule: str, pp: int, microbatches: int, virtual_stages: int) -> Earliest:
    return Earliest(_computations(schedule, pp, microbatches, virtual_stages))


def run(
    schedule: str,
    pp: int,
    microbatches: int,
    virtual_stages: int,
    costs: Costs,
    most: int = MOST_SIMULATED,
) -> Pipelined:
    """The time of a step's pipeline with its reductions; plans of more than ``most`` stages x
    microbatches are looked at for repetition first."""

    def span(m: int) -> float:
        return _simulator(schedule, pp, m, virtual_stages).run(costs).makespan

    work = _work(pp, virtual_stages, schedule, costs)
    busy = tuple((microbatches * work).tolist())
    if pp == 1 and virtual_stages == 1:
        return Pipelined(busy[0] + sum(costs.reduce), busy, True)
    if pp * virtual_stages * microbatches > most:
        start = _steady(schedule, pp, microbatches, virtual_stages, costs)
        steady = None if start is None else _repeated(start, pp, microbatches, span)
        if steady is not None:
            return Pipelined(steady, busy, False)
    return Pipelined(span(microbatches), busy, True)


def _repeated(
    start: _Start, pp: int, microbatches: int, span: Callable[[int], float]
) -> float | None:
    """What simulated plans say, from where computations and messages repeat themselves: their
    growth a round is the same as those's, or twice the same; None if that takes too many."""
    m, tried = start.microbatches, start.microbatches
    end, known = span(m), start.growth
    while tried + m + pp < microbatches:
        m += pp
        tried += m
        before, end = end, span(m)
        growth = end - before
        close = _EXACT * end
        if abs(growth - known) <= close and growth >= start.growth - close:
            return end + (microbatches - m) // pp * growth
        known = growth
    return None


def earliest(schedule: str, pp: int, microbatches: int, virtual_stages: int, costs: Costs) -> float:
    """The time that no lowering of the plan is faster than; mostly that of ``run``."""
    if pp == 1 and virtual_stages == 1:
        return run(schedule, pp, microbatches, virtual_stages, costs).makespan

    if pp * virtual_stages * microbatches > MOST_SIMULATED:
        start = _steady(schedule, pp, microbatches, virtual_stages, costs)
        if start is not None:
            return start.end_s + (microbatches - start.microbatches) // pp * start.growth
    return _earliest(schedule, pp, microbatches, virtual_stages).run(costs)


def _work(pp: int, virtual_stages: int, schedule: str, costs: Costs) -> NDArray[np.float64]:
    """Seconds of each rank on a microbatch."""
    whole = np.add(np.add(costs.forward, costs.input_grad), costs.weight_grad)
    rank_of = np.array(placed(schedule, pp, virtual_stages))
    return np.asarray(np.bincount(rank_of, whole, pp), float)


@lru_cache(maxsize=4096)
def _steady(
    schedule: str, pp: int, microbatches: int, virtual_stages: int, costs: Costs
) -> _Start | None:
    """Where a plan's computations and messages begin to repeat themselves; None if they do not,
    or if the plans that would tell are no shorter together than the whole."""
    work = pp * float(_work(pp, virtual_stages, schedule, costs).max())
    ends: list[float] = []
    first = pp + microbatches % pp
    tried = 0
    for m in range(first, microbatches, pp):
        tried += m
        if tried >= microbatches:
            return None
        ends.append(_earliest(schedule, pp, m, virtual_stages).run(costs))
        if len(ends) >= 3:
            growth, close = ends[-1] - ends[-2], _EXACT * ends[-1]
            if abs(growth - (ends[-2] - ends[-3])) <= close and growth >= work - close:
                return _Start(m - 2 * pp, ends[-3], growth)
    return None


def peaks(
    schedule: str,
    pp: int,
    microbatches: int,
    virtual_stages: int,
    activation: tuple[float, ...],
    open_w: tuple[float, ...],
) -> tuple[float, ...]:
    """Bytes of activations that each rank holds at most. What is in flight has its peak in the
    first rounds; the schedules that hold everything gain a microbatch with every microbatch."""
    rounds = _PEAK_ROUNDS + (schedule == "interleaved_1f1b")
    few = min(microbatches, rounds * pp + microbatches % pp)
    each = np.array([activation, open_w])
    more = microbatches - few if schedule in _HOLD_ALL else 0
    return tuple(
        float((counts @ each[:, stages].ravel()).max() + more * each[0, stages].sum())
        for stages, counts in _held(schedule, pp, few, virtual_stages)
    )


_LEAST_HELD = {"v_half": 1 / 2, "v_min": 1 / 3}


def least_held(schedule: str, pp: int, microbatches: int) -> float:
    """Microbatches that some rank holds at least, known before the plan is made."""
    return _LEAST_HELD.get(schedule, 1.0) * min(microbatches, pp)


@lru_cache(maxsize=1024)
def _held(
    schedule: str, pp: int, microbatches: int, virtual_stages: int
) -> tuple[tuple[list[int], NDArray[np.float64]], ...]:
    """Of each rank its stages, and what it holds at any time, each combination once: microbatches
    of each stage from F to the end of B or I, then those from I to the end of W."""
    plan = _computations(schedule, pp, microbatches, virtual_stages)
    found = []
    for rank, actions in enumerate(plan.actions):
        stages = list(plan.stages_of(rank))
        place = {s: i for i, s in enumerate(stages)}
        held, seen = [0] * (2 * len(stages)), set()
        for a in actions:
            at = place[a.stage]
            if a.op is Op.FORWARD:
                held[at] += 1
                seen.add(tuple(held))
            elif a.op is Op.WEIGHT_GRAD:
                held[len(stages) + at] -= 1
            else:
                held[at] -= 1
                if a.op is Op.INPUT_GRAD:
                    held[len(stages) + at] += 1
        found.append((stages, np.array(sorted(seen), float)))
    return tuple(found)
