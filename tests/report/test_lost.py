"""Causes of lost time, on steps made by the simulator: what was put in is what comes out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.report.lost import CAUSES, Lost, Measured, lost_time, replay
from megalite.schedule.action import COMPUTE, Op, Plan
from megalite.schedule.generators import build_schedule
from megalite.schedule.lower import lower
from megalite.schedule.simulate import simulate

PP, M = 4, 8
PLAN = lower(build_schedule("1f1b", PP, M, 1))


def step(plan: Plan, slow: dict[int, float] | None = None, comm_s: float = 0.0) -> Measured:
    """A step as the simulator runs it: F takes 1 and B 2, times ``slow`` in some stages."""
    forward = [(slow or {}).get(s, 1.0) for s in range(plan.num_stages)]
    timeline = simulate(plan, forward, forward, forward, comm_s)
    reached = [[0.0, *ends[:-1]] for ends in timeline.end]
    return Measured(
        plan, 0.0, timeline.makespan, reached, timeline.start, timeline.end, [[]] * plan.pp
    )


def causes(lost: Lost) -> dict[str, float]:
    return {cause: lost.total(cause) for cause in CAUSES}


def test_even_stages_lose_the_bubble_of_the_schedule() -> None:
    lost = lost_time(step(PLAN))
    # Narayanan et al. 2021: (p - 1) (F + B) on each rank.
    assert lost.causes == [dict.fromkeys(CAUSES, 0.0) | {"warm-up and drain": (PP - 1) * 3.0}] * PP
    assert lost.late == []
    assert lost.stage_s == [3.0] * PP


def test_the_plan_is_drawn_as_the_simulator_runs_it() -> None:
    for name, chunks in (("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2)):
        plan = lower(build_schedule(name, PP, M, chunks))
        ones = [1.0] * plan.num_stages
        timeline = simulate(plan, ones, ones, ones)
        cost = [
            [{Op.FORWARD: 1.0, Op.BACKWARD: 2.0}.get(a.op, 0.0) for a in r] for r in plan.actions
        ]
        starts, ends = replay(plan, cost, {})
        for rank, actions in enumerate(plan.actions):
            for i, a in enumerate(actions):
                if a.op in COMPUTE:
                    assert starts[rank][i] == timeline.start[rank][i]
                    assert ends[rank][i] == timeline.end[rank][i]


def test_a_slow_stage_is_imbalance_on_the_others() -> None:
    lost = lost_time(step(PLAN, {2: 1.5}))
    found = causes(lost)
    assert found["communication"] == found["data parallel"] == found["other"] == 0
    assert lost.causes[2]["imbalance"] == 0
    assert all(lost.causes[r]["imbalance"] > 0 for r in (0, 1, 3))
    # The others compute 8 x 1.5 less; a part of that is warm-up and drain of longer stages.
    bubble = (PP - 1) * 3.0 * 4.5 / 4
    assert lost.causes[0]["imbalance"] == pytest.approx(lost.step_s - M * 3.0 - bubble)
    assert lost.stage_s == [3.0, 3.0, 4.5, 3.0]


def test_messages_that_take_time_are_communication_and_name_their_channel() -> None:
    even, late = lost_time(step(PLAN)), lost_time(step(PLAN, comm_s=0.5))
    found = causes(late)
    assert found["warm-up and drain"] == causes(even)["warm-up and drain"]
    assert found["imbalance"] == found["data parallel"] == found["other"] == 0
    assert found["communication"] == pytest.approx(PP * (late.step_s - even.step_s))
    assert {(c.sender, c.receiver) for c in late.late} <= {
        (a, a + d) for a in range(PP) for d in (1, -1)
    }
    assert late.late[0].wait_s >= late.late[-1].wait_s > 0


def with_tail(m: Measured, tails: dict[int, tuple[str, float, float]], end: float) -> Measured:
    reductions = [[tails[r]] if r in tails else [] for r in range(m.plan.pp)]
    return replace(m, reductions=reductions, end=end)


def test_reductions_count_as_far_as_they_make_the_step_longer() -> None:
    m = step(PLAN)
    # Rank 0 ends last: on rank 3, which ends 6 before it, a sum of 5 is for free.
    free = with_tail(m, {3: ("dp", m.end - 6, m.end - 1)}, m.end)
    assert causes(lost_time(free))["data parallel"] == 0
    tail = with_tail(m, {0: ("dp", m.end, m.end + 2)}, m.end + 3)
    found = causes(lost_time(tail))
    assert found["data parallel"] == pytest.approx(PP * 2.0)
    assert found["other"] == pytest.approx(PP * 1.0)
    # A tied sum begins when its second rank comes: the wait of the first is drain.
    tied = with_tail(m, {0: ("tie", m.end, m.end + 1), 3: ("tie", m.end - 6, m.end + 1)}, m.end + 1)
    assert causes(lost_time(tied))["data parallel"] == pytest.approx(PP * 1.0)
    assert causes(lost_time(tied))["warm-up and drain"] == pytest.approx(PP * (PP - 1) * 3.0)


def test_all_else_is_other() -> None:
    m = step(PLAN)
    found = causes(lost_time(replace(m, begin=-2.0, end=m.end + 1)))
    assert found["other"] == pytest.approx(PP * 3.0)


def shift(rows: Any, by: list[float]) -> list[list[float]]:
    return [[t + d for t in row] for row, d in zip(rows, by, strict=True)]


@given(data=st.data())
def test_causes_of_any_step_are_positive_and_sum_up_to_the_idle_time(data: st.DataObject) -> None:
    pp, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    schedule = data.draw(st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b"]))
    chunks = data.draw(st.integers(1, 2)) if schedule == "interleaved_1f1b" and pp > 1 else 1
    plan = lower(build_schedule(schedule, pp, m, chunks))
    time = st.floats(0.1, 5.0)
    slow = {s: data.draw(time) for s in range(plan.num_stages)}
    measured = step(plan, slow, data.draw(st.just(0.0) | st.floats(1e-6, 3.0)))
    # Clocks that are not exactly alike must not break it.
    skew = [data.draw(st.floats(0, 0.5)) for _ in range(pp)]
    measured = replace(
        measured,
        reached=shift(measured.reached, skew),
        started=shift(measured.started, skew),
        ended=shift(measured.ended, skew),
        end=measured.end + max(skew) + data.draw(st.floats(0, 1)),
    )
    lost = lost_time(measured)
    for found, busy in zip(lost.causes, lost.busy_s, strict=True):
        assert min(found.values()) >= -1e-9
        assert sum(found.values()) + busy == pytest.approx(lost.step_s)
    assert sum(map(lost.total, CAUSES)) == pytest.approx(lost.idle_s)
