from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.errors import ConfigError
from megalite.schedule import search
from megalite.schedule.action import Plan
from megalite.schedule.costs import Costs, MemoryLimit
from megalite.schedule.generators import SCHEDULES, build_schedule
from megalite.schedule.lower import lower
from megalite.schedule.peaks import peak_memory
from megalite.schedule.simulate import Timeline, simulate_step
from megalite.schedule.validate import validate
from tests.schedule.published import PROFILED, Profiled


def timed(plan: Plan, costs: Costs) -> tuple[Timeline, float]:
    """The timeline and the most microbatches in flight on a rank."""
    lowered = lower(plan)
    return simulate_step(lowered, costs), max(validate(lowered).peak_in_flight)


def all_costs(num_stages: int) -> st.SearchStrategy[Costs]:
    times = st.lists(st.floats(0.1, 3), min_size=num_stages, max_size=num_stages).map(tuple)
    return st.builds(Costs, times, times, times, st.sampled_from([0.0, 0.05, 0.5, 2.0]))


@settings(max_examples=30)
@given(
    st.data(),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from([1, 1.5, 2, 3, 4, 8, inf]),
)
def test_auto_is_never_behind_a_named_schedule_that_keeps_the_limit(
    data: st.DataObject, pp: int, m: int, v: int, units: float
) -> None:
    costs = data.draw(all_costs(pp * v))
    timeline, peak = timed(build_schedule("auto", pp, m, v, costs, MemoryLimit(units)), costs)
    assert peak <= units + 1e-9
    for name, schedule in SCHEDULES.items():
        if name != "auto" and schedule.allows(v):
            other, other_peak = timed(build_schedule(name, pp, m, v), costs)
            if other_peak <= units:
                assert timeline.makespan <= other.makespan * (1 + 1e-8), name


def test_it_is_ahead_where_times_are_not_those_that_the_named_ones_are_made_for() -> None:
    costs = Costs.equal(4, 1, 2.0, 2.0, 1.0, 0.1)
    named = [
        timed(build_schedule(name, 4, 16), costs)[0].span_bubble_fraction
        for name in ("1f1b", "zb_h1", "zb_h2")
    ]
    timeline, _ = timed(build_schedule("auto", 4, 16, 1, costs), costs)
    assert timeline.span_bubble_fraction < min(named) - 0.03


@pytest.mark.parametrize("row", PROFILED, ids=str)
@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1", "zb_h2", "interleaved"])
def test_the_simulator_gives_the_published_bubbles(row: Profiled, name: str) -> None:
    schedule = {"one_f_one_b": "1f1b", "interleaved": "interleaved_1f1b"}.get(name, name)
    chunks, tolerance = (row.chunks, 0.004) if name == "interleaved" else (1, 0.0005)
    plan = build_schedule(schedule, row.pp, row.num_microbatches, chunks)
    timeline = simulate_step(lower(plan), row.costs(chunks))
    assert timeline.span_bubble_fraction == pytest.approx(getattr(row, name), abs=tolerance)


QUICK = ("1.5B-24", "6.2B-24")


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[] if str(row) in QUICK else pytest.mark.full, id=str(row))
        for row in PROFILED
    ],
)
def test_auto_reaches_zb_1p_and_zb_2p(row: Profiled) -> None:
    """There, what is left of an activation between I and W counts half of it."""
    costs = row.costs()
    bubbles = []
    for units in (row.pp, 2 * row.pp, inf):
        plan = build_schedule(
            "auto", row.pp, row.num_microbatches, 1, costs, MemoryLimit(units, open_w=0.5)
        )
        bubbles.append(simulate_step(lower(plan), costs).span_bubble_fraction)
    assert bubbles[0] <= row.zb_1p + 0.001
    assert max(bubbles[1:]) <= row.zb_2p + 0.001
    assert bubbles[0] == pytest.approx(row.zb_1p, abs=0.001)  # nothing better is possible


def test_whole_activations_until_w_bound_what_twice_the_memory_can_gain() -> None:
    """The last rank must do W to make room, so the last I comes late to rank 0."""
    row = next(row for row in PROFILED if row.model == "6.2B")
    f, i, w, comm = row.times
    m, pp, units = row.num_microbatches, row.pp, 2 * row.pp
    last_i = (pp - 1) * (f + i + 2 * comm) + m * (f + i) + (m - units) * w
    least = 1 - m * (f + i + w) / (last_i + w)
    plan = build_schedule("auto", pp, m, 1, row.costs(), MemoryLimit(units))
    bubble = simulate_step(lower(plan), row.costs()).span_bubble_fraction
    assert row.zb_2p + 0.05 < least <= bubble <= least + 0.001


@pytest.mark.parametrize("v", [1, 2, 3])
def test_the_same_plan_is_found_each_time(v: int) -> None:
    costs = Costs.equal(3, v, 1.3, 1.1, 0.7, 0.2)
    plans = [build_schedule("auto", 3, 7, v, costs, MemoryLimit(4)) for _ in range(2)]
    assert plans[0] == plans[1] and plans[0].name == "auto"


