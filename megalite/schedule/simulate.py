"""When each action of a lowered plan runs: the one model of how ranks wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megalite.errors import ScheduleError
from megalite.schedule.action import COMPUTE, Action, Op, Plan
from megalite.schedule.costs import Costs
from megalite.schedule.render import render_text

_NEVER = -1.0


@dataclass(frozen=True)
class Timeline:
    """Start and end of each action, in the order of the plan's lists; seconds, or any unit.

    The time of a computation does not include the wait for its message.
    """

    plan: Plan
    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]

    @cached_property
    def _spans(self) -> list[tuple[float, float, float]]:
        """A rank's first start, last end and time spent, of computations only."""
        found = []
        for actions, start, end in zip(self.plan.actions, self.start, self.end, strict=True):
            at = [i for i, a in enumerate(actions) if a.op in COMPUTE]
            first, last = (start[at[0]], end[at[-1]]) if at else (0.0, 0.0)
            found.append((first, last, sum(end[i] - start[i] for i in at)))
        return found

    @property
    def busy(self) -> tuple[float, ...]:
        """The time that each rank computes."""
        return tuple(busy for _, _, busy in self._spans)

    @cached_property
    def makespan(self) -> float:
        """The end of the last computation or reduction."""
        reductions = (
            end[i]
            for actions, end in zip(self.plan.actions, self.end, strict=True)
            for i, a in enumerate(actions)
            if a.op is Op.REDUCE
        )
        return max(*(last for _, last, _ in self._spans), *reductions, 0.0)

    @property
    def bubble_fraction(self) -> float:
        """1 - busy / makespan, over all ranks."""
        whole = len(self._spans) * self.makespan
        return 1 - sum(self.busy) / whole if whole else 0.0

    @property
    def longest_span(self) -> float:
        """The longest time of a rank from its first start to its last end."""
        return max(last - first for first, last, _ in self._spans)

    @property
    def span_bubble_fraction(self) -> float:
        """(longest span - largest busy) / longest span: what consecutive steps could reach if
        nothing global stood between them.

        Source: Qi et al. 2023 (arXiv:2401.10241), bubble rate.
        """
        longest = self.longest_span
        return (longest - max(self.busy)) / longest if longest else 0.0


def simulate(
    plan: Plan,
    forward_s: Sequence[float],
    input_s: Sequence[float],
    weight_s: Sequence[float],
    comm_s: float = 0.0,
) -> Timeline:
    """``simulate_step`` for the times of the stages' F, I and W and of a message."""
    return simulate_step(plan, Costs(tuple(forward_s), tuple(input_s), tuple(weight_s), comm_s))


def simulate_step(plan: Plan, costs: Costs) -> Timeline:
    """Runs a lowered plan whose messages pair up (see ``validate``) in simulated time.

    Posting takes no time and never blocks. A message travels for ``costs.comm`` once both its
    ends are posted and the one before it on its channel (sender, receiver, kind) has arrived; this
    costs no computing time. F, B and I wait for their message, a WAIT for its send. The reductions
    of a rank follow one another, beside its computations unless ``reduce_overlaps`` is off.

    Raises:
        ScheduleError: for a dead-lock, saying who waits for what.
        ValueError: if the costs are of another number of stages.
    """
    if costs.num_stages != plan.num_stages:
        raise ValueError(f"times must be given for each of the {plan.num_stages} stages")
    return _Run(plan, costs).run()


