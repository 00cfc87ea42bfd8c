from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megalite.schedule.action import Action
from megalite.schedule.costs import Costs
from megalite.schedule.generators import build_schedule
from megalite.schedule.lower import lower
from megalite.schedule.render import parse_text
from megalite.schedule.simulate import Timeline, simulate, simulate_step


def when(timeline: Timeline, name: str) -> tuple[float, float]:
    wanted = Action.parse(name)
    for rank, actions in enumerate(timeline.plan.actions):
        if wanted in actions:
            at = actions.index(wanted)
            return timeline.start[rank][at], timeline.end[rank][at]
    raise AssertionError(f"{name} is not in the plan")


def test_each_stage_has_its_own_times_and_messages_take_theirs() -> None:
    plan = lower(build_schedule("1f1b", 2, 1))
    timeline = simulate(plan, [1, 2], [3, 4], [5, 6], comm_s=0.5)
    assert when(timeline, "0F0") == (0, 1)
    assert when(timeline, "1F0") == (1.5, 3.5)
    assert when(timeline, "1B0") == (3.5, 13.5)
    assert when(timeline, "0B0") == (14, 22)
    assert timeline.makespan == 22
    assert timeline.bubble_fraction == pytest.approx(1 - 21 / 44)
    # Rank 0 spans 22 of which it is busy 9; rank 1 is busy 12.
    assert timeline.span_bubble_fraction == pytest.approx((22 - 12) / 22)


def test_w_fills_the_wait_for_a_gradient() -> None:
    whole = parse_text("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1")
    split = parse_text("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1I0 1F1 1I1 1W0 1W1")
    ones = [1.0, 1.0]
    assert simulate(lower(whole), ones, ones, ones).makespan == 9
    assert simulate(lower(split), ones, ones, ones).makespan == 7


def test_messages_of_a_channel_follow_one_another() -> None:
    plan = lower(build_schedule("gpipe", 2, 3))
    timeline = simulate(plan, [1, 0], [0, 0], [0, 0], comm_s=4)
    assert [when(timeline, f"1F{m}")[0] for m in range(3)] == [5, 9, 13]


def test_a_slow_receiver_holds_no_sender_up() -> None:
    timeline = simulate(lower(build_schedule("gpipe", 2, 8)), [1, 100], [0, 0], [0, 0])
    assert when(timeline, "0F7") == (7, 8)


def test_reductions_follow_one_another_beside_the_computations() -> None:
    plan = lower(parse_text("rank 0: 0F0 3F0 3B0 0B0\nrank 1: 1F0 2F0 2B0 1B0"))
    costs = replace(Costs.equal(2, 2, 2.0, 2.0, 2.0), reduce=(1.0, 5.0, 4.0, 3.0))
    timeline = simulate_step(plan, costs)
    assert when(timeline, "3REDUCE") == (6, 9)
    assert when(timeline, "2REDUCE") == (8, 12)
    assert when(timeline, "1REDUCE") == (12, 17)  # B of stage 1 ends at 10
    assert when(timeline, "0REDUCE") == (12, 13)
    assert when(timeline, "0B0") == (10, 12) and timeline.makespan == 17
    assert timeline.busy == (6, 6) and timeline.bubble_fraction == pytest.approx(1 - 12 / 34)


def test_a_reduction_that_cannot_overlap_holds_its_rank_up() -> None:
    plan = lower(parse_text("rank 0: 0F0 3F0 3B0 0B0\nrank 1: 1F0 2F0 2B0 1B0"))
    costs = Costs.equal(2, 2, 2.0, 2.0, 2.0)
    costs = replace(costs, reduce=(1.0, 5.0, 4.0, 3.0), reduce_overlaps=False)
    timeline = simulate_step(plan, costs)
    assert when(timeline, "2REDUCE") == (8, 12) and when(timeline, "1B0")[0] == 12


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"forward": (1.0,)}, "each of the 1 stages"),
        ({"reduce": (1.0,)}, "reductions must be given for each of the 2 stages"),
        ({"comm": 1e308}, "a time of 1e.308 is not 0 or within 1e-100 to 1e.100"),
        ({"comm": 1e-320}, "is not 0 or within 1e-100"),
        ({"comm": -1.0}, "a time of -1 is not 0 or within"),
        ({"weight_grad": (1.0, float("nan"))}, "a time of nan is not 0 or within"),
    ],
)
def test_costs_that_make_no_sense_are_refused(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        replace(Costs.equal(2), **change)


def test_times_must_be_given_for_every_stage() -> None:
    with pytest.raises(ValueError, match="each of the 2 stages"):
        simulate(lower(build_schedule("1f1b", 2, 1)), [1], [1], [1])
