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
    return Simulator(plan).run(costs)


class Simulator:
    """A lowered plan made ready to be run with many costs (see ``simulate_step``)."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.messages = _Messages(plan)
        self.steps = [self.messages.steps(actions) for actions in plan.actions]

    def run(self, costs: Costs) -> Timeline:
        """When each action runs; raises as ``simulate_step``."""
        return _Run(self, costs).run()


_TIMED = (Op.FORWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD, Op.BACKWARD)
_UNTIMED = -1
_Steps = tuple[list[int], list[int], list[int]]
"""Of each action of a rank: the message that it waits for and the one that it posts (-1: none),
and which time it takes: a place in the list of F, I, W and B of all stages, or -1 for none, or
-2 - stage for a reduction. Three lists of numbers, which the garbage collector never visits."""


class _Messages:
    """Messages have numbers: stage that takes it x microbatches + microbatch, and gradients lie
    behind all activations. What needs no message counts as arrived at 0: a stage's order on its
    own rank is the list's."""

    def __init__(self, plan: Plan) -> None:
        self.num_stages, m = plan.num_stages, plan.num_microbatches
        self.num_microbatches = m
        self.gradients = gradients = plan.num_stages * m  # number of the first one
        self.needless = [
            first + stage * m
            for stage in range(plan.num_stages)
            for neighbour, first in ((stage - 1, 0), (stage + 1, gradients))
            if plan.peer(stage, neighbour) is None
        ]
        # From an action's own number to that of the message it waits for, and that it posts.
        self.effects: dict[Op, tuple[int, int]] = {
            Op.FORWARD: (0, -1),
            Op.BACKWARD: (gradients, -1),
            Op.INPUT_GRAD: (gradients, -1),
            Op.WEIGHT_GRAD: (-1, -1),
            Op.RECV_F: (-1, 0),
            Op.RECV_B: (-1, gradients),
            Op.SEND_F: (-1, m),
            Op.SEND_B: (-1, gradients - m),
            Op.WAIT_F: (m, -1),
            Op.WAIT_B: (gradients - m, -1),
            Op.REDUCE: (-1, -1),
        }
        self.timed = {op: i * plan.num_stages for i, op in enumerate(_TIMED)}
        ranks = plan.rank_of
        pp, last = plan.pp, plan.num_stages - 1
        forward = [ranks[max(s - 1, 0)] * pp + ranks[s] for s in range(last + 1)]
        back = [(pp + ranks[min(s + 1, last)]) * pp + ranks[s] for s in range(last + 1)]
        self.channels = [*forward, *back]  # of a stage's activations, of its gradients
        self.num_channels = 2 * pp * pp

    def number(self, a: Action) -> int:
        return a.stage * self.num_microbatches + a.microbatch

    def steps(self, actions: Sequence[Action]) -> _Steps:
        m, effects, timed = self.num_microbatches, self.effects, self.timed
        needed, posted, slots = [], [], []
        for a in actions:
            needs, posts = effects[a.op]
            number = a.stage * m + a.microbatch
            needed.append(needs + number if needs >= 0 else -1)
            posted.append(posts + number if posts >= 0 else -1)
            place = timed.get(a.op, _UNTIMED)
            slots.append(place + a.stage if place >= 0 else _UNTIMED)
            if a.op is Op.REDUCE:
                slots[-1] = -2 - a.stage
        return needed, posted, slots


class _Run:
    """Ranks advance one at a time as far as they can: order is by dependency, not by time."""

    def __init__(self, simulator: Simulator, costs: Costs) -> None:
        self.plan, self.costs, self.steps = simulator.plan, costs, simulator.steps
        self.messages = messages = simulator.messages
        self.posted = [_NEVER] * (2 * messages.gradients)  # when the first of the two ends was
        self.arrived = [_NEVER] * (2 * messages.gradients)
        for start in messages.needless:
            for message in range(start, start + messages.num_microbatches):
                self.arrived[message] = 0.0
        whole = [i + w for i, w in zip(costs.input_grad, costs.weight_grad, strict=True)]
        self.times = [*costs.forward, *costs.input_grad, *costs.weight_grad, *whole]
        self.waiting: dict[int, list[int]] = {}  # message -> ranks that stand before it
        self.free = [0.0] * messages.num_channels  # arrival of a channel's last message
        self.now = [0.0] * self.plan.pp
        self.reduced = [0.0] * self.plan.pp  # end of a rank's last reduction
        self.start: list[list[float]] = [[] for _ in self.plan.actions]
        self.end: list[list[float]] = [[] for _ in self.plan.actions]
        self.runnable = list(range(self.plan.pp))

    def run(self) -> Timeline:
        while self.runnable:
            self._advance(self.runnable.pop())
        stuck = [r for r, done in enumerate(self.end) if len(done) < len(self.plan[r])]
        if stuck:
            raise ScheduleError(self._deadlock(stuck))
        return Timeline(self.plan, tuple(map(tuple, self.start)), tuple(map(tuple, self.end)))

    def _advance(self, rank: int) -> None:
        """Runs a rank until its list ends or a message is missing."""
        needed, posted, slots = self.steps[rank]
        starts, ends = self.start[rank], self.end[rank]
        now, arrived, times = self.now[rank], self.arrived, self.times
        for step in range(len(ends), len(slots)):
            needs, slot = needed[step], slots[step]
            if needs >= 0:
                arrival = arrived[needs]
                if arrival == _NEVER:
                    self.waiting.setdefault(needs, []).append(rank)
                    break
                if arrival > now:
                    now = arrival
            elif (posts := posted[step]) >= 0:
                self._post(posts, now)
            if slot <= -2:
                now = self._reduce(rank, now, -2 - slot)
                continue
            starts.append(now)
            if slot >= 0:
                now += times[slot]
            ends.append(now)
        self.now[rank] = now

    def _reduce(self, rank: int, now: float, stage: int) -> float:
        """A reduction follows the one before it; the time at which the rank goes on."""
        cost = self.costs.reduce[stage] if self.costs.reduce else 0.0
        start = max(now, self.reduced[rank])
        self.reduced[rank] = start + cost
        self.start[rank].append(start)
        self.end[rank].append(start + cost)
        return now if self.costs.reduce_overlaps else start + cost

    def _post(self, message: int, now: float) -> None:
        """The second of a message's two ends to be posted sets it going."""
        first = self.posted[message]
        if first == _NEVER:
            self.posted[message] = now
            return
        channel = self.messages.channels[message // self.messages.num_microbatches]
        begin = max(now, first, self.free[channel])
        self.free[channel] = self.arrived[message] = begin + self.costs.comm
        if message in self.waiting:
            self.runnable.extend(self.waiting.pop(message))

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
        effects, number = self.messages.effects, self.messages.number
        message = effects[a.op][0] + number(a)
        for peer, actions in enumerate(self.plan.actions):
            for other in actions[len(self.end[peer]) :]:
                posts = effects[other.op][1]
                if peer != rank and posts >= 0 and posts + number(other) == message:
                    return peer, other
        raise ScheduleError(f"rank {rank}, step {step}: {a} waits for a message nobody posts")
