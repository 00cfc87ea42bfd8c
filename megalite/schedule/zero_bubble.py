"""Schedules that split the backward pass: I hands the gradient on at once, W fills idle time.

Those in V placement have two stages a rank, chunk 0 on the way there and chunk 1 on the way back,
so that rank 0 has both ends of the pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import product

from megalite.schedule.action import Action, Op
from megalite.schedule.costs import Costs
from megalite.schedule.fill import fill
from megalite.schedule.placement import place_stages

Ranks = Sequence[Sequence[Action]]


def zb_h(rank: int, pp: int, num_microbatches: int, lead: int) -> list[Action]:
    """ZB-H1 (lead 1) and ZB-H2 (lead 2), the hand-made ones.

    1F1B with ``lead`` times its warm-up; a W is put off until ``lead x rank`` younger I are done,
    so that every rank holds ``lead x (pp - 1) + 1`` microbatches and the ends of the ranks form
    the same stairs as their starts.

    Source: Qi et al. 2023 (arXiv:2401.10241), section 2.
    """
    warmup, put_off = lead * (pp - rank - 1), lead * rank
    starts = ((Op.FORWARD, 0), (Op.INPUT_GRAD, warmup), (Op.WEIGHT_GRAD, warmup + put_off))
    return [
        Action(op, rank, step - start)
        for step in range(num_microbatches + warmup + put_off)
        for op, start in starts
        if 0 <= step - start < num_microbatches
    ]


def zb_v(pp: int, num_microbatches: int) -> Ranks:
    """No bubble but the stairs at both ends, with the memory of 1F1B: ``pp`` microbatches.

    A rank fills the time until chunk 1 arrives with F of chunk 0, and from then on each freed
    activation with another; W fills what remains.

    Source: Qi et al. 2023 (arXiv:2401.10241), section 6.
    """
    orders = []
    for rank in range(pp):
        back = pp - 1 - rank
        phases = [
            ("F0", 2 * back + 1),
            ("F1 F0", rank),
            ("F1", 1),
            ("I1 F1", back),
            ("I1 I0 F0 F1", num_microbatches),
        ]
        orders.append(_from_phases(phases, (rank, 2 * pp - 1 - rank), num_microbatches))
    return _filled(orders, pp, num_microbatches, pp)


def v_half(pp: int, num_microbatches: int) -> Ranks:
    """Half of 1F1B's memory: ``(pp + 2) // 2`` microbatches.

    Hops of 3 there and back make the lifetimes of a rank's two stages 6 (pp - 1) together, one
    activation each 6. The turns keep the four passes apart on every rank; at pp 4 another block
    loses a third less. Where memory holds all microbatches, it is ``zb_v``.

    Source: Qi et al. 2024 (arXiv:2405.15362), section 3.
    """
    held = pp // 2 + 1
    if num_microbatches <= held:
        return zb_v(pp, num_microbatches)
    hops, turns = (1, 2, 1, 2), (0, 0, 1) if pp % 2 else (3, 1, 3)
    if pp == 4:
        hops, turns = (1, 2, 2, 1), (3, 0, 3)
    return _filled(_from_block(hops, turns, pp, num_microbatches), pp, num_microbatches, held)


def v_min(pp: int, num_microbatches: int) -> Ranks:
    """A third of 1F1B's memory, the least: ``(pp + 4) // 3`` microbatches.

    Every hop is 1; where 3 divides pp, passes of a rank would collide without the turns. Where
    memory holds all microbatches, it is ``zb_v``.

    Source: Qi et al. 2024 (arXiv:2405.15362), section 3.
    """
    held = (pp + 4) // 3
    if num_microbatches <= held:
        return zb_v(pp, num_microbatches)
    turns = (0, 0, 0) if pp % 3 else (2, 0, 2)
    orders = _from_block((1, 1, 1, 1), turns, pp, num_microbatches)
    return _filled(orders, pp, num_microbatches, held)


def dualpipe_v(rank: int, pp: int, num_microbatches: int) -> list[Action]:
    """DualPipe in V placement: F of one way beside B of the other, so that on a device one can
    hide the other's messages.

    The backward is split where a W would be in a neighbour's way: before the steady state and in
    the second half of the drain. There is a steady state from 2 ``pp`` microbatches on; with
    fewer, those beyond are left out.

    Source: DeepSeek-AI 2024 (DeepSeek-V3, arXiv:2412.19437), section 3.2.1, cut in half.
    """
    there, back = rank, pp - 1 - rank
    half = (there + 1) // 2
    phases = [
        ("F0", 2 * back),
        ("F0 F1", there + 1),
        ("I1 W F1", back),
        ("F0 B1 F1 B0", max(num_microbatches, 2 * pp) - 2 * pp + there + 1),
        ("B1 F1 B0", back),
        ("B1 B0", half),
        ("I1 I0" if rank % 2 else "B1 I0", 1),
        ("I1 I0", there - half),
        ("W I0", back),
        ("W", pp),
    ]
    return _from_phases(phases, (rank, 2 * pp - 1 - rank), num_microbatches)


def _from_phases(
    phases: Iterable[tuple[str, int]], stages: tuple[int, int], num_microbatches: int
) -> list[Action]:
    """Phases are ops with their chunk, and how often they come. A chunk's microbatches take turns;
    W is the oldest one; microbatches that there are not are left out."""
    count = {op + chunk: 0 for op, chunk in product("FB", "01")}
    ops = {op.value: op for op in Op}
    open_w: deque[tuple[int, int]] = deque()
    actions = []
    for text in (text for ops, times in phases for _ in range(times) for text in ops.split()):
        if text == "W":
            if not open_w:
                continue
            stage, microbatch = open_w.popleft()
        else:
            turn = text.replace("I", "B")
            stage, microbatch = stages[int(text[1])], count[turn]
            count[turn] += 1
            if text[0] == "I":
                open_w.append((stage, microbatch))
        if microbatch < num_microbatches:
            actions.append(Action(ops[text[0]], stage, microbatch))
    return actions


def _from_block(
    hops: tuple[int, int, int, int], turns: tuple[int, int, int], pp: int, num_microbatches: int
) -> Ranks:
    """F and I in the order of a building block that is repeated every 6 units: the time of a
    rank's two F, two I and two W.

    Args:
        hops: units from a stage to the next in F there, F back, I there and I back.
        turns: what is added where F turns, where F becomes I, and where I turns.
    """
    forward_back = (pp - 1) * hops[0] + 1 + turns[0]  # F of chunk 1 on the last rank
    input_there = forward_back + (pp - 1) * hops[1] + 1 + turns[1]  # I of chunk 1 on rank 0
    input_back = input_there + (pp - 1) * hops[2] + 1 + turns[2]  # I of chunk 0 on the last rank
    orders = []
    for rank in range(pp):
        there, back = rank, pp - 1 - rank
        passes = (
            (there * hops[0], Op.FORWARD, rank),
            (forward_back + back * hops[1], Op.FORWARD, 2 * pp - 1 - rank),
            (input_there + there * hops[2], Op.INPUT_GRAD, 2 * pp - 1 - rank),
            (input_back + back * hops[3], Op.INPUT_GRAD, rank),
        )
        timed = [
            (start + 6 * m, Action(op, stage, m))
            for start, op, stage in passes
            for m in range(num_microbatches)
        ]
        orders.append([a for _, a in sorted(timed, key=lambda x: x[0])])
    return orders


def _filled(orders: Ranks, pp: int, num_microbatches: int, microbatches_held: int) -> Ranks:
    """With each W where the rank would idle, or must make room, were every F, I and W to take one
    unit."""
    filled = fill(
        orders,
        place_stages("v", pp, 2),
        num_microbatches,
        Costs.equal(pp, 2, 2.0, 2.0, 2.0),
        2 * microbatches_held,
    )
    assert filled is not None, "the order keeps its limit"
    return filled.actions
