from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.errors import ScheduleError
from megalite.schedule.action import Action, Op, Plan
from megalite.schedule.generators import build_schedule
from megalite.schedule.lower import lower
from megalite.schedule.render import parse_text
from megalite.schedule.validate import check_compute, check_order, validate
from tests.schedule.plans import edited, random_plan


@pytest.fixture
def lowered() -> Plan:
    """1F1B on three ranks with four microbatches; valid."""
    plan = lower(build_schedule("1f1b", 3, 4))
    validate(plan)
    return plan


def test_an_error_shows_the_grid_with_the_place_in_brackets() -> None:
    plan = parse_text("rank 0: 0F0 0F1 0B0 0F2 0B1 0B2\nrank 1: 1B0 1F0 1F1 1B1 1F2 1B2")
    with pytest.raises(ScheduleError) as error:
        check_compute(plan)
    assert str(error.value) == (
        "rank 1, step 0: 1B0 needs 1F0 first\n"
        "rank 0:     0F0      0F1      0B0      0F2      0B1      0B2\n"
        "rank 1:    [1B0]     1F0      1F1      1B1      1F2      1B2"
    )


# (rank, a run of its actions, what it is replaced by, what the error says)
FAULTS = {
    "a doubled forward": (0, "0F3", "0F3 0F3", "0F3 repeats 0F3 of step"),
    "a missing backward": (2, "2B3", "", ": 2B3 is missing"),
    "a missing forward": (2, "2F3", "", "2B3 needs 2F3 first"),
    "a backward before its forward": (1, "1F3", "1B3 1F3", "1B3 needs 1F3 first"),
    "a backward and an input gradient": (2, "2B3", "2B3 2I3", "2I3 repeats 2B3"),
    "an input gradient without its weight's": (2, "2B3", "2I3", ": 2W3 is missing"),
    "a weight gradient before its input's": (2, "2B3", "2W3 2I3", "2W3 needs 2I3 first"),
    "an action of another rank": (1, "1F3", "1F3 0F3", "0F3 belongs to rank 0"),
    "a microbatch too many": (0, "0F3", "0F3 0F4", "0F4 does not exist among 3 stages and 4"),
    "a doubled send": (0, "0SEND_F1", "0SEND_F1 0SEND_F1", "0SEND_F1 repeats step"),
    "a receive that is not posted": (1, "1RECV_F2", "", "1F2 needs 1RECV_F2, which is missing"),
    "a third receive at once": (
        2,
        "2RECV_F1 2F0 2B0 2SEND_B0 2RECV_F2",
        "2RECV_F1 2RECV_F2 2F0 2B0 2SEND_B0",
        "2RECV_F2 makes 3 receives of the channel from rank 1 at once, where 2 suffice",
    ),
    "a receive posted after its taker": (
        1,
        "1RECV_B1 1B0 1SEND_B0 1WAIT_F0 1RECV_F3 1F2 1SEND_F2 1RECV_B2 1B1",
        "1B0 1SEND_B0 1WAIT_F0 1RECV_F3 1F2 1SEND_F2 1RECV_B2 1B1 1RECV_B1",
        "1B1 needs 1RECV_B1 first",
    ),
    "a send that is not posted": (0, "0SEND_F2", "", "0F2 needs 0SEND_F2, which is missing"),
    "a send before its message is made": (0, "0F2 0SEND_F2", "0SEND_F2 0F2", "needs 0F2 first"),
    "a send nobody waits for": (2, "2WAIT_B3", "", "2SEND_B3 needs 2WAIT_B3, which is missing"),
    "a wait before its send": (
        2,
        "2SEND_B3 2REDUCE 2WAIT_B2 2WAIT_B3",
        "2WAIT_B3 2SEND_B3 2REDUCE 2WAIT_B2",
        "2WAIT_B3 needs 2SEND_B3 first",
    ),
    "a message that does not exist": (
        2,
        "2WAIT_B3",
        "2WAIT_B4",
        "2WAIT_B4 does not exist among 4 microbatches",
    ),
    "a message nobody needs": (2, "2F0", "2SEND_F0 2F0", "2SEND_F0 belongs to no message"),
    "two receives swapped": (
        1,
        "1RECV_F0 1RECV_F1",
        "1RECV_F1 1RECV_F0",
        "rank 1, step 0: 1RECV_F1 is posted for message 0 of its channel from rank 0, "
        "which is 0SEND_F0",
    ),
    "a reduction before the last gradient": (
        1,
        "1B3 1SEND_B3 1WAIT_F3 1REDUCE",
        "1REDUCE 1B3 1SEND_B3 1WAIT_F3",
        "1REDUCE needs 1B3 first",
    ),
    "no reduction": (1, "1REDUCE", "", "no 1REDUCE follows 1B3"),
    "two reductions": (1, "1REDUCE", "1REDUCE 1REDUCE", "1REDUCE repeats step"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_named(lowered: Plan, fault: str) -> None:
    rank, before, after, message = FAULTS[fault]
    with pytest.raises(ScheduleError) as error:
        validate(edited(lowered, rank, before, after))
    first, *grid = str(error.value).splitlines()
    assert message in first and first.startswith(f"rank {rank}, step ")
    assert "[" in grid[rank] and len(grid) == 3


def test_a_circle_of_computations_is_reported_with_who_waits_for_what() -> None:
    plan = parse_text("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1F1 1B0 1B1\nrank 2: 2F0 2B0 2F1 2B1")
    with pytest.raises(ScheduleError) as error:
        validate(lower(plan))
    first, *grid = str(error.value).splitlines()
    assert first.startswith("dead-lock: rank 0, step 4: 0B0 waits for rank 1 to reach 1SEND_B0; ")
    assert "1F1 waits for rank 0 to reach 0SEND_F1" in first and "rank 2" not in first
    assert "[0B0]" in grid[0] and "[1F1]" in grid[1] and "[" not in grid[2]


@pytest.mark.parametrize(
    ("rows", "place", "cells"),
    [
        ("0F0 0F1 0B0|1F0 1B0 1F1 1B1", "rank 0, step 3: 0B1", "0F0 0F1 0B0 [0B1]"),
        ("0F0 0F1 0B1|1F0 1B0 1F1 1B1", "rank 0, step 1: 0B0", "0F0 [0B0] 0F1 0B1"),
        ("0F0 0F1 0I0 0I1 0W1|1F0 1B0 1F1 1B1", "rank 0, step 3: 0W0", "0F0 0F1 0I0 [0W0] 0I1 0W1"),
        ("0F0 0B0|1F0 1B0 1F1 1B1", "rank 0, step 1: 0F1", "0F0 [0F1] 0B0"),
        ("|1F0 1B0 1F1 1B1", "rank 0, step 0: 0F0", "[0F0]"),
    ],
)
def test_what_is_missing_is_shown_where_it_could_stand(rows: str, place: str, cells: str) -> None:
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows.split("|"))
    with pytest.raises(ScheduleError) as error:
        check_compute(Plan("wrong", 2, (0, 1), actions))
    first, *grid = str(error.value).splitlines()
    assert first == f"{place} is missing" and grid[0].split()[2:] == cells.split()


def test_the_steps_of_a_lowered_plan_are_its_own() -> None:
    """Not those of the list without its messages."""
    with pytest.raises(ScheduleError) as error:
        validate(edited(lower(build_schedule("1f1b", 2, 2)), 1, "1B1", "1B0"))
    first, *grid = str(error.value).splitlines()
    step = int(first.split("step ")[1].split(":")[0])
    assert "RECV" in grid[1] and step > 4 and "[1B0]" in grid[1]


def test_a_plan_without_any_backward_is_not_one_for_training() -> None:
    whole = lower(build_schedule("1f1b", 2, 2))
    kept = (Op.FORWARD, Op.SEND_F, Op.RECV_F, Op.WAIT_F)
    half = whole.replace((a for a in actions if a.op in kept) for actions in whole.actions)
    validate(half)
    validate(whole, trains=True)
    with pytest.raises(ScheduleError, match="nothing would be learned"):
        validate(half, trains=True)


@pytest.mark.parametrize(
    "plan", [Plan("none", 1, (), ()), Plan("none", 0, (0,), ((),)), Plan("none", 1, (), ((),))]
)
def test_a_plan_of_nothing_is_refused(plan: Plan) -> None:
    with pytest.raises(ScheduleError, match="nothing to run"):
        validate(plan)
    with pytest.raises(ScheduleError, match="nothing to run"):
        check_compute(plan)


def test_a_circle_is_found_in_computations_alone() -> None:
    plan = parse_text("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1F1 1B0 1B1\nrank 2: 2F0 2B0 2F1 2B1")
    with pytest.raises(ScheduleError) as error:
        check_order(plan)
    first, *grid = str(error.value).splitlines()
    assert first == (
        "dead-lock: rank 0, step 1: 0B0 waits for rank 1 to reach 1B0; "
        "rank 1, step 1: 1F1 waits for rank 0 to reach 0F1"
    )
    assert "[0B0]" in grid[0] and "[1F1]" in grid[1] and "[" not in grid[2]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(0, 1), (0, 1, 1, 0), (0, 1, 2, 0, 1, 2)]))
def test_a_circle_is_found_where_the_simulation_stops(seed: int, rank_of: tuple[int, ...]) -> None:
    """In two executions' lists mixed, of which many cannot be run."""
    plan, other = random_plan(seed, rank_of, 3), random_plan(seed + 1, rank_of, 3)
    mixed = plan.replace([other[0], *plan.actions[1:]])
    try:
        check_compute(mixed)
        validate(lower(mixed))
    except ScheduleError as error:
        if "dead-lock" not in str(error):
            return
        with pytest.raises(ScheduleError, match="dead-lock"):
            check_order(mixed)
    else:
        check_order(mixed)


def test_a_wrong_placement_is_refused() -> None:
    good = build_schedule("1f1b", 2, 1)
    with pytest.raises(ScheduleError, match="there are 2 lists"):
        check_compute(Plan("wrong", 1, (0, 5), good.actions))
