"""Proves that a plan can be run: completeness, order, pairing, no dead-lock; and what it holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container
from itertools import accumulate
from typing import NoReturn

from megalite.errors import ScheduleError
from megalite.schedule.action import COMPUTE, Action, Op, Plan
from megalite.schedule.costs import Costs
from megalite.schedule.peaks import RECEIVES, Report, make_report
from megalite.schedule.render import render_text
from megalite.schedule.simulate import simulate_step

# The parts of a microbatch's work on a stage, as bits; B is both I and W.
_PARTS = (Op.FORWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD)
_BITS = {Op.FORWARD: 1, Op.INPUT_GRAD: 2, Op.WEIGHT_GRAD: 4, Op.BACKWARD: 6}
# What belongs to a computation that takes or makes a message, and which way the message goes.
_MESSAGE_OPS = {
    Op.FORWARD: (Op.RECV_F, Op.SEND_F, Op.WAIT_F, 1),
    Op.BACKWARD: (Op.RECV_B, Op.SEND_B, Op.WAIT_B, -1),
    Op.INPUT_GRAD: (Op.RECV_B, Op.SEND_B, Op.WAIT_B, -1),
}
ROOM = 2  # receives of a channel: one that is being taken, one that fills
_NEEDED = {False: (Op.FORWARD,), True: (Op.BACKWARD, Op.INPUT_GRAD)}  # by whether it goes back
_MESSAGE_PARTS = frozenset(Op) - COMPUTE - {Op.REDUCE}

_Steps = dict[Op, dict[int, int]]  # where in a rank's list the op of a number (``_number``) stands


def validate(plan: Plan, *, trains: bool = False) -> Report:
    """Checks a lowered plan; what it accepts runs to its end on any timing.

    Checked: each F once and, unless the plan is forward-only, each B (or I and W) once, on the
    right rank, after what it needs; each message between ranks has one receive before it is
    taken, one send after it is made and one wait after the send; receives of a channel are posted
    in the order of its sends, and no more than two before one is taken, unless they are taken in
    another order; one REDUCE a stage, after its last gradient; no dead-lock where posts never
    block and everything else waits for both ends of its message.

    On a GPU, channels are communicators that run at once: the proof assumes that their kernels
    can be resident together.

    Args:
        trains: whether it is for training, so that a forward-only plan is wrong.
    Raises:
        ScheduleError: the place, the problem, and the grid with the place in brackets.
    """
    _check_computations(plan, frozenset(Op), trains)
    for rank in range(plan.pp):
        steps = _steps(plan, rank)
        _check_messages(plan, rank, steps)
        _check_reductions(plan, rank, steps)
    _check_channels(plan)
    nothing = (0.0,) * plan.num_stages
    simulate_step(plan, Costs(nothing, nothing, nothing))
    report = make_report(plan)
    _check_buffers(plan, report)
    return report


def check_compute(plan: Plan) -> None:
    """Checks a plan without communication: each action once, on its rank, after what its own
    rank must have done before it.

    Raises:
        ScheduleError: as ``validate``.
    """
    _check_computations(plan, COMPUTE, trains=False)


def check_order(plan: Plan) -> None:
    """Checks a plan for training without communication, as ``check_compute``; also that no rank
    waits in a circle.

    Raises:
        ScheduleError: as ``validate``.
    """
    _check_computations(plan, COMPUTE, trains=True)
    waits = _find_waits(plan)
    if not waits:
        return
    path, rank = list[int](), min(waits)
    while rank not in path:
        path.append(rank)
        rank = plan.rank_of[waits[rank][1].stage]
    circle = path[path.index(rank) :]
    said = [
        f"rank {r}, step {step}: {plan[r][step]} waits for rank {plan.rank_of[a.stage]} "
        f"to reach {a}"
        for r in circle
        for step, a in [waits[r]]
    ]
    grid = render_text(plan, {r: waits[r][0] for r in circle})
    raise ScheduleError(f"dead-lock: {'; '.join(said)}\n{grid}")


def _find_waits(plan: Plan) -> dict[int, tuple[int, Action]]:
    """Ranks that never end: where each stands, and the action of another rank that it needs."""
    done, at = set[tuple[bool, int, int]](), [0] * plan.pp
    waiting: defaultdict[tuple[bool, int, int], list[int]] = defaultdict(list)
    runnable, last = list(range(plan.pp)), plan.num_stages - 1
    stuck: dict[int, tuple[int, Action]] = {}
    while runnable:
        rank = runnable.pop()
        stuck.pop(rank, None)
        for step in range(at[rank], len(plan[rank])):
            a = plan[rank][step]
            if a.op is Op.WEIGHT_GRAD:
                continue
            back = a.op is not Op.FORWARD
            source = a.stage + (1 if back else -1)
            need = back, source, a.microbatch
            if 0 <= source <= last and need not in done:
                waiting[need].append(rank)
                op = next(
                    b.op
                    for b in plan[plan.rank_of[source]]
                    if (b.stage, b.microbatch) == need[1:] and b.op in _NEEDED[back]
                )
                at[rank], stuck[rank] = step, (step, Action(op, source, a.microbatch))
                break
            made = back, a.stage, a.microbatch
            done.add(made)
            runnable += waiting.pop(made, ())
    return stuck


def _check_computations(plan: Plan, allowed: Container[Op], trains: bool) -> None:
    """Of all ops that are ``allowed``, the computations."""
    if trains and plan.forward_only:
        raise ScheduleError("it has no B, and no I and W: nothing would be learned")
    if not plan.rank_of or plan.num_microbatches < 1:
        shape = f"{plan.num_stages} stages and {plan.num_microbatches} microbatches"
        raise ScheduleError(f"{plan.name} has {shape}: there is nothing to run")
    if any(not 0 <= rank < plan.pp for rank in plan.rank_of):
        raise ScheduleError(f"stages lie on ranks {plan.rank_of}, but there are {plan.pp} lists")
    wanted = _BITS[Op.FORWARD] if plan.forward_only else sum(_BITS[op] for op in _PARTS)
    m = plan.num_microbatches
    done = bytearray(plan.num_stages * m)  # the parts of (stage, microbatch), as bits
    for rank, actions in enumerate(plan.actions):
        needs = {(op, s): _needs(plan, op, s) for op in COMPUTE for s in plan.stages_of(rank)}
        for step, a in enumerate(actions):
            found = needs.get((a.op, a.stage))
            if found is None and a.op not in COMPUTE and a.op in allowed:
                continue
            if found is None or not 0 <= a.microbatch < m:
                _fail_place(plan, rank, step, allowed)
            bits, at = _BITS[a.op], a.stage * m + a.microbatch
            if done[at] & bits:
                _fail_repeat(plan, rank, step)
            for offset, bit, op in found:
                if not done[at + offset * m] & bit:
                    stage = a.stage + offset
                    _fail(plan, rank, step, f"{a} needs {Action(op, stage, a.microbatch)} first")
            done[at] |= bits
        for stage in plan.stages_of(rank):
            for microbatch in range(m):
                if missing := wanted & ~done[stage * m + microbatch]:
                    whole = missing & _BITS[Op.BACKWARD] == _BITS[Op.BACKWARD]
                    op = next(op for op in _PARTS if missing & _BITS[op])
                    op = Op.BACKWARD if whole and op is not Op.FORWARD else op
                    _fail_missing(plan, rank, Action(op, stage, microbatch))


def _fail_missing(plan: Plan, rank: int, missing: Action) -> NoReturn:
    """Shows it where it could stand: after what it needs and its like of the microbatch before,
    or at the end of the list."""
    before = {
        (op, missing.stage + offset, missing.microbatch)
        for offset, bit, _ in _needs(plan, missing.op, missing.stage)
        for op, bits in _BITS.items()
        if bits & bit
    }
    before |= {
        (op, missing.stage, missing.microbatch - 1)
        for op, bits in _BITS.items()
        if bits & _BITS[missing.op]
    }
    at = [i for i, a in enumerate(plan[rank], 1) if (a.op, a.stage, a.microbatch) in before]
    step = at[-1] if at else len(plan[rank])
    rows = list(plan.actions)
    rows[rank] = (*plan[rank][:step], missing, *plan[rank][step:])
    grid = render_text(plan.replace(rows), {rank: step})
    raise ScheduleError(f"rank {rank}, step {step}: {missing} is missing\n{grid}")


def _needs(plan: Plan, op: Op, stage: int) -> list[tuple[int, int, Op]]:
    """What the same rank must have done for this microbatch: stage after this one, bit, name."""
    rank, last = plan.rank_of[stage], plan.num_stages - 1
    match op:
        case Op.FORWARD:
            local = stage > 0 and plan.rank_of[stage - 1] == rank
            return [(-1, _BITS[Op.FORWARD], Op.FORWARD)] if local else []
        case Op.WEIGHT_GRAD:
            return [(0, _BITS[Op.INPUT_GRAD], Op.INPUT_GRAD)]
        case _:
            local = stage < last and plan.rank_of[stage + 1] == rank
            after = [(1, _BITS[Op.INPUT_GRAD], op)] if local else []
            return [(0, _BITS[Op.FORWARD], Op.FORWARD), *after]


def _fail_place(plan: Plan, rank: int, step: int, allowed: Container[Op]) -> NoReturn:
    a = plan[rank][step]
    if a.op not in allowed:
        _fail(plan, rank, step, f"{a} is not a computation")
    if not (0 <= a.stage < plan.num_stages and 0 <= a.microbatch < plan.num_microbatches):
        shape = f"{plan.num_stages} stages and {plan.num_microbatches} microbatches"
        _fail(plan, rank, step, f"{a} does not exist among {shape}")
    _fail(plan, rank, step, f"{a} belongs to rank {plan.rank_of[a.stage]}")


def _fail_repeat(plan: Plan, rank: int, step: int) -> NoReturn:
    a = plan[rank][step]
    key = a.stage, a.microbatch
    for earlier, b in enumerate(plan[rank][:step]):
        if (b.stage, b.microbatch) == key and _BITS[a.op] & _BITS.get(b.op, 0):
            _fail(plan, rank, step, f"{a} repeats {b} of step {earlier}")
    raise AssertionError("it was done before")


def _number(plan: Plan, a: Action) -> int:
    return a.stage * plan.num_microbatches + a.microbatch


def _steps(plan: Plan, rank: int) -> _Steps:
    steps: _Steps = {op: {} for op in Op}
    m = plan.num_microbatches
    for step, a in enumerate(plan[rank]):
        if not -1 <= a.microbatch < m or (a.microbatch == -1) != (a.op is Op.REDUCE):
            _fail(plan, rank, step, f"{a} does not exist among {m} microbatches")
        earlier = steps[a.op].setdefault(a.stage * m + a.microbatch, step)
        if earlier != step:
            _fail(plan, rank, step, f"{a} repeats step {earlier}")
    return steps


def _check_messages(plan: Plan, rank: int, steps: _Steps) -> None:
    """Each message of this rank's computations has its parts, in order; there are no others."""
    rightful, m = 0, plan.num_microbatches
    parts = {
        (op, s): (
            None if plan.peer(s, s - way) is None else steps[recv],
            None if plan.peer(s, s + way) is None else (steps[send], steps[wait]),
        )
        for op, (recv, send, wait, way) in _MESSAGE_OPS.items()
        for s in plan.stages_of(rank)
    }
    for step, a in enumerate(plan[rank]):
        if (found := parts.get((a.op, a.stage))) is None:
            continue
        received, left = found
        key = a.stage * m + a.microbatch
        if received is not None:
            rightful += 1
            if not received.get(key, step) < step:
                _fail_part(plan, rank, steps, _MESSAGE_OPS[a.op][0], step)
        if left is not None:
            rightful += 2
            sent = left[0].get(key, step)
            if not step < sent:
                _fail_part(plan, rank, steps, _MESSAGE_OPS[a.op][1], step)
            if not sent < left[1].get(key, sent):
                _fail_part(plan, rank, steps, _MESSAGE_OPS[a.op][2], sent)
    if rightful < sum(len(steps[op]) for op in _MESSAGE_PARTS):
        _fail_needless(plan, rank)


