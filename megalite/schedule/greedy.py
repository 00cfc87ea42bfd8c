"""Orders of F and I by list scheduling: a free rank takes the most urgent thing that can run."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence

from megalite.schedule.action import Action, Op
from megalite.schedule.costs import Costs

Priority = tuple[tuple[Op, int], ...]  # (F or I, chunk), the most urgent first
_EPS = 1e-9


def priorities(virtual_stages: int) -> Iterator[Priority]:
    """F or I first throughout, and for two chunks both in turn. Of F the later chunks go first,
    which empties a rank before it fills it."""
    chunks = range(virtual_stages)
    forward = tuple((Op.FORWARD, c) for c in reversed(chunks))
    backward = tuple((Op.INPUT_GRAD, c) for c in chunks)
    for back in (backward, backward[::-1])[:virtual_stages]:
        yield (*forward, *back)
        yield (*back, *forward)
        if virtual_stages == 2:
            yield (forward[0], back[0], forward[1], back[1])


def greedy_orders(
    rank_of: Sequence[int],
    num_microbatches: int,
    costs: Costs,
    limit: float,
    open_w: float,
    priority: Priority,
) -> list[list[Action]]:
    """Runs the pipeline in time: a free rank starts the most urgent F or I whose input is there,
    else a W.

    An F of a chunk leaves room for one activation of every later chunk of its rank. So the oldest
    microbatch can always go on, and the run ends for any limit of at least one microbatch.
    """
    return _Greedy(rank_of, num_microbatches, costs, limit, open_w, priority).run()


class _Greedy:
    def __init__(
        self,
        rank_of: Sequence[int],
        num_microbatches: int,
        costs: Costs,
        limit: float,
        open_w: float,
        priority: Priority,
    ) -> None:
        self.rank_of, self.m, self.costs, self.open_w = rank_of, num_microbatches, costs, open_w
        ranks, self.last = max(rank_of) + 1, len(rank_of) - 1
        self.stages = [[s for s, r in enumerate(rank_of) if r == rank] for rank in range(ranks)]
        self.rooms = [limit + _EPS - len(stages) for stages in self.stages]
        self.priority = priority
        # Arrivals of the inputs of a stage's next microbatches: they are taken in this order.
        self.inputs: dict[tuple[Op, int], deque[float]] = {
            (op, s): deque() for op in (Op.FORWARD, Op.INPUT_GRAD) for s in range(self.last + 1)
        }
        self.inputs[Op.FORWARD, 0].extend([0.0] * num_microbatches)
        self.count = dict.fromkeys(self.inputs, 0)
        self.held, self.now = [0.0] * ranks, [0.0] * ranks
        self.open: list[deque[int]] = [deque() for _ in range(ranks)]
        self.orders: list[list[Action]] = [[] for _ in range(ranks)]
        self.events = [(0.0, rank) for rank in range(ranks)]

    def run(self) -> list[list[Action]]:
        while self.events:
            time, rank = heapq.heappop(self.events)
            if self.now[rank] <= time + _EPS:
                self._start_one(rank, time)
        return self.orders

    def _start_one(self, rank: int, time: float) -> None:
        for op, chunk in self.priority:
            stage = self.stages[rank][chunk]
            waiting = self.inputs[op, stage]
            if waiting and waiting[0] <= time + _EPS and self._has_room(rank, op, chunk):
                waiting.popleft()
                self._run(rank, op, stage, time)
                return
        if self.open[rank]:
            stage = self.open[rank].popleft()
            self.held[rank] -= self.open_w
            self._end(rank, time + self.costs.weight_grad[stage])

    def _has_room(self, rank: int, op: Op, chunk: int) -> bool:
        return op is not Op.FORWARD or self.held[rank] <= self.rooms[rank] + chunk

    def _end(self, rank: int, time: float) -> None:
        self.now[rank] = time
        heapq.heappush(self.events, (time, rank))

    def _run(self, rank: int, op: Op, stage: int, time: float) -> None:
        self.orders[rank].append(Action(op, stage, self.count[op, stage]))
        self.count[op, stage] += 1
        if op is Op.FORWARD:
            self.held[rank] += 1
            end, to = time + self.costs.forward[stage], stage + 1
            key = (op, to) if to <= self.last else (Op.INPUT_GRAD, stage)
        else:
            self.held[rank] -= 1 - self.open_w
            self.open[rank].append(stage)
            end, to = time + self.costs.input_grad[stage], stage - 1
            key = (op, to)
        self._end(rank, end)
        if key[1] >= 0:
            receiver = self.rank_of[key[1]]
            arrival = end if receiver == rank else end + self.costs.comm
            self.inputs[key].append(arrival)
            heapq.heappush(self.events, (arrival, receiver))
