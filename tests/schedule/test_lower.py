from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.errors import ScheduleError
from megalite.schedule.action import COMPUTE, Action, Op, Plan
from megalite.schedule.generators import SCHEDULES, build_schedule, forward_only
from megalite.schedule.lower import lower
from megalite.schedule.render import parse_text
from megalite.schedule.simulate import simulate
from megalite.schedule.validate import validate
from tests.schedule.plans import random_plan

WAITS = (Op.WAIT_F, Op.WAIT_B)
RANK_OFS = [(0, 1, 2), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0), (0, 1, 2, 0, 1, 2), (0, 1, 1, 0, 2), (0,)]


def least_receives(plan: Plan) -> dict[tuple[int, int, str], int]:
    """For each channel (sender, receiver, kind), how many receives the two orders demand: those
    posted up to the message that is taken, less those taken before it."""
    made: dict[tuple[int, int, str], list[tuple[int, int]]] = defaultdict(list)
    taken: dict[tuple[int, int, str], list[tuple[int, int]]] = defaultdict(list)
    for rank, actions in enumerate(plan.actions):
        for a in actions:
            if a.op is Op.WEIGHT_GRAD:
                continue
            kind, way = ("F", 1) if a.op is Op.FORWARD else ("B", -1)
            if (to := plan.peer(a.stage, a.stage + way)) is not None:
                made[rank, to, kind].append((a.stage + way, a.microbatch))
            if (source := plan.peer(a.stage, a.stage - way)) is not None:
                taken[source, rank, kind].append((a.stage, a.microbatch))
    least = {}
    for channel, order in made.items():
        places = [order.index(x) for x in taken[channel]]
        least[channel] = max(max(places[: n + 1]) + 1 - n for n in range(len(places)))
    return least


def test_stages_on_one_rank_hand_over_without_a_message() -> None:
    plan = parse_text("rank 0: 0F0 3F0 3B0 0B0\nrank 1: 1F0 2F0 2B0 1B0")
    assert [str(a) for a in lower(plan)[1]] == (
        "1RECV_F0 2RECV_B0 1F0 2F0 2SEND_F0 2B0 2WAIT_F0 2REDUCE 1B0 1SEND_B0 1REDUCE 1WAIT_B0"
    ).split()
    assert [str(a) for a in lower(build_schedule("1f1b", 1, 2))[0]] == [
        "0F0",
        "0B0",
        "0F1",
        "0B1",
        "0REDUCE",
    ]


def test_a_split_backward_sends_after_i_and_reduces_after_the_last_w() -> None:
    plan = parse_text("rank 0: 0F0 0F1 0I0 0W0 0B1\nrank 1: 1F0 1I0 1F1 1I1 1W0 1W1")
    assert [str(a) for a in lower(plan)[1]] == (
        "1RECV_F0 1RECV_F1 1F0 1I0 1SEND_B0 1F1 1I1 1SEND_B1 1W0 1W1 1REDUCE 1WAIT_B0 1WAIT_B1"
    ).split()
    assert [str(a) for a in lower(plan)[0]][-2:] == ["0WAIT_F1", "0REDUCE"]


def test_receives_are_posted_in_the_senders_order_where_it_is_not_the_takers() -> None:
    plan = parse_text("rank 0: 0F0 0F1 0F2 0B1 0B0 0B2\nrank 1: 1F1 1F0 1F2 1B1 1B0 1B2")
    assert [str(a) for a in lower(plan)[1] if a.op in (Op.RECV_F, Op.FORWARD)] == (
        "1RECV_F0 1RECV_F1 1F1 1RECV_F2 1F0 1F2"
    ).split()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from(RANK_OFS), st.integers(1, 6))
def test_whatever_one_execution_did_is_proven_for_any_timing(
    seed: int, rank_of: tuple[int, ...], num_microbatches: int
) -> None:
    plan = random_plan(seed, rank_of, num_microbatches)
    lowered = lower(plan)
    report = validate(lowered)
    assert lowered.compute_only() == plan
    for (source, rank, kind), least in least_receives(plan).items():
        assert report.peak_receives[rank][source, kind] <= max(2, least)


def waits_that_block(plan: Plan, seed: int) -> list[Action]:
    """Waits before a rank's last computation that took time, under random times."""
    rng = random.Random(seed)
    forward, back, weight = ([rng.random() for _ in plan.rank_of] for _ in range(3))
    timeline = simulate(plan, forward, back, weight)
    found = []
    for actions, start, end in zip(plan.actions, timeline.start, timeline.end, strict=True):
        last = max(i for i, a in enumerate(actions) if a.op in COMPUTE)
        found += [
            actions[i] for i in range(last) if actions[i].op in WAITS and start[i] > end[i - 1]
        ]
    return found


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from(RANK_OFS), st.integers(1, 6))
def test_no_wait_for_a_send_ever_blocks_before_the_end(
    seed: int, rank_of: tuple[int, ...], num_microbatches: int
) -> None:
    assert waits_that_block(lower(random_plan(seed, rank_of, num_microbatches)), seed) == []


def test_a_wait_without_proof_does_block() -> None:
    lowered = lower(build_schedule("gpipe", 2, 4))
    at_once = lowered.replace(
        (b for a in actions if a.op not in WAITS for b in with_wait(a))
        for actions in lowered.actions
    )
    validate(at_once)
    assert waits_that_block(at_once, 3)


def with_wait(a: Action) -> list[Action]:
    wait = {Op.SEND_F: Op.WAIT_F, Op.SEND_B: Op.WAIT_B}.get(a.op)
    return [a] if wait is None else [a, Action(wait, a.stage, a.microbatch)]


def test_waiting_at_once_for_each_send_dead_locks() -> None:
    lowered = lower(build_schedule("looped_bfs", 3, 6, 2))
    validate(lowered)
    at_once = lowered.replace(
        (b for a in actions if a.op not in WAITS for b in with_wait(a))
        for actions in lowered.actions
    )
    with pytest.raises(ScheduleError, match=r"dead-lock: .*WAIT_F\d waits for rank"):
        validate(at_once)


def test_1f1b_proves_its_sends_one_by_one() -> None:
    few, many = (validate(lower(build_schedule("1f1b", 4, m))) for m in (8, 64))
    assert few.peak_unsent == many.peak_unsent
    assert max(many.peak_unsent) <= 5
    assert validate(lower(build_schedule("gpipe", 4, 64))).peak_unsent[1] >= 64


def test_evaluation_waits_for_a_send_two_sends_later() -> None:
    lowered = lower(forward_only((0, 1, 2), 5))
    assert [str(a) for a in lowered[0]] == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0WAIT_F0 0F3 0SEND_F3 0WAIT_F1 "
        "0F4 0SEND_F4 0WAIT_F2 0WAIT_F3 0WAIT_F4"
    ).split()
    assert not [a for actions in lowered.actions for a in actions if a.op is Op.REDUCE]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_two_receives_a_channel_suffice(name: str) -> None:
    schedule = SCHEDULES[name]
    v = 3 if schedule.chunks == "any" else schedule.fewest
    report = validate(lower(build_schedule(name, 4, 14, v)))
    assert max(n for peaks in report.peak_receives for n in peaks.values()) == 2


def test_an_incomplete_plan_is_not_lowered() -> None:
    with pytest.raises(ScheduleError, match="1B0 is missing"):
        lower(parse_text("rank 0: 0F0 0B0\nrank 1: 1F0"))
