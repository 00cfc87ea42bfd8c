"""What each rank holds while it goes through its list."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megalite.schedule.action import Op, Plan

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
RECEIVES = {
    Op.RECV_F: (-1, "F", 1),
    Op.RECV_B: (1, "B", 1),
    Op.FORWARD: (-1, "F", -1),
    Op.BACKWARD: (1, "B", -1),
    Op.INPUT_GRAD: (1, "B", -1),
}


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

    @property
    def receive_buffers(self) -> tuple[int, ...]:
        """The most receives that a rank has posted and not taken, over all its channels."""
        return tuple(sum(peaks.values()) for peaks in self.peak_receives)


def make_report(plan: Plan) -> Report:
    """The peaks of a lowered plan (see ``validate``)."""
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


def _peaks(plan: Plan, rank: int, forward_only: bool) -> dict[_Held, int]:
    """The most of everything that a rank holds along its list."""
    held: defaultdict[_Held, int] = defaultdict(int)
    peak: defaultdict[_Held, int] = defaultdict(int)
    effects = {(op, s): _effect(plan, op, s) for op in Op for s in plan.stages_of(rank)}
    for a in plan[rank]:
        for what, change in effects[a.op, a.stage]:
            held[what] += change
            if held[what] > peak[what]:
                peak[what] = held[what]
        if forward_only and a.op is Op.FORWARD:
            held["chunks"] -= 1
    return peak


def _effect(plan: Plan, op: Op, stage: int) -> tuple[tuple[_Held, int], ...]:
    """How an op on a stage changes what its rank holds; an input is taken before it is held."""
    changes = _CHANGES[op]
    if op not in RECEIVES:
        return changes
    way, kind, change = RECEIVES[op]
    source = plan.peer(stage, stage + way)
    return changes if source is None else (((source, kind), change), *changes)


def peak_memory(
    plan: Plan, activation: Sequence[float], open_w: Sequence[float]
) -> tuple[float, ...]:
    """The most bytes (or any unit) of activations that each rank holds at once.

    Args:
        activation: what a microbatch holds on each stage from F to the end of B, or of I.
        open_w: what is left of it on each stage between I and W.
    """
    peaks = []
    for actions in plan.actions:
        held = peak = 0.0
        for a in actions:
            match a.op:
                case Op.FORWARD:
                    held += activation[a.stage]
                    peak = max(peak, held)
                case Op.BACKWARD:
                    held -= activation[a.stage]
                case Op.INPUT_GRAD:
                    held += open_w[a.stage] - activation[a.stage]
                case Op.WEIGHT_GRAD:
                    held -= open_w[a.stage]
        peaks.append(peak)
    return tuple(peaks)
