from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.planner.pipeline import least_held, peaks, run
from megalite.schedule.costs import Costs
from megalite.schedule.generators import build_schedule
from megalite.schedule.lower import lower
from megalite.schedule.peaks import peak_memory
from megalite.schedule.simulate import simulate_step

WAYS = {
    "1f1b": 1,
    "interleaved_1f1b": 3,
    "zb_h1": 1,
    "zb_h2": 1,
    "zb_v": 2,
    "v_half": 2,
    "v_min": 2,
    "dualpipe_v": 2,
    "gpipe": 1,
    "looped_bfs": 2,
}
TIME = st.floats(0.5, 2.0)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(sorted(WAYS)),
    st.integers(2, 5),
    st.integers(20, 60),
    TIME,
    TIME,
    TIME,
    st.sampled_from([0.0]) | st.floats(0.01, 0.4),
    st.lists(st.sampled_from([0.0, 0.0, 1.0, 0.5]), min_size=2, max_size=2),
)
def test_a_long_plan_by_its_repetition_is_the_plan_simulated(
    schedule: str,
    pp: int,
    microbatches: int,
    f: float,
    i: float,
    w: float,
    comm: float,
    ends: list[float],
) -> None:
    v = WAYS[schedule]
    first, last = ends
    extra = [first, *[0.0] * (pp * v - 2), last]
    times = [tuple(t * (1 + e) for e in extra) for t in (f, i, w)]
    costs = Costs(*times, comm, tuple([0.1] * pp * v))
    whole = simulate_step(lower(build_schedule(schedule, pp, microbatches, v)), costs)
    found = run(schedule, pp, microbatches, v, costs, most=0)
    assert found.makespan == pytest.approx(whole.makespan, rel=1e-8)
    assert found.busy == pytest.approx(whole.busy, rel=1e-8)


def test_repetition_is_used_where_it_saves_and_only_there() -> None:
    costs = Costs.equal(4, 1, 1.0, 1.0, 1.0, 0.1)
    assert not run("1f1b", 4, 4000, 1, costs).exact
    assert run("1f1b", 4, 40, 1, costs).exact
    assert run("1f1b", 4, 13, 1, costs, most=0).exact


@pytest.mark.parametrize("schedule", sorted(WAYS))
@pytest.mark.parametrize(("pp", "m"), [(4, 60), (5, 23), (7, 48), (6, 11), (3, 2)])
def test_the_peak_of_a_long_plan_is_that_of_its_first_rounds(
    schedule: str, pp: int, m: int
) -> None:
    v = WAYS[schedule]
    activation = tuple(1.0 + 0.1 * (7 * s % 5) for s in range(pp * v))
    open_w = tuple(0.6 * a for a in activation)
    whole = peak_memory(build_schedule(schedule, pp, m, v), activation, open_w)
    assert peaks(schedule, pp, m, v, activation, open_w) == pytest.approx(whole)
    least = v * min(activation) * least_held(schedule, pp, m)
    assert 0 < least <= max(whole)
