"""Proves that a plan can be run: completeness, order, pairing, no dead-lock; and what it holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from megalite.errors import ScheduleError
from megalite.schedule.action import COMPUTE, Action, Op, Plan
from megalite.schedule.render import render_text
from megalite.schedule.simulate import simulate

_TASKS = {Op.FORWARD: "F", Op.BACKWARD: "IW", Op.INPUT_GRAD: "I", Op.WEIGHT_GRAD: "W"}
# What belongs to a computation that takes or makes a message, and which way the message goes.
_MESSAGE_OPS = {
    Op.FORWARD: (Op.RECV_F, Op.SEND_F, Op.WAIT_F, 1),
    Op.BACKWARD: (Op.RECV_B, Op.SEND_B, Op.WAIT_B, -1),
    Op.INPUT_GRAD: (Op.RECV_B, Op.SEND_B, Op.WAIT_B, -1),
}
_MESSAGE_PARTS = frozenset(Op) - COMPUTE - {Op.REDUCE}

_Steps = dict[Op, dict[tuple[int, int], int]]  # where a rank's (stage, microbatch) of an op stands


@dataclass(frozen=True)
class Report:
    """What each rank holds at most, counted along its list.

    Attributes:
        peak_chunks: activations from F to the end of B (or W): one a chunk and microbatch.
        peak_in_flight: the same in whole-rank units (divided by the rank's number of chunks).
        peak_open_w: weight gradients put off between I and W, in whole-rank units.
        peak_receives: for each channel (sending rank, "F" or "B"), receives posted and not taken.
        peak_unsent: sends posted and not yet waited for.
    """

    peak_chunks: tuple[int, ...]
    peak_in_flight: tuple[float, ...]
    peak_open_w: tuple[float, ...]
    peak_receives: tuple[Mapping[tuple[int, str], int], ...]
    peak_unsent: tuple[int, ...]


def validate(plan: Plan) -> Report:
    """Checks a lowered plan; what it accepts runs to its end on any timing.

    Checked: each F once and, unless the plan is forward-only, each B (or I and W) once, on the
    right rank, after what it needs; each message between ranks has one receive before it is
    taken, one send after it is made and one wait after the send; receives of a channel are posted
    in the order of its sends; one REDUCE a stage, after its last gradient; no dead-lock where
    posts never block and everything else waits for both ends of its message.

    On a GPU, channels are communicators that run at once: the proof assumes that their kernels
    can be resident together.

    Raises:
        ScheduleError: the place, the problem, and the grid with the place in brackets.
    """
    check_compute(plan.compute_only())
    for rank in range(plan.pp):
        steps = _steps(plan, rank)
        _check_messages(plan, rank, steps)
        _check_reductions(plan, rank, steps)
    _check_channels(plan)
    nothing = [0.0] * plan.num_stages
    simulate(plan, nothing, nothing, nothing)
    return _report(plan)


def _report(plan: Plan) -> Report:
    forward_only = plan.forward_only
    peaks = [_peaks(plan, rank, forward_only) for rank in range(plan.pp)]
    chunks = [max(1, len(plan.stages_of(rank))) for rank in range(plan.pp)]
    return Report(
        tuple(peak["chunks"] for peak in peaks),
        tuple(peak["chunks"] / n for peak, n in zip(peaks, chunks, strict=True)),
        tuple(peak["open_w"] / n for peak, n in zip(peaks, chunks, strict=True)),
        tuple({k: n for k, n in peak.items() if isinstance(k, tuple)} for peak in peaks),
        tuple(peak["unsent"] for peak in peaks),
    )


def check_compute(plan: Plan) -> None:
    """Checks a plan without communication: each action once, on its rank, after what its own
    rank must have done before it.

    Raises:
        ScheduleError: as ``validate``.
    """
    if any(not 0 <= rank < plan.pp for rank in plan.rank_of):
        raise ScheduleError(f"stages lie on ranks {plan.rank_of}, but there are {plan.pp} lists")
    wanted = "F" if plan.forward_only else "FIW"
    for rank, actions in enumerate(plan.actions):
        done: dict[tuple[str, int, int], int] = {}
        for step, a in enumerate(actions):
            _check_place(plan, rank, step)
            for task in _TASKS[a.op]:
                if (earlier := done.get((task, a.stage, a.microbatch))) is not None:
                    _fail(plan, rank, step, f"{a} repeats {actions[earlier]} of step {earlier}")
            for task, stage in _needs(plan, a):
                if (task, stage, a.microbatch) not in done:
                    name = "B" if task == "I" and a.op is Op.BACKWARD else task
                    _fail(plan, rank, step, f"{a} needs {stage}{name}{a.microbatch} first")
            for task in _TASKS[a.op]:
                done[task, a.stage, a.microbatch] = step
        for stage in plan.stages_of(rank):
            for m in range(plan.num_microbatches):
                missing = "".join(task for task in wanted if (task, stage, m) not in done)
                if missing:
                    name = missing.replace("IW", "B")[0]
                    _fail(plan, rank, None, f"{stage}{name}{m} is missing")


def _check_place(plan: Plan, rank: int, step: int) -> None:
    a = plan[rank][step]
    if a.op not in COMPUTE:
        _fail(plan, rank, step, f"{a} is not a computation")
    if not (0 <= a.stage < plan.num_stages and 0 <= a.microbatch < plan.num_microbatches):
        shape = f"{plan.num_stages} stages and {plan.num_microbatches} microbatches"
        _fail(plan, rank, step, f"{a} does not exist among {shape}")
    if plan.rank_of[a.stage] != rank:
        _fail(plan, rank, step, f"{a} belongs to rank {plan.rank_of[a.stage]}")


def _needs(plan: Plan, a: Action) -> list[tuple[str, int]]:
    """The tasks (kind, stage) that the same rank must have done for this microbatch."""
    rank, last = plan.rank_of[a.stage], plan.num_stages - 1
    match a.op:
        case Op.FORWARD:
            return [("F", a.stage - 1)] if a.stage and plan.rank_of[a.stage - 1] == rank else []
        case Op.WEIGHT_GRAD:
            return [("I", a.stage)]
        case _:
            local = a.stage < last and plan.rank_of[a.stage + 1] == rank
            return [("F", a.stage), *([("I", a.stage + 1)] if local else [])]


def _steps(plan: Plan, rank: int) -> _Steps:
    steps: _Steps = {op: {} for op in Op}
    for step, a in enumerate(plan[rank]):
        earlier = steps[a.op].setdefault((a.stage, a.microbatch), step)
        if earlier != step:
            _fail(plan, rank, step, f"{a} repeats step {earlier}")
    return steps


def _check_messages(plan: Plan, rank: int, steps: _Steps) -> None:
    """Each message of this rank's computations has its parts, in order; there are no others."""
    rightful = 0
    for step, a in enumerate(plan[rank]):
        if a.op not in _MESSAGE_OPS:
            continue
        recv, send, wait, way = _MESSAGE_OPS[a.op]
        key = a.stage, a.microbatch
        if plan.peer(a.stage, a.stage - way) is not None:
            rightful += 1
            if not steps[recv].get(key, step) < step:
                _fail_part(plan, rank, steps, recv, step)
        if plan.peer(a.stage, a.stage + way) is not None:
            rightful += 2
            sent = steps[send].get(key, step)
            if not step < sent:
                _fail_part(plan, rank, steps, send, step)
            if not sent < steps[wait].get(key, sent):
                _fail_part(plan, rank, steps, wait, sent)
    if rightful < sum(len(steps[op]) for op in _MESSAGE_PARTS):
        _fail_needless(plan, rank)


def _fail_part(plan: Plan, rank: int, steps: _Steps, part: Op, step: int) -> NoReturn:
    """``part`` of the message of the action at ``step`` is missing or on its wrong side."""
    a = plan[rank][step]
    found = Action(part, a.stage, a.microbatch)
    at = steps[part].get((a.stage, a.microbatch))
    if at is None:
        _fail(plan, rank, step, f"{a} needs {found}, which is missing")
    if part in (Op.RECV_F, Op.RECV_B):
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
    last = {a.stage: step for step, a in enumerate(plan[rank]) if "W" in _TASKS.get(a.op, "")}
    reduced = {stage: step for (stage, _), step in steps[Op.REDUCE].items()}
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
        for step, a in enumerate(actions):
            match a.op:
                case Op.SEND_F | Op.SEND_B:
                    gradient = a.op is Op.SEND_B
                    to = plan.rank_of[a.stage + (-1 if gradient else 1)]
                    sends[rank, to, gradient].append(a)
                case Op.RECV_F | Op.RECV_B:
                    gradient = a.op is Op.RECV_B
                    source = plan.rank_of[a.stage + (1 if gradient else -1)]
                    receives[source, rank, gradient].append(step)
    for (source, rank, gradient), sent in sends.items():
        way = -1 if gradient else 1
        for nth, (send, step) in enumerate(
            zip(sent, receives[source, rank, gradient], strict=True)
        ):
            recv = plan[rank][step]
            if (send.stage + way, send.microbatch) != (recv.stage, recv.microbatch):
                problem = f"{recv} is posted for message {nth} of its channel from rank {source}"
                _fail(plan, rank, step, f"{problem}, which is {send}")


_Held = str | tuple[int, str]  # "chunks", "open_w", "unsent", or a channel of receives
_CHANGES: dict[Op, tuple[tuple[_Held, int], ...]] = {
    Op.FORWARD: (("chunks", 1),),
    Op.BACKWARD: (("chunks", -1),),
    Op.INPUT_GRAD: (("open_w", 1),),
    Op.WEIGHT_GRAD: (("chunks", -1), ("open_w", -1)),
    Op.SEND_F: (("unsent", 1),),
    Op.SEND_B: (("unsent", 1),),
    Op.WAIT_F: (("unsent", -1),),
    Op.WAIT_B: (("unsent", -1),),
    Op.RECV_F: (),
    Op.RECV_B: (),
    Op.REDUCE: (),
}
# Which neighbour a message comes from, its kind, and whether it is posted or taken.
_RECEIVES = {
    Op.RECV_F: (-1, "F", 1),
    Op.RECV_B: (1, "B", 1),
    Op.FORWARD: (-1, "F", -1),
    Op.BACKWARD: (1, "B", -1),
    Op.INPUT_GRAD: (1, "B", -1),
}


def _peaks(plan: Plan, rank: int, forward_only: bool) -> dict[_Held, int]:
    """The most of everything that a rank holds along its list."""
    held: defaultdict[_Held, int] = defaultdict(int)
    peak: defaultdict[_Held, int] = defaultdict(int)
    for a in plan[rank]:
        changes: Iterable[tuple[_Held, int]] = _CHANGES[a.op]
        if a.op in _RECEIVES:
            way, kind, change = _RECEIVES[a.op]
            if (source := plan.peer(a.stage, a.stage + way)) is not None:
                changes = ((source, kind), change), *changes
        for what, change in changes:
            held[what] += change
            if held[what] > peak[what]:
                peak[what] = held[what]
        if forward_only and a.op is Op.FORWARD:
            held["chunks"] -= 1
    return peak


def _fail(plan: Plan, rank: int, step: int | None, problem: str) -> NoReturn:
    if step is None:
        raise ScheduleError(f"rank {rank}: {problem}\n{render_text(plan)}")
    raise ScheduleError(f"rank {rank}, step {step}: {problem}\n{render_text(plan, {rank: step})}")