def _fail_part(plan: Plan, rank: int, steps: _Steps, part: Op, step: int) -> NoReturn:
    """``part`` of the message of the action at ``step`` is missing or on its wrong side."""
    a = plan[rank][step]
    found = Action(part, a.stage, a.microbatch)
    at = steps[part].get(_number(plan, a))
    receives = part in (Op.RECV_F, Op.RECV_B)
    if at is None:
        problem = f"{a} needs {found}, which is missing"
        if receives and not any(b.op is part and b.stage == a.stage for b in plan[rank]):
            source = plan.rank_of[a.stage + (-1 if part is Op.RECV_F else 1)]
            problem += f": the channel from rank {source} has no receive buffer for its stage"
        _fail(plan, rank, step, problem)
    if receives:
        _fail(plan, rank, step, f"{a} needs {found} first")
    _fail(plan, rank, at, f"{found} needs {a} first")


def _fail_needless(plan: Plan, rank: int) -> NoReturn:
    rightful = {
        (part, a.stage, a.microbatch)
        for a in plan[rank]
        if a.op in _MESSAGE_OPS
        for recv, send, wait, way in [_MESSAGE_OPS[a.op]]
        for part, neighbour in ((recv, -way), (send, way), (wait, way))
        if plan.peer(a.stage, a.stage + neighbour) is not None
    }
    for step, a in enumerate(plan[rank]):
        if a.op in _MESSAGE_PARTS and (a.op, a.stage, a.microbatch) not in rightful:
            _fail(plan, rank, step, f"{a} belongs to no message between two ranks")
    raise AssertionError("every message is rightful")


