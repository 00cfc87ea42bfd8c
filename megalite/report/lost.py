"""Where a measured step loses time: by cause and rank, and who is to blame.

A plan is replayed on a ladder of ever more of what was measured, and each rung's additional time
is what its cause costs:

1. every computation takes the mean time of its kind: what is idle now is the schedule's own
   warm-up and drain;
2. computations take their measured times: imbalance;
3. messages arrive as late after both ends were posted, and posting and waiting for sends takes as
   long, as measured: communication;
4. gradients are reduced after a rank's last action, in the measured times: data parallel;
5. the measured step: the rest are data, optimizer, the step's vector, and the host.

A replay only orders what was measured, without what belongs to higher rungs, so no rung is longer
than the next, and the causes of a rank are together its idle time, exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from megalite.schedule.action import COMPUTE, Action, Op, Plan

CAUSES = ("warm-up and drain", "imbalance", "communication", "data parallel", "other")
_REDUCTIONS = ("tp", "tie", "dp")  # in the order of their waits
_KNOWN_S = 1e-4  # a wait that took longer has seen its message arrive

Message = tuple[bool, int, int]  # is it a gradient, stage that takes it, microbatch
_SENDS = {Op.SEND_F: (False, 1), Op.SEND_B: (True, -1)}
_RECEIVES = {Op.RECV_F: False, Op.RECV_B: True}
_NEEDS = {Op.FORWARD: False, Op.BACKWARD: True, Op.INPUT_GRAD: True}


@dataclass(frozen=True)
class Measured:
    """One step of one pipeline, in seconds on one clock.

    Attributes:
        begin, end: of the step: the first rank's beginning, the last rank's end.
        reached, started, ended: of each action of each rank's list: when the rank came to it, when
            its message was there (the same where it needs none), when it was done.
        reductions: of each rank, after its list: name ("tp", "tie" or "dp"), start and end of its
            waits. "tie" joins the ranks that have one; the others are the rank's own matter.
    """

    plan: Plan
    begin: float
    end: float
    reached: Sequence[Sequence[float]]
    started: Sequence[Sequence[float]]
    ended: Sequence[Sequence[float]]
    reductions: Sequence[Sequence[tuple[str, float, float]]]


@dataclass(frozen=True)
class Late:
    """A channel between pipeline ranks, and the waits for its messages, by start and end, after
    their producers were done."""

    sender: int
    receiver: int
    gradient: bool
    waits: Sequence[tuple[float, float]]

    @property
    def wait_s(self) -> float:
        return sum(end - start for start, end in self.waits)


@dataclass(frozen=True)
class Lost:
    """A step's idle time.

    Attributes:
        step_s: from ``Measured.begin`` to its end.
        busy_s: of each rank, in computations.
        causes: of each rank, seconds by cause; all that is not busy.
        stage_s: time of a microbatch in each stage, forward and backward: medians, which a single
            hiccup does not change.
        late: worst first.
        planned: ends of the first rung: start and end of each action with equal stages.
    """

    step_s: float
    busy_s: Sequence[float]
    causes: Sequence[Mapping[str, float]]
    stage_s: Sequence[float]
    late: Sequence[Late]
    planned: tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]]

    def total(self, cause: str) -> float:
        return sum(causes[cause] for causes in self.causes)

    @property
    def idle_s(self) -> float:
        return len(self.busy_s) * self.step_s - sum(self.busy_s)


def lost_time(m: Measured) -> Lost:
    """The causes of every rank's idle time in a step."""
    plan, window = m.plan, m.end - m.begin
    cost = [
        [end - start if a.op in COMPUTE else 0.0 for a, start, end in _rows(m, rank)]
        for rank in range(plan.pp)
    ]
    equal = _equal(plan, cost)
    posting = [
        [0.0 if a.op is Op.REDUCE else end - start for a, start, end in _rows(m, rank)]
        for rank in range(plan.pp)
    ]
    planned = replay(plan, equal, {})
    ends = replay(plan, posting, _latencies(m))[1]
    rungs = [
        max(map(_last, planned[1])),
        max(map(_last, replay(plan, cost, {})[1])),
        max(map(_last, ends)),
        max(_reduced(m, list(map(_last, ends)))),
        window,
    ]
    # Clocks that differ by a little more than they should must not make a cause negative.
    rungs = [min(rungs[i:]) for i in range(len(rungs))]
    busy = list(map(sum, cost))
    return Lost(
        window,
        busy,
        [_causes(rungs, sum(e), b) for e, b in zip(equal, busy, strict=True)],
        _stage_times(plan, cost),
        _late(m),
        planned,
    )