class _Run:
    """Ranks advance one at a time as far as they can: order is by dependency, not by time.

    A message has a number: stage that takes it x microbatches + microbatch, and gradients lie
    behind all activations. What needs no message counts as arrived at 0: a stage's order on its
    own rank is the list's.
    """

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.plan, self.costs = plan, costs
        self.num_microbatches, self.rank_of = plan.num_microbatches, plan.rank_of
        self.gradients = plan.num_stages * plan.num_microbatches  # number of the first one
        self.posted = [_NEVER] * (2 * self.gradients)  # when the first of the two ends was
        self.arrived = [_NEVER] * (2 * self.gradients)
        for stage in range(plan.num_stages):
            for neighbour, first in ((stage - 1, 0), (stage + 1, self.gradients)):
                if plan.peer(stage, neighbour) is None:
                    start = first + stage * plan.num_microbatches
                    for message in range(start, start + plan.num_microbatches):
                        self.arrived[message] = 0.0
        self.effects = self._effects()
        self.waiting: dict[int, list[int]] = {}  # message -> ranks that stand before it
        self.free: dict[tuple[int, int, bool], float] = {}  # channel -> arrival of its last message
        self.now = [0.0] * plan.pp
        self.reduced = [0.0] * plan.pp  # end of a rank's last reduction
        self.start: list[list[float]] = [[] for _ in plan.actions]
        self.end: list[list[float]] = [[] for _ in plan.actions]
        self.runnable = list(range(plan.pp))

    def run(self) -> Timeline:
        while self.runnable:
            self._advance(self.runnable.pop())
        stuck = [r for r, done in enumerate(self.end) if len(done) < len(self.plan[r])]
        if stuck:
            raise ScheduleError(self._deadlock(stuck))
        return Timeline(self.plan, tuple(map(tuple, self.start)), tuple(map(tuple, self.end)))

    def _effects(self) -> dict[Op, tuple[int, int, Sequence[float]]]:
        """For each op: from an action's own number to that of the message that it waits for, and
        to that of the one it posts (-1: none), and what it costs on each stage."""
        costs, m, gradients = self.costs, self.num_microbatches, self.gradients
        whole = [i + w for i, w in zip(costs.input_grad, costs.weight_grad, strict=True)]
        nothing = [0.0] * costs.num_stages
        return {
            Op.FORWARD: (0, -1, costs.forward),
            Op.BACKWARD: (gradients, -1, whole),
            Op.INPUT_GRAD: (gradients, -1, costs.input_grad),
            Op.WEIGHT_GRAD: (-1, -1, costs.weight_grad),
            Op.RECV_F: (-1, 0, nothing),
            Op.RECV_B: (-1, gradients, nothing),
            Op.SEND_F: (-1, m, nothing),
            Op.SEND_B: (-1, gradients - m, nothing),
            Op.WAIT_F: (m, -1, nothing),
            Op.WAIT_B: (gradients - m, -1, nothing),
            Op.REDUCE: (-1, -1, costs.reduce or nothing),
        }

    def _advance(self, rank: int) -> None:
        """Runs a rank until its list ends or a message is missing."""
        actions, starts, ends = self.plan[rank], self.start[rank], self.end[rank]
        now, m, effects, arrived = self.now[rank], self.num_microbatches, self.effects, self.arrived
        for step in range(len(ends), len(actions)):
            a = actions[step]
            needs, posts, cost = effects[a.op]
            if needs >= 0:
                needs += a.stage * m + a.microbatch
                arrival = arrived[needs]
                if arrival == _NEVER:
                    self.waiting.setdefault(needs, []).append(rank)
                    break
                if arrival > now:
                    now = arrival
            elif posts >= 0:
                self._post(posts + a.stage * m + a.microbatch, now)
            if a.op is Op.REDUCE:
                now = self._reduce(rank, now, cost[a.stage])
                continue
            starts.append(now)
            now += cost[a.stage]
            ends.append(now)
        self.now[rank] = now

    def _reduce(self, rank: int, now: float, cost: float) -> float:
        """A reduction follows the one before it; the time at which the rank goes on."""
        start = max(now, self.reduced[rank])
        self.reduced[rank] = start + cost
        self.start[rank].append(start)
        self.end[rank].append(start + cost)
        return now if self.costs.reduce_overlaps else start + cost

    def _post(self, message: int, now: float) -> None:
        """The second of a message's two ends to be posted sets it going."""
        if self.posted[message] == _NEVER:
            self.posted[message] = now
            return
        gradient, at = divmod(message, self.gradients)
        to = at // self.num_microbatches
        source = to + 1 if gradient else to - 1
        channel = (self.rank_of[source], self.rank_of[to], bool(gradient))
        begin = max(now, self.posted[message], self.free.get(channel, 0.0))
        self.free[channel] = self.arrived[message] = begin + self.costs.comm
        self.runnable.extend(self.waiting.pop(message, ()))

    def _deadlock(self, stuck: Sequence[int]) -> str:
        """Follows the waits from a stuck rank until they close a circle."""
        at = {rank: len(self.end[rank]) for rank in stuck}
        path: list[int] = []
        rank = stuck[0]
        while rank not in path:
            path.append(rank)
            rank = self._waits_for(rank, at[rank])[0]
        circle = path[path.index(rank) :]
        waits = [
            f"rank {r}, step {at[r]}: {self.plan[r][at[r]]} waits for rank "
            "{} to reach {}".format(*self._waits_for(r, at[r]))
            for r in circle
        ]
        grid = render_text(self.plan, {r: at[r] for r in circle})
        return "dead-lock: " + "; ".join(waits) + "\n" + grid

    def _waits_for(self, rank: int, step: int) -> tuple[int, Action]:
        """The rank and the post that the action at ``step`` waits for."""
        a = self.plan[rank][step]
        message = self.effects[a.op][0] + self._number(a)
        for peer, actions in enumerate(self.plan.actions):
            for other in actions[len(self.end[peer]) :]:
                posts = self.effects[other.op][1]
                if peer != rank and posts >= 0 and posts + self._number(other) == message:
                    return peer, other
        raise ScheduleError(f"rank {rank}, step {step}: {a} waits for a message nobody posts")

    def _number(self, a: Action) -> int:
        return a.stage * self.num_microbatches + a.microbatch