def _check_reductions(plan: Plan, rank: int, steps: _Steps) -> None:
    whole = (Op.BACKWARD, Op.WEIGHT_GRAD)
    last = {a.stage: step for step, a in enumerate(plan[rank]) if a.op in whole}
    reduced = {plan[rank][step].stage: step for step in steps[Op.REDUCE].values()}
    for stage, step in reduced.items():
        name = Action(Op.REDUCE, stage)
        if stage not in last:
            _fail(plan, rank, step, f"{name} has no gradient to reduce")
        if step < last[stage]:
            _fail(plan, rank, step, f"{name} needs {plan[rank][last[stage]]} first")
    for stage, step in last.items():
        if stage not in reduced:
            name = Action(Op.REDUCE, stage)
            _fail(plan, rank, step, f"no {name} follows {plan[rank][step]}")


def _check_channels(plan: Plan) -> None:
    """Receives are posted in the order of the sends."""
    sends: defaultdict[tuple[int, int, bool], list[Action]] = defaultdict(list)
    receives: defaultdict[tuple[int, int, bool], list[int]] = defaultdict(list)
    for rank, actions in enumerate(plan.actions):
        sent_by = {
            (op, s): sends[rank, plan.rank_of[s + way], op is Op.SEND_B]
            for op, way in ((Op.SEND_F, 1), (Op.SEND_B, -1))
            for s in plan.stages_of(rank)
            if plan.peer(s, s + way) is not None
        }
        posted_for = {
            (op, s): receives[plan.rank_of[s + way], rank, op is Op.RECV_B]
            for op, way in ((Op.RECV_F, -1), (Op.RECV_B, 1))
            for s in plan.stages_of(rank)
            if plan.peer(s, s + way) is not None
        }
        for step, a in enumerate(actions):
            if (sent := sent_by.get((a.op, a.stage))) is not None:
                sent.append(a)
            elif (posted := posted_for.get((a.op, a.stage))) is not None:
                posted.append(step)
    for (source, rank, gradient), sent in sends.items():
        way = -1 if gradient else 1
        for nth, (send, step) in enumerate(
            zip(sent, receives[source, rank, gradient], strict=True)
        ):
            recv = plan[rank][step]
            if (send.stage + way, send.microbatch) != (recv.stage, recv.microbatch):
                problem = f"{recv} is posted for message {nth} of its channel from rank {source}"
                _fail(plan, rank, step, f"{problem}, which is {send}")


