"""A pipeline's time and peaks, by the runtime's own generators, lowering and simulator. No torch.

Every microbatch of a short plan is simulated. A long one repeats itself: from some round on, pp
microbatches more make it longer by the same time, which is never less than the dearest rank's work
on them. Three plans of one round more each tell whether that has begun; if not, the whole plan is
simulated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megalite.schedule.action import Plan
from megalite.schedule.costs import Costs
from megalite.schedule.generators import build_schedule
from megalite.schedule.lower import lower
from megalite.schedule.peaks import peak_memory
from megalite.schedule.simulate import Simulator

_ROUNDS = (1, 3, 6)
"""Rounds of pp microbatches after which a plan is looked at for its repetition."""
_PEAK_ROUNDS = 3
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


_HOLD_ALL = ("gpipe", "looped_bfs")


@lru_cache(maxsize=1024)
def _computations(schedule: str, pp: int, microbatches: int, virtual_stages: int) -> Plan:
    return build_schedule(schedule, pp, microbatches, virtual_stages)


def lowered(schedule: str, pp: int, microbatches: int, virtual_stages: int) -> Plan:
    """The plan as the runtime has it."""
    return _simulator(schedule, pp, microbatches, virtual_stages).plan


@lru_cache(maxsize=256)
def _simulator(schedule: str, pp: int, microbatches: int, virtual_stages: int) -> Simulator:
    """Of the plan as the runtime has it, and kept: many layouts differ in their costs alone."""
    return Simulator(lower(_computations(schedule, pp, microbatches, virtual_stages)))


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
    if pp == 1 and virtual_stages == 1:
        return _alone(microbatches, costs)
    if pp * virtual_stages * microbatches > most:
        steady = _steady(schedule, pp, microbatches, virtual_stages, costs)
        if steady is not None:
            return steady
    timeline = _simulator(schedule, pp, microbatches, virtual_stages).run(costs)
    return Pipelined(timeline.makespan, timeline.busy, True)


def _alone(microbatches: int, costs: Costs) -> Pipelined:
    """One rank with one stage waits for nobody."""
    one = costs.forward[0] + costs.input_grad[0] + costs.weight_grad[0]
    busy = microbatches * one
    return Pipelined(busy + sum(costs.reduce), (busy,), True)


def _steady(
    schedule: str, pp: int, microbatches: int, virtual_stages: int, costs: Costs
) -> Pipelined | None:
    """What three shorter plans say, if they agree; None if they do not, or are no shorter."""
    for rounds in _ROUNDS:
        start = rounds * pp + microbatches % pp
        counts = (start, start + pp, start + 2 * pp)
        if sum(counts) >= microbatches:
            return None
        found = [_simulator(schedule, pp, m, virtual_stages).run(costs) for m in counts]
        spans = [t.makespan for t in found]
        growth = spans[2] - spans[1]
        each = [b - a for a, b in zip(found[1].busy, found[2].busy, strict=True)]
        close = _EXACT * spans[2]
        if abs(growth - (spans[1] - spans[0])) <= close and growth >= max(each) - close:
            more = (microbatches - counts[-1]) // pp
            busy = tuple(b + more * e for b, e in zip(found[2].busy, each, strict=True))
            return Pipelined(spans[2] + more * growth, busy, False)
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
    few = min(microbatches, _PEAK_ROUNDS * pp * (2 if virtual_stages > 1 else 1))
    held = peak_memory(_computations(schedule, pp, few, virtual_stages), activation, open_w)
    if schedule not in _HOLD_ALL:
        return held
    rank_of = _computations(schedule, pp, few, virtual_stages).rank_of
    more = [0.0] * pp
    for stage, rank in enumerate(rank_of):
        more[rank] += (microbatches - few) * activation[stage]
    return tuple(h + m for h, m in zip(held, more, strict=True))
