from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.schedule.action import Plan
from megalite.schedule.costs import Costs
from megalite.schedule.generators import SCHEDULES, build_schedule
from megalite.schedule.lost_time import lost_time
from megalite.schedule.lower import lower
from megalite.schedule.simulate import simulate_step


@pytest.fixture
def lowered() -> Plan:
    return lower(build_schedule("1f1b", 4, 12))


def test_equal_stages_lose_warm_up_and_drain_only(lowered: Plan) -> None:
    for rank in lost_time(lowered, Costs.equal(4)):
        assert rank.warm_up_and_drain == 9 and rank.busy == 36
        assert (rank.imbalance, rank.communication, rank.data_parallel) == (0, 0, 0)


def test_a_slow_stage_is_imbalance_on_the_others(lowered: Plan) -> None:
    even = Costs.equal(4)
    slow = replace(even, forward=(1.0, 1.0, 2.0, 1.0), input_grad=(1.0, 1.0, 2.0, 1.0))
    lost = lost_time(lowered, slow)
    assert lost[2].imbalance == 0
    assert all(lost[rank].imbalance > 12 for rank in (0, 1, 3))
    assert all(rank.communication == rank.data_parallel == 0 for rank in lost)


def test_slow_messages_are_communication_on_all(lowered: Plan) -> None:
    costs = Costs.equal(4, comm=0.5)
    added = simulate_step(lowered, costs).makespan - 45
    for rank in lost_time(lowered, costs):
        assert rank.communication == pytest.approx(added) and added > 3
        assert rank.warm_up_and_drain == pytest.approx(9) and rank.imbalance == pytest.approx(0)


def test_reductions_that_computing_does_not_hide_are_data_parallel(lowered: Plan) -> None:
    costs = replace(Costs.equal(4), reduce=(5.0,) * 4)
    # Rank 0 ends last, at 45; its reduction follows.
    assert [rank.data_parallel for rank in lost_time(lowered, costs)] == [5.0] * 4
    assert lost_time(lowered, replace(costs, reduce=(0.0, 2.0, 4.0, 6.0)))[0].data_parallel == 0


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(set(SCHEDULES) - {"auto"})),
    st.integers(1, 4),
    st.integers(1, 7),
    st.data(),
)
def test_the_causes_add_up_to_the_idle_time_and_none_is_negative(
    name: str, pp: int, m: int, data: st.DataObject
) -> None:
    v = SCHEDULES[name].fewest
    times = st.lists(st.floats(0.1, 3), min_size=pp * v, max_size=pp * v).map(tuple)
    forward, input_grad, weight, reduce = (data.draw(times) for _ in range(4))
    comm, overlaps = data.draw(st.sampled_from([0.0, 0.4])), data.draw(st.booleans())
    costs = Costs(forward, input_grad, weight, comm, reduce, overlaps)
    plan = lower(build_schedule(name, pp, m, v))
    timeline = simulate_step(plan, costs)
    for rank, busy in zip(lost_time(plan, costs), timeline.busy, strict=True):
        assert rank.busy == busy
        assert rank.busy + rank.idle == pytest.approx(timeline.makespan)
        causes = (rank.warm_up_and_drain, rank.imbalance, rank.communication, rank.data_parallel)
        assert min(causes) >= -1e-9
