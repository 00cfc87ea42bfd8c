"""When each action of a lowered plan runs: the one model of how ranks wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megalite.errors import ScheduleError
from megalite.schedule.action import COMPUTE, Action, Op, Plan
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

    def _spans(self) -> list[tuple[float, float, float]]:
        """A rank's first start, last end and time spent, of computations only."""
        found = []
        for actions, start, end in zip(self.plan.actions, self.start, self.end, strict=True):
            at = [i for i, a in enumerate(actions) if a.op in COMPUTE]
            first, last = (start[at[0]], end[at[-1]]) if at else (0.0, 0.0)
            found.append((first, last, sum(end[i] - start[i] for i in at)))
        return found

    @property
    def makespan(self) -> float:
        return max(last for _, last, _ in self._spans())

    @property
    def bubble_fraction(self) -> float:
        """1 - busy / makespan, over all ranks."""
        spans = self._spans()
        whole = len(spans) * max(last for _, last, _ in spans)
        return 1 - sum(busy for _, _, busy in spans) / whole if whole else 0.0

    @property
    def span_bubble_fraction(self) -> float:
        """(longest span - largest busy) / longest span, a span being a rank's first start to its
        last end: what consecutive steps could reach if nothing global stood between them.

        Source: Qi et al. 2023 (arXiv:2401.10241), bubble rate.
        """
        spans = self._spans()
        longest = max(last - first for first, last, _ in spans)
        return (longest - max(busy for _, _, busy in spans)) / longest if longest else 0.0


def simulate(
    plan: Plan,
    forward_s: Sequence[float],
    input_s: Sequence[float],
    weight_s: Sequence[float],
    comm_s: float = 0.0,
) -> Timeline:
    """Runs a lowered plan whose messages pair up (see ``validate``) in simulated time.

    Posting takes no time and never blocks. A message travels for ``comm_s`` once both its ends
    are posted and the one before it on its channel (sender, receiver, kind) has arrived; this
    costs no computing time. F, B and I wait for their message, a WAIT for its send. Reductions
    take no time.

    Args:
        forward_s, input_s, weight_s: seconds of F, I and W of each stage; B takes I + W.
    Raises:
        ScheduleError: for a dead-lock, saying who waits for what.
    """
    if len({plan.num_stages, len(forward_s), len(input_s), len(weight_s)}) != 1:
        raise ValueError(f"times must be given for each of the {plan.num_stages} stages")
    return _Run(plan, forward_s, input_s, weight_s, comm_s).run()


class _Run:
    """Ranks advance one at a time as far as they can: order is by dependency, not by time.

    A message has a number: stage that takes it x microbatches + microbatch, and gradients lie
    behind all activations. What needs no message counts as arrived at 0: a stage's order on its
    own rank is the list's.
    """

    def __init__(
        self,
        plan: Plan,
        forward_s: Sequence[float],
        input_s: Sequence[float],
        weight_s: Sequence[float],
        comm_s: float,
    ) -> None:
        self.plan, self.comm_s = plan, comm_s
        self.cost = {
            Op.FORWARD: forward_s,
            Op.BACKWARD: [i + w for i, w in zip(input_s, weight_s, strict=True)],
            Op.INPUT_GRAD: input_s,
            Op.WEIGHT_GRAD: weight_s,
        }
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
        # From an action's own number to that of the message that it waits for or posts.
        to_next, to_previous = self.num_microbatches, self.gradients - self.num_microbatches
        self.needs = {Op.FORWARD: 0, Op.BACKWARD: self.gradients, Op.INPUT_GRAD: self.gradients}
        self.needs |= {Op.WAIT_F: to_next, Op.WAIT_B: to_previous}
        self.posts = {Op.RECV_F: 0, Op.RECV_B: self.gradients}
        self.posts |= {Op.SEND_F: to_next, Op.SEND_B: to_previous}
        self.waiting: dict[int, list[int]] = {}  # message -> ranks that stand before it
        self.free: dict[tuple[int, int, bool], float] = {}  # channel -> arrival of its last message
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

    def _advance(self, rank: int) -> None:
        """Runs a rank until its list ends or a message is missing."""
        actions, starts, ends = self.plan[rank], self.start[rank], self.end[rank]
        now = ends[-1] if ends else 0.0
        for step in range(len(ends), len(actions)):
            a = actions[step]
            needs, posts, cost = self._effect(a)
            if needs >= 0:
                if self.arrived[needs] == _NEVER:
                    self.waiting.setdefault(needs, []).append(rank)
                    return
                now = max(now, self.arrived[needs])
            elif posts >= 0:
                self._post(posts, now)
            starts.append(now)
            now += cost
            ends.append(now)

    def _effect(self, a: Action) -> tuple[int, int, float]:
        """The message that an action waits for, the one that it posts (-1: none), its cost."""
        at = a.stage * self.num_microbatches + a.microbatch
        needs, posts = self.needs.get(a.op), self.posts.get(a.op)
        return (
            -1 if needs is None else at + needs,
            -1 if posts is None else at + posts,
            self.cost[a.op][a.stage] if a.op in self.cost else 0.0,
        )

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
        self.free[channel] = self.arrived[message] = begin + self.comm_s
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
        message = self._effect(a)[0]
        for peer, actions in enumerate(self.plan.actions):
            for other in actions[len(self.end[peer]) :]:
                if peer != rank and self._effect(other)[1] == message:
                    return peer, other
        raise ScheduleError(f"rank {rank}, step {step}: {a} waits for a message nobody posts")
