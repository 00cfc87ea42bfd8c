"""Times a list of computations and puts weight gradients into the idle time it leaves."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megalite.schedule.action import Action, Op
from megalite.schedule.costs import Costs

_NEVER = -1.0
_NOTHING = -1
_EPS = 1e-9


@dataclass(frozen=True)
class Filled:
    """Computations of every rank with each W in its place, and the times they would take.

    Attributes:
        makespan: end of the last action.
        span: the longest time of a rank from its first start to its last end.
        peak: the most activations of a rank, of those that the limit counts.
    """

    actions: tuple[tuple[Action, ...], ...]
    makespan: float
    span: float
    peak: float


def fill(
    orders: Sequence[Sequence[Action]],
    rank_of: Sequence[int],
    num_microbatches: int,
    costs: Costs,
    limit: float,
    open_w: float = 1.0,
    threshold: float = 1.0,
) -> Filled | None:
    """Runs each rank's order as early as it can, with the W of each I put where it costs least.

    W goes, oldest first, where the rank would wait for at least ``threshold`` of its time, where
    an F would break the limit, and at the end of the list. The wait is known exactly: nothing that
    a rank waits for depends on where another one puts its W. Messages take their turn on their
    channel (sender, receiver, kind); buffers are not counted, so ``simulate`` can only be later.

    Args:
        orders: F and I of each rank, or F, B, I and W, of which each W stays where it stands.
        limit: most activations that a rank may hold from F to the end of B or W.
        open_w: what an activation counts between I and W.
    Returns:
        None if the order dead-locks or cannot keep the limit.
    """
    return _Filler(orders, rank_of, num_microbatches, costs, limit, open_w, threshold).run()


class _Filler:
    """Ranks advance one at a time as far as they can.

    ``arrived`` has the inputs of F of (stage, microbatch), then those of B and I.
    """

    def __init__(
        self,
        orders: Sequence[Sequence[Action]],
        rank_of: Sequence[int],
        num_microbatches: int,
        costs: Costs,
        limit: float,
        open_w: float,
        threshold: float,
    ) -> None:
        self.orders, self.rank_of, self.m, self.costs = orders, rank_of, num_microbatches, costs
        self.limit, self.open_w, self.threshold = limit + _EPS, open_w, threshold
        ranks, self.last = len(orders), len(rank_of) - 1
        self.gradients = len(rank_of) * num_microbatches
        self.arrived = [0.0] * num_microbatches + [_NEVER] * (2 * self.gradients - num_microbatches)
        self.now, self.first = [0.0] * ranks, [_NEVER] * ranks
        self.held, self.peak = [0.0] * ranks, 0.0
        self.position = [0] * ranks
        self.done: list[list[Action]] = [[] for _ in range(ranks)]
        self.open: list[deque[Action]] = [deque() for _ in range(ranks)]  # W that have no place yet
        self.free: dict[tuple[int, int, int], float] = {}  # channel -> arrival of its last message
        self.runnable = list(range(ranks))
        self.waits = [_NOTHING] * ranks  # the input that a rank stands before
        self.loose = [all(a.op is not Op.WEIGHT_GRAD for a in order) for order in orders]
        whole = [i + w for i, w in zip(costs.input_grad, costs.weight_grad, strict=True)]
        # What an op costs, and by how much what the rank holds changes.
        self.effects: dict[Op, tuple[Sequence[float], float]] = {
            Op.FORWARD: (costs.forward, 1.0),
            Op.BACKWARD: (whole, -1.0),
            Op.INPUT_GRAD: (costs.input_grad, open_w - 1.0),
            Op.WEIGHT_GRAD: (costs.weight_grad, -open_w),
        }

    def run(self) -> Filled | None:
        while self.runnable:
            if not self._advance(self.runnable.pop()):
                return None
        for rank, order in enumerate(self.orders):
            if self.position[rank] < len(order):
                return None
            for w in self.open[rank]:
                self.now[rank] += self.costs.weight_grad[w.stage]
                self.done[rank].append(w)
        spans = [end - max(0.0, start) for end, start in zip(self.now, self.first, strict=True)]
        return Filled(tuple(map(tuple, self.done)), max(self.now), max(spans), self.peak)

    def _advance(self, rank: int) -> bool:
        """Runs a rank until its list ends or an input is missing; False if memory is."""
        order, done, open_w = self.orders[rank], self.done[rank], self.open[rank]
        arrived, effects, m, gradients = self.arrived, self.effects, self.m, self.gradients
        now, held, limit, threshold = self.now[rank], self.held[rank], self.limit, self.threshold
        weight_grad = self.costs.weight_grad
        loose = self.loose[rank]
        for position in range(self.position[rank], len(order)):
            a = order[position]
            op, at = a.op, a.stage * m + a.microbatch
            if op is Op.FORWARD:
                ready = arrived[at]
            else:
                ready = now if op is Op.WEIGHT_GRAD else arrived[gradients + at]
            if ready == _NEVER:
                self.position[rank] = position
                self.waits[rank] = at if op is Op.FORWARD else gradients + at
                break
            full = op is Op.FORWARD and held + 1 > limit
            while open_w and (
                full
                or (
                    ready - now > _EPS
                    and ready - now + _EPS >= threshold * weight_grad[open_w[0].stage]
                )
            ):
                w = open_w.popleft()
                done.append(w)
                now += weight_grad[w.stage]
                held -= self.open_w
                full = full and held + 1 > limit
            if full:
                return False
            if ready > now:
                now = ready
            if not done:
                self.first[rank] = now
            cost, change = effects[op]
            done.append(a)
            now += cost[a.stage]
            held += change
            if op is Op.FORWARD:
                if held > self.peak:
                    self.peak = held
                self._hand_on(rank, now, a.stage + 1, 0, a.microbatch)
            elif op is not Op.WEIGHT_GRAD:
                if loose and op is Op.INPUT_GRAD:
                    open_w.append(Action(Op.WEIGHT_GRAD, a.stage, a.microbatch))
                self._hand_on(rank, now, a.stage - 1, gradients, a.microbatch)
        else:
            self.position[rank] = len(order)
        self.now[rank], self.held[rank] = now, held
        return True

    def _hand_on(self, rank: int, arrival: float, to: int, back: int, microbatch: int) -> None:
        """The result arrives at stage ``to``; beyond the last stage its own gradient does."""
        if to < 0:
            return
        if to > self.last:
            to, back = self.last, self.gradients
        elif (receiver := self.rank_of[to]) != rank:
            channel = rank, receiver, back
            arrival = max(arrival, self.free.get(channel, 0.0)) + self.costs.comm
            self.free[channel] = arrival
            if self.waits[receiver] == back + to * self.m + microbatch:
                self.waits[receiver] = _NOTHING
                self.runnable.append(receiver)
        self.arrived[back + to * self.m + microbatch] = arrival
