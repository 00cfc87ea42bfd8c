from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.schedule.action import Action, Op, Plan
from megalite.schedule.costs import Costs
from megalite.schedule.fill import Filled, fill
from megalite.schedule.lower import lower
from megalite.schedule.render import parse_text
from megalite.schedule.simulate import simulate_step
from megalite.schedule.validate import validate
from tests.schedule.plans import random_plan


def filled(text: str, costs: Costs, limit: float = 99, **options: float) -> Filled | None:
    plan = parse_text(text)
    return fill(plan.actions, plan.rank_of, plan.num_microbatches, costs, limit, **options)


def row(found: Filled | None, rank: int) -> str:
    assert found is not None
    return " ".join(map(str, found.actions[rank]))


TWO = "rank 0: 0F0 0F1 0I0 0I1\nrank 1: 1F0 1I0 1F1 1I1"


def test_w_fills_the_waits_and_the_end() -> None:
    found = filled("rank 0: 0F0 0I0 0F1 0I1\nrank 1: 1F0 1I0 1F1 1I1", Costs.equal(2))
    assert row(found, 0) == "0F0 0I0 0F1 0W0 0I1 0W1"
    assert row(found, 1) == "1F0 1I0 1W0 1F1 1I1 1W1"
    assert found is not None and (found.makespan, found.span, found.peak) == (9, 9, 2)


@pytest.mark.parametrize(("threshold", "placed"), [(1.0, "1F1 1I1 1W0"), (0.5, "1W0 1F1 1I1")])
def test_the_threshold_says_how_much_of_w_must_fit_into_a_wait(
    threshold: float, placed: str
) -> None:
    """Rank 1 waits 2 for its second F; W takes 3."""
    costs = Costs((4.0, 1.0), (1.0, 1.0), (3.0, 3.0))
    found = filled(TWO, costs, threshold=threshold)
    assert row(found, 1) == f"1F0 1I0 {placed} 1W1"


def test_an_f_beyond_the_limit_waits_for_a_w() -> None:
    text = "rank 0: 0F0 0F1 0I0 0F2 0I1 0I2\nrank 1: 1F0 1I0 1F1 1I1 1F2 1I2"
    assert "1I1 1F2" in row(filled(text, Costs.equal(2)), 1)
    held = filled(text, Costs.equal(2), limit=2)
    assert held is not None and held.peak == 2 and "0I0 0W0 0F2" in row(held, 0)
    half = filled(text, Costs.equal(2), limit=2.5, open_w=0.5)
    assert half is not None and half.peak == 2.5 and "0I0 0F2" in row(half, 0)


def test_no_memory_for_the_order_is_none() -> None:
    assert filled(TWO, Costs.equal(2), limit=1) is None


def test_an_order_that_dead_locks_is_none() -> None:
    crossed = "rank 0: 0F0 0I0 0F1 0I1\nrank 1: 1F0 1F1 1I0 1I1"
    assert filled(crossed, Costs.equal(2)) is None
    assert filled("rank 0: 0F0 0I0\nrank 1: 1I0 1F0", Costs.equal(2)) is None


@settings(max_examples=60)
@given(
    st.integers(0, 10**9),
    st.sampled_from([(0, 1, 2), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0), (0,)]),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.3]),
)
def test_a_plan_with_its_w_is_timed_as_the_simulator_does_or_earlier(
    seed: int, rank_of: tuple[int, ...], num_microbatches: int, comm: float
) -> None:
    plan = random_plan(seed, rank_of, num_microbatches)
    times = tuple(1 + (seed >> s) % 7 / 3 for s in range(len(rank_of)))
    costs = Costs(times, times[::-1], times, comm)
    found = fill(plan.actions, rank_of, num_microbatches, costs, 99)
    timeline = simulate_step(lower(plan), costs)
    assert found is not None and found.actions == plan.actions
    assert found.makespan <= timeline.makespan + 1e-9
    if not comm:
        assert found.makespan == pytest.approx(timeline.makespan)
        assert found.span == pytest.approx(timeline.longest_span)


@settings(max_examples=60)
@given(st.integers(0, 10**9), st.integers(1, 6), st.sampled_from([0.0, 0.5, 1.0]))
def test_whatever_is_filled_is_proven(seed: int, num_microbatches: int, threshold: float) -> None:
    rank_of = (0, 1, 2, 2, 1, 0)
    plan = random_plan(seed, rank_of, num_microbatches)
    orders = [
        [
            Action(Op.INPUT_GRAD, a.stage, a.microbatch) if a.op is Op.BACKWARD else a
            for a in actions
            if a.op is not Op.WEIGHT_GRAD
        ]
        for actions in plan.actions
    ]
    costs = Costs.equal(3, 2, 1.0, 1.5, 0.5, 0.1)
    found = fill(orders, rank_of, num_microbatches, costs, 99, threshold=threshold)
    assert found is not None
    report = validate(lower(Plan("filled", num_microbatches, rank_of, found.actions)))
    assert max(report.peak_chunks) == found.peak
