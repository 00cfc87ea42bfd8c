"""How early a plan can end at best, by its computations and messages alone. No torch.

Lowering makes five actions of most computations, and its simulation decides; but what decides an
order of layouts is mostly known before: no lowered plan ends before its computations and messages
in their order could, were every receive posted in time. So most layouts need not be lowered.
"""

from __future__ import annotations

from collections import deque

from megalite.schedule.action import Op, Plan
from megalite.schedule.costs import Costs

_NEVER = -1.0
_OPS = (Op.FORWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD, Op.BACKWARD)


class Earliest:
    """A plan of computations made ready to be timed with many costs.

    Messages have numbers: stage that takes it x microbatches + microbatch, and gradients lie
    behind all activations. Every list has an entry a computation, in an order in which each comes
    after what it needs.
    """

    def __init__(self, plan: Plan) -> None:
        self.pp, self.num_stages, self.m = plan.pp, plan.num_stages, plan.num_microbatches
        self.gradients = self.num_stages * self.m
        self.ranks: list[int] = []
        self.slots: list[int] = []  # which of the times of F, I, W and B of all stages
        self.needed: list[int] = []  # message, or -1
        self.made: list[int] = []  # message, or -1 where none leaves the rank
        self.channels: list[int] = []
        self.reductions: list[tuple[int, int, int]] = []  # after this entry, of rank and stage
        self._order(plan)

    def _order(self, plan: Plan) -> None:
        """Ranks advance one at a time as far as they can."""
        there = [False] * (2 * self.gradients)
        position = [0] * self.pp
        waiting: dict[int, int] = {}
        last: dict[int, tuple[int, int]] = {}  # of a stage: its last backward's entry and rank
        runnable = deque(range(self.pp))
        steps = [self._steps(plan, rank) for rank in range(self.pp)]
        while runnable:
            rank = runnable.popleft()
            mine = steps[rank]
            for at in range(position[rank], len(mine)):
                slot, need, made, channel, backward = mine[at]
                if need >= 0 and not there[need]:
                    waiting[need] = rank
                    position[rank] = at
                    break
                if backward >= 0:
                    last[backward] = len(self.ranks), rank
                self.ranks.append(rank)
                self.slots.append(slot)
                self.needed.append(need)
                self.made.append(made)
                self.channels.append(channel)
                if made >= 0:
                    there[made] = True
                    if made in waiting:
                        runnable.append(waiting.pop(made))
            else:
                position[rank] = len(mine)
        assert not waiting, "a plan of computations cannot stand still"
        self.reductions = sorted((entry, rank, stage) for stage, (entry, rank) in last.items())

    def _steps(self, plan: Plan, rank: int) -> list[tuple[int, int, int, int, int]]:
        """Slot, message needed, message made, its channel, and the stage of a backward or -1."""
        m, stages, gradients = self.m, self.num_stages, self.gradients
        mine = plan.stages_of(rank)
        place = {op: i * stages for i, op in enumerate(_OPS)}
        before = {s: plan.peer(s, s - 1) for s in mine}
        after = {s: plan.peer(s, s + 1) for s in mine}
        found = []
        for a in plan[rank]:
            s, number = a.stage, a.stage * m + a.microbatch
            slot = place[a.op] + s
            if a.op is Op.FORWARD:
                need = -1 if before[s] is None else number
                to = after[s]
                made, channel = number + m, -1 if to is None else rank * self.pp + to
            elif a.op is Op.WEIGHT_GRAD:
                found.append((slot, -1, -1, -1, s))
                continue
            else:
                need = -1 if after[s] is None else gradients + number
                to = before[s]
                made = gradients + number - m
                channel = -1 if to is None else (self.pp + rank) * self.pp + to
            found.append(
                (slot, need, made if to is not None else -1, channel, -1 if slot < stages else s)
            )
        return found

    def run(self, costs: Costs) -> float:
        """The end of the last computation or reduction: never after ``simulate``'s."""
        whole = [i + w for i, w in zip(costs.input_grad, costs.weight_grad, strict=True)]
        times = [*costs.forward, *costs.input_grad, *costs.weight_grad, *whole]
        now = [0.0] * self.pp
        free = [0.0] * (2 * self.pp * self.pp)
        arrived = [_NEVER] * (2 * self.gradients)
        comm, ends = costs.comm, []
        for rank, slot, need, made, channel in zip(
            self.ranks, self.slots, self.needed, self.made, self.channels, strict=True
        ):
            t = now[rank]
            if need >= 0 and arrived[need] > t:
                t = arrived[need]
            t += times[slot]
            now[rank] = t
            ends.append(t)
            if made >= 0:
                if free[channel] > t:
                    t = free[channel]
                free[channel] = arrived[made] = t + comm
        return max(*now, *self._reduced(costs, ends))

    def _reduced(self, costs: Costs, ends: list[float]) -> list[float]:
        """When each rank's reductions end: one after another, beside its computations."""
        done = [0.0] * self.pp
        if costs.reduce:
            for entry, rank, stage in self.reductions:
                done[rank] = max(done[rank], ends[entry]) + costs.reduce[stage]
        return done