def _causes(rungs: Sequence[float], equal_busy: float, busy: float) -> dict[str, float]:
    """A rank's idle time: what it idles with equal stages is the schedule's, as far as it idles."""
    schedule = max(0.0, min(rungs[0] - equal_busy, rungs[1] - busy))
    steps = [high - low for low, high in zip(rungs[1:], rungs[2:], strict=False)]
    return dict(zip(CAUSES, [schedule, rungs[1] - busy - schedule, *steps], strict=True))


def _rows(m: Measured, rank: int) -> zip[tuple[Action, float, float]]:
    return zip(m.plan[rank], m.started[rank], m.ended[rank], strict=True)


def _last(times: Sequence[float]) -> float:
    return times[-1] if times else 0.0


def _equal(plan: Plan, cost: Sequence[Sequence[float]]) -> list[list[float]]:
    """Costs of stages that are all alike: each the mean of its kind."""
    by_op: dict[Op, list[float]] = {}
    for actions, costs in zip(plan.actions, cost, strict=True):
        for a, c in zip(actions, costs, strict=True):
            by_op.setdefault(a.op, []).append(c)
    mean = {op: fmean(costs) for op, costs in by_op.items()}
    return [[mean[a.op] for a in actions] for actions in plan.actions]


def replay(
    plan: Plan, cost: Sequence[Sequence[float]], latency: Mapping[Message, float]
) -> tuple[list[list[float]], list[list[float]]]:
    """Start and end of each action: each follows the one before it on its rank, and, if it needs
    a message, that one's arrival.

    Args:
        cost: seconds of each action, without waits.
        latency: seconds from where both ends of a message are posted to its arrival; else 0.
    """
    starts: list[list[float]] = [[] for _ in plan.actions]
    ends: list[list[float]] = [[] for _ in plan.actions]
    posted: dict[tuple[bool, Message], float] = {}  # by whether it is the receiver's end
    waiting: dict[Message, int] = {}
    runnable = list(range(plan.pp))
    while runnable:
        rank = runnable.pop()
        while len(ends[rank]) < len(plan[rank]):
            a = plan[rank][len(ends[rank])]
            now = ends[rank][-1] if ends[rank] else 0.0
            needs = _needed(plan, a)
            if needs is not None:
                if (False, needs) not in posted:
                    waiting[needs] = rank
                    break
                ready = max(posted[False, needs], posted[True, needs])
                now = max(now, ready + latency.get(needs, 0.0))
            starts[rank].append(now)
            now += cost[rank][len(ends[rank])]
            ends[rank].append(now)
            end = _end_of(a)
            if end is not None:
                posted[end] = now
                if not end[0] and end[1] in waiting:
                    runnable.append(waiting.pop(end[1]))
    assert all(len(e) == len(a) for e, a in zip(ends, plan.actions, strict=True)), "dead-lock"
    return starts, ends


def _needed(plan: Plan, a: Action) -> Message | None:
    """The message that a computation takes from another rank."""
    if a.op not in _NEEDS:
        return None
    gradient = _NEEDS[a.op]
    if plan.peer(a.stage, a.stage + (1 if gradient else -1)) is None:
        return None
    return gradient, a.stage, a.microbatch


def _end_of(a: Action) -> tuple[bool, Message] | None:
    """Whether an action posts the receiver's end of a message, and of which."""
    if a.op in _SENDS:
        gradient, towards = _SENDS[a.op]
        return False, (gradient, a.stage + towards, a.microbatch)
    if a.op in _RECEIVES:
        return True, (_RECEIVES[a.op], a.stage, a.microbatch)
    return None


