"""Where the time goes in which ranks do not compute."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megalite.schedule.action import Plan
from megalite.schedule.costs import Costs
from megalite.schedule.simulate import simulate_step


@dataclass(frozen=True)
class LostTime:
    """The time of one rank between the start of the step and its end, by what it goes to.

    Attributes:
        busy: F, B, I and W.
        warm_up_and_drain: the schedule's own bubble, were all stages equal and messages free.
        imbalance: waiting for slower ranks.
        communication: what messages add to the step.
        data_parallel: what gradient reductions that computation does not hide add to it.
    """

    busy: float
    warm_up_and_drain: float
    imbalance: float
    communication: float
    data_parallel: float

    @property
    def idle(self) -> float:
        return self.warm_up_and_drain + self.imbalance + self.communication + self.data_parallel


def lost_time(plan: Plan, costs: Costs) -> tuple[LostTime, ...]:
    """Every rank's idle time of a lowered plan, by cause; the causes add up to it exactly.

    A cause is what goes when it is taken away: the reductions first, then the messages, then the
    differences between stages. Each can only lengthen the step. A rank that works more than the
    others has less bubble and no imbalance.
    """
    whole = simulate_step(plan, costs)
    unreduced = simulate_step(plan, replace(costs, reduce=())).makespan
    free = simulate_step(plan, replace(costs, reduce=(), comm=0.0)).makespan
    even = simulate_step(plan, _even(costs))
    lost = []
    for busy, even_busy in zip(whole.busy, even.busy, strict=True):
        waiting = free - busy
        own = min(waiting, even.makespan - even_busy)
        lost.append(
            LostTime(busy, own, waiting - own, unreduced - free, whole.makespan - unreduced)
        )
    return tuple(lost)


def _even(costs: Costs) -> Costs:
    """All stages at the average, without messages and reductions."""
    n = costs.num_stages

    def mean(times: tuple[float, ...]) -> tuple[float, ...]:
        return (sum(times) / n,) * n

    return Costs(mean(costs.forward), mean(costs.input_grad), mean(costs.weight_grad))
