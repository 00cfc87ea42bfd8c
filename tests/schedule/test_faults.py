"""Faults planted into every schedule at random places: each is found, named and marked."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.errors import ScheduleError
from megalite.schedule.action import Action, Op, Plan
from megalite.schedule.generators import SCHEDULES, build_schedule
from megalite.schedule.lower import lower
from megalite.schedule.validate import validate

NAMED = sorted(set(SCHEDULES) - {"auto"})
Rng = random.Random


def plans() -> st.SearchStrategy[Plan]:
    return st.builds(
        lambda name, pp, m, v: build_schedule(
            name, pp, m, v if SCHEDULES[name].allows(v) else SCHEDULES[name].fewest
        ),
        st.sampled_from(NAMED),
        st.integers(2, 5),
        st.integers(4, 9),
        st.integers(1, 3),
    )


def changed(plan: Plan, rank: int, actions: list[Action]) -> Plan:
    return plan.replace(actions if r == rank else plan[r] for r in range(plan.pp))


def some_action(plan: Plan, rng: Rng, ops: tuple[Op, ...]) -> tuple[int, int, Action]:
    places = [
        (rank, step, a)
        for rank, actions in enumerate(plan.actions)
        for step, a in enumerate(actions)
        if a.op in ops
    ]
    return rng.choice(places)


def refused(plan: Plan, *named: str) -> str:
    """The first line of the error, which must say each of these; the grid below has a mark."""
    with pytest.raises(ScheduleError) as error:
        validate(plan)
    first, *grid = str(error.value).splitlines()
    for name in named:
        assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", first), (name, first)
    assert "missing" in first or any("[" in row for row in grid)
    return first


@settings(max_examples=40)
@given(plans(), st.randoms(use_true_random=False))
def test_a_duplicated_action_is_named(plan: Plan, rng: Rng) -> None:
    lowered = lower(plan)
    rank, _, a = some_action(lowered, rng, tuple(Op))
    actions = list(lowered[rank])
    actions.insert(rng.randrange(len(actions) + 1), a)
    first = refused(changed(lowered, rank, actions))
    kin = [str(Action(op, a.stage, a.microbatch)) for op in Op if op is not Op.REDUCE]
    assert any(name in first for name in [str(a), *kin]) and f"rank {rank}" in first


@settings(max_examples=40)
@given(plans(), st.randoms(use_true_random=False))
def test_a_missing_action_is_named(plan: Plan, rng: Rng) -> None:
    lowered = lower(plan)
    rank, step, a = some_action(lowered, rng, tuple(Op))
    actions = [*lowered[rank][:step], *lowered[rank][step + 1 :]]
    assert f"rank {rank}" in refused(changed(lowered, rank, actions), str(a))


@settings(max_examples=40)
@given(plans(), st.randoms(use_true_random=False))
def test_swapped_messages_are_named(plan: Plan, rng: Rng) -> None:
    lowered = lower(plan)
    rank, _, a = some_action(lowered, rng, (Op.RECV_F, Op.RECV_B, Op.SEND_F, Op.SEND_B))
    actions = list(lowered[rank])
    at = [i for i, b in enumerate(actions) if b.op is a.op and b.stage == a.stage]
    one, other = sorted(rng.sample(at, 2))
    actions[one], actions[other] = actions[other], actions[one]
    names = str(actions[one]), str(actions[other])
    first = refused(changed(lowered, rank, actions))
    assert f"rank {rank}, step" in first and any(name in first for name in names)


@settings(max_examples=40)
@given(plans())
def test_a_cyclic_wait_is_named_all_round(plan: Plan) -> None:
    """Rank 0 makes the last microbatch's F wait for the gradient of the first, and rank 1 sends
    that gradient only after it has taken the last microbatch."""
    last = plan.num_microbatches - 1
    back = (Op.BACKWARD, Op.INPUT_GRAD)

    def after(actions: list[Action], moved: Action, anchor: Action) -> list[Action]:
        if actions.index(moved) > actions.index(anchor):
            return actions
        actions = [a for a in actions if a != moved]
        at = actions.index(anchor) + 1
        return [*actions[:at], moved, *actions[at:]]

    first_back = [
        next(a for a in plan[r] if a.op in back and (a.stage, a.microbatch) == (r, 0))
        for r in (0, 1)
    ]
    newest = [Action(Op.FORWARD, r, last) for r in (0, 1)]
    rank_0 = after(list(plan[0]), newest[0], first_back[0])
    rank_1 = [a for a in plan[1] if a != newest[1]]
    rank_1.insert(rank_1.index(first_back[1]), newest[1])
    lowered = lower(changed(changed(plan, 0, rank_0), 1, rank_1))
    first = refused(lowered)
    waits = [
        (int(rank), int(step), int(peer), Action.parse(post))
        for rank, step, peer, post in re.findall(
            r"rank (\d+), step (\d+): \w+ waits for rank (\d+) to reach (\w+)", first
        )
    ]
    assert first.startswith("dead-lock: ") and len(waits) >= 2
    for (_, _, peer, post), (rank, step, _, _) in zip(waits, waits[1:] + waits[:1], strict=True):
        assert peer == rank and lowered[rank].index(post) > step


@settings(max_examples=40)
@given(plans(), st.randoms(use_true_random=False))
def test_a_channel_without_a_buffer_is_named(plan: Plan, rng: Rng) -> None:
    lowered = lower(plan)
    rank, _, a = some_action(lowered, rng, (Op.RECV_F, Op.RECV_B))
    actions = [b for b in lowered[rank] if (b.op, b.stage) != (a.op, a.stage)]
    source = lowered.rank_of[a.stage + (-1 if a.op is Op.RECV_F else 1)]
    first = refused(changed(lowered, rank, actions))
    assert first.endswith(f"the channel from rank {source} has no receive buffer for its stage")


@settings(max_examples=40)
@given(plans(), st.randoms(use_true_random=False))
def test_a_buffer_for_every_microbatch_is_refused(plan: Plan, rng: Rng) -> None:
    lowered = lower(plan)
    rank, _, a = some_action(lowered, rng, (Op.RECV_F, Op.RECV_B))
    way = -1 if a.op is Op.RECV_F else 1
    source = lowered.rank_of[a.stage + way]
    posts = [b for b in lowered[rank] if b.op is a.op and lowered.rank_of[b.stage + way] == source]
    actions = [*posts, *(b for b in lowered[rank] if b not in posts)]
    first = refused(changed(lowered, rank, actions), f"rank {rank}", str(posts[2]))
    assert f"makes 3 receives of the channel from rank {source} at once, where 2 suffice" in first


@given(plans())
@settings(max_examples=30)
def test_without_a_fault_nothing_is_refused(plan: Plan) -> None:
    validate(lower(plan))