@dataclass
class _Trip:
    """A message as measured: when both ends were posted, when its producer was done, how long the
    receiver waited."""

    sender: int
    receiver: int
    gradient: bool
    ready: float
    made: float
    reached: float
    arrived: float


def _trips(m: Measured) -> dict[Message, _Trip]:
    posted: dict[tuple[bool, Message], tuple[float, float, int]] = {}
    for rank, actions in enumerate(m.plan.actions):
        made = m.begin
        for i, a in enumerate(actions):
            made = m.ended[rank][i] if a.op in COMPUTE else made
            end = _end_of(a)
            if end is not None:
                posted[end] = m.ended[rank][i], made, rank
    trips: dict[Message, _Trip] = {}
    for rank, actions in enumerate(m.plan.actions):
        for i, a in enumerate(actions):
            needs = _needed(m.plan, a)
            if needs is not None:
                sent, made, sender = posted[False, needs]
                ready = max(sent, posted[True, needs][0])
                span = m.reached[rank][i], m.started[rank][i]
                trips[needs] = _Trip(sender, rank, needs[0], ready, made, *span)
    return trips


def _latencies(m: Measured) -> dict[Message, float]:
    """Of each message, from where both its ends were posted to its arrival.

    One that nobody had to wait for came at some time before it was needed: it is taken to have
    travelled as long as others of its channel, if that is not too long.
    """
    trips = _trips(m)
    known: dict[tuple[int, int, bool], list[float]] = {}
    for t in trips.values():
        if t.arrived - t.reached > _KNOWN_S:
            channel = t.sender, t.receiver, t.gradient
            known.setdefault(channel, []).append(max(0.0, t.arrived - t.ready))
    found = {}
    for message, t in trips.items():
        most = max(0.0, t.arrived - t.ready)
        if t.arrived - t.reached <= _KNOWN_S:
            most = min(most, median(known.get((t.sender, t.receiver, t.gradient), [0.0])))
        found[message] = most
    return found


def _late(m: Measured) -> list[Late]:
    """By channel, the waits after the producer was done."""
    waits: dict[tuple[int, int, bool], list[tuple[float, float]]] = {}
    for t in _trips(m).values():
        wait = max(t.reached, t.made), t.arrived
        if wait[0] < wait[1]:
            waits.setdefault((t.sender, t.receiver, t.gradient), []).append(wait)
    found = [Late(*channel, spans) for channel, spans in waits.items()]
    return sorted(found, key=lambda late: -late.wait_s)


def _reduced(m: Measured, ends: list[float]) -> list[float]:
    """When each rank has its gradients, if its list ends at ``ends``."""
    ends = [end + _reduce_s(m, rank) for rank, end in enumerate(ends)]
    for name in _REDUCTIONS:
        own = [[(s, e) for n, s, e in waits if n == name] for waits in m.reductions]
        members = [rank for rank, waits in enumerate(own) if waits]
        if name != "tie" or not members:
            ends = [end + sum(e - s for s, e in own[r]) for r, end in enumerate(ends)]
            continue
        together = max(ends[r] for r in members)
        begun = max(own[r][0][0] for r in members)
        for r in members:
            ends[r] = together + max(0.0, own[r][-1][1] - begun)
    return ends


def _reduce_s(m: Measured, rank: int) -> float:
    return sum(end - start for a, start, end in _rows(m, rank) if a.op is Op.REDUCE)


def _stage_times(plan: Plan, cost: Sequence[Sequence[float]]) -> list[float]:
    found: list[dict[Op, list[float]]] = [{} for _ in range(plan.num_stages)]
    for actions, costs in zip(plan.actions, cost, strict=True):
        for a, c in zip(actions, costs, strict=True):
            found[a.stage].setdefault(a.op, []).append(c)
    return [sum(map(median, by_op.values())) for by_op in found]