def test_memory_buys_time() -> None:
    costs = Costs.equal(4, 2, 1.0, 1.2, 0.8, 0.3)
    makespans = [
        timed(build_schedule("auto", 4, 12, 2, costs, MemoryLimit(units)), costs)[0].makespan
        for units in (1, 2, 3, 4, 8)
    ]
    assert makespans == sorted(makespans, reverse=True) and makespans[-1] < 0.5 * makespans[0]


@settings(max_examples=20, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 7), st.integers(1, 3))
def test_more_memory_never_makes_it_slower(data: st.DataObject, pp: int, m: int, v: int) -> None:
    costs = data.draw(all_costs(pp * v))
    open_w = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    limits = data.draw(st.lists(st.floats(1, 2 * pp + 1), min_size=2, max_size=4).map(sorted))
    makespans = []
    for units in limits:
        plan = build_schedule("auto", pp, m, v, costs, MemoryLimit(units, open_w))
        share = [1 / v] * (pp * v)
        assert max(peak_memory(plan, share, [open_w / v] * (pp * v))) <= units + 1e-9
        makespans.append(timed(plan, costs)[0].makespan)
    for less, more in pairwise(makespans):
        assert more <= less * (1 + 2e-9)


@pytest.mark.parametrize(
    ("pp", "m", "v", "comm", "units", "most"),
    [
        (8, 6, 3, 0.0, (3, 4), 45),
        (4, 3, 3, 0.0, (1.5, 2), 19),
        (3, 9, 2, 0.0, (1.5, 2), 50),
        (2, 14, 1, 20.0, (3, 4), 310),
    ],
)
def test_where_few_orders_fit_a_little_memory_still_buys_time(
    pp: int, m: int, v: int, comm: float, units: tuple[float, float], most: float
) -> None:
    """One microbatch at a time would take three times as long."""
    costs = Costs.equal(pp, v, comm=comm)
    less, more = (
        timed(build_schedule("auto", pp, m, v, costs, MemoryLimit(u)), costs)[0].makespan
        for u in units
    )
    assert more <= less <= most


def test_the_ladder_starts_at_one_microbatch_and_does_not_end_below_all() -> None:
    for pp, m, v in ((1, 1, 1), (3, 5, 2), (8, 64, 2), (32, 128, 2)):
        limits, effort = zip(*search._ladder(pp, m, v), strict=True)
        assert limits[0] == v and limits[-1] == m * v and list(limits) == sorted(set(limits))
        assert min(effort) > 0 and sum(effort) <= search.EFFORT * (1 + 1e-9)
        assert min(pp, m) * v in limits


def test_the_unit_of_time_does_not_matter() -> None:
    for unit in (1e-90, 1e90):
        costs = Costs.equal(3, 2, 1.3 * unit, 1.1 * unit, 0.7 * unit, 0.2 * unit)
        found = build_schedule("auto", 3, 7, 2, costs, MemoryLimit(3))
        same = Costs.equal(3, 2, 1.3, 1.1, 0.7, 0.2)
        mine = simulate_step(lower(found), same).makespan
        other = build_schedule("auto", 3, 7, 2, same, MemoryLimit(3))
        assert mine == pytest.approx(simulate_step(lower(other), same).makespan)


def test_a_limit_that_is_none_is_refused() -> None:
    for units in (float("nan"), -1.0):
        with pytest.raises(ValueError, match="no limit of memory"):
            MemoryLimit(units)


@pytest.mark.parametrize("v", [1, 2, 3])
def test_one_microbatch_is_enough_memory_and_less_is_none(v: int) -> None:
    plan = build_schedule("auto", 3, 5, v, memory=MemoryLimit(1))
    assert max(validate(lower(plan)).peak_in_flight) == 1
    with pytest.raises(ConfigError, match=r"allowed 0\.5 microbatches.*Allow at least 1"):
        build_schedule("auto", 3, 5, v, memory=MemoryLimit(0.5))


def test_without_effort_the_best_named_schedule_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "EFFORT", 0)
    costs = Costs.equal(4, 2)
    timeline, peak = timed(build_schedule("auto", 4, 16, 2, costs), costs)
    assert timeline.makespan == 49.5 and peak == 4


def test_without_effort_and_memory_it_is_one_microbatch_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "EFFORT", 0)
    costs = Costs.equal(3, 2)
    timeline, peak = timed(build_schedule("auto", 3, 5, 2, costs, MemoryLimit(1)), costs)
    assert peak == 1 and timeline.makespan <= 5 * 9


def test_messages_of_a_channel_are_taken_as_they_are_sent() -> None:
    """So that two receive buffers a channel suffice, whatever is found."""
    for v in (1, 2, 3):
        costs = Costs.equal(4, v, 1.0, 1.1, 0.6, 0.4)
        report = validate(lower(build_schedule("auto", 4, 11, v, costs)))
        assert max(n for peaks in report.peak_receives for n in peaks.values()) <= 2
