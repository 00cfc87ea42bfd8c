from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.planner.earliest import Earliest
from megalite.schedule.costs import Costs
from megalite.schedule.generators import build_schedule
from megalite.schedule.lower import lower
from megalite.schedule.simulate import simulate_step
from tests.planner.test_pipeline import TIME, WAYS


def both(schedule: str, pp: int, microbatches: int, costs: Costs) -> tuple[float, float]:
    """The earliest end, and that of the lowered plan."""
    plan = build_schedule(schedule, pp, microbatches, WAYS[schedule])
    return Earliest(plan).run(costs), simulate_step(lower(plan), costs).makespan


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(WAYS)),
    st.integers(2, 5),
    st.integers(1, 14),
    st.lists(TIME, min_size=45, max_size=45),
    st.sampled_from([0.0, 0.01, 0.3, 3.0]),
    st.sampled_from([0.0, 0.5, 40.0]),
)
def test_no_lowered_plan_ends_earlier(
    schedule: str, pp: int, microbatches: int, times: list[float], comm: float, reduce: float
) -> None:
    n = pp * WAYS[schedule]
    f, i, w = (tuple(times[k * 15 : k * 15 + n]) for k in range(3))
    found, simulated = both(schedule, pp, microbatches, Costs(f, i, w, comm, (reduce,) * n))
    assert found <= simulated
    assert found > 0.5 * simulated


@pytest.mark.parametrize("schedule", sorted(WAYS))
def test_the_earliest_end_is_mostly_the_simulated_one(schedule: str) -> None:
    v = WAYS[schedule]
    costs = Costs.equal(4, v, 1.0, 1.0, 1.0, 0.01)
    found, simulated = both(schedule, 4, 16, costs)
    assert found == pytest.approx(simulated, rel=1e-3)
    slow = Costs.equal(4, v, 1.0, 1.2, 1.0, 0.01)
    assert both(schedule, 4, 16, slow)[0] > 1.03 * found
