"""Spans of a plan's actions: what the executor does, as a ``Trace`` keeps it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megalite.schedule.action import COMPUTE, Action, Op, Plan
from megalite.trace import Span, Trace

T = TypeVar("T")

# Where the other end of an action's message stands, in stages from its own.
_TOWARDS = {
    Op.SEND_F: 1,
    Op.WAIT_F: 1,
    Op.RECV_B: 1,
    Op.SEND_B: -1,
    Op.WAIT_B: -1,
    Op.RECV_F: -1,
}


def traced(
    do: Callable[[Action, T], None], plan: Plan, trace: Trace
) -> Callable[[Action, T], None]:
    """``do`` with a span for each action.

    A computation begins when its message is there; the wait before it is a span of its own.
    """
    mark = trace.clock.mark

    def run(action: Action, given: T) -> None:
        start = mark()
        do(action, given)
        end = mark()
        op, stage, microbatch = action.op, action.stage, action.microbatch
        text = op.value
        waits = trace.waits()
        if op in COMPUTE:
            for begun, start, peer in waits:
                trace.add(Span("message", "", begun, start, text, stage, microbatch, peer))
            trace.add(Span("compute", "", start, end, text, stage, microbatch))
            return
        row = "reduce" if op is Op.REDUCE else "message"
        peer = -1 if op is Op.REDUCE else plan.rank_of[stage + _TOWARDS[op]]
        trace.add(Span(row, "", start, end, text, stage, microbatch, peer))

    return run