def _check_buffers(plan: Plan, report: Report) -> None:
    """Receive buffers are bounded by the number of channels, not of microbatches: ROOM each. A
    channel whose messages are taken in another order than they are sent needs those in between."""
    for rank, peaks in enumerate(report.peak_receives):
        for (source, kind), peak in peaks.items():
            if peak > ROOM:
                _check_channel_buffers(plan, rank, source, kind)


def _check_channel_buffers(plan: Plan, rank: int, source: int, kind: str) -> None:
    events = []
    for step, a in enumerate(plan[rank]):
        way, its_kind, change = RECEIVES.get(a.op, (0, "", 0))
        if its_kind == kind and plan.peer(a.stage, a.stage + way) == source:
            events.append((step, a, change))
    posts = [(a.stage, a.microbatch) for _, a, change in events if change > 0]
    turn = {key: nth for nth, key in enumerate(posts)}
    taken = accumulate((turn[a.stage, a.microbatch] for _, a, c in events if c < 0), max)
    enough = max(ROOM, *(newest + 1 - nth for nth, newest in enumerate(taken)))
    held = 0
    for step, a, change in events:
        held += change
        if held > enough:
            problem = f"{a} makes {held} receives of the channel from rank {source} at once"
            _fail(plan, rank, step, f"{problem}, where {enough} suffice")


def _fail(plan: Plan, rank: int, step: int, problem: str) -> NoReturn:
    raise ScheduleError(f"rank {rank}, step {step}: {problem}\n{render_text(plan, {rank: step})}")
