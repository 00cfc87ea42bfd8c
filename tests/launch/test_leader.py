"""The leader's rounds, on a clock of our own."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from launch.leader import Leader, Limits, Plan

LIMITS = Limits(min_nodes=1, max_nodes=3, lost_s=15, last_call_s=10, join_s=60)


class Job:
    """Nodes that arrive and beat, and a leader that is asked all the time."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.leader, self.now, self.beats, self.slots = Leader(limits), 0.0, 0, 0
        self.alive: dict[int, dict[str, object]] = {}

    def arrive(self, name: str, order: int = 0, workers: int = 2, why: str = "") -> int:
        self.slots += 1
        told = {"name": name, "order": order, "num_workers": workers, "why": why}
        self.leader.arrive(self.slots, told, self.now)
        self.alive[self.slots] = {"stops": False, "left": None}
        return self.slots

    def says(self, slot: int, **words: object) -> None:
        self.alive[slot].update(words)

    def after(self, seconds: float) -> Plan:
        plan = self.leader.plan
        for _ in range(max(1, round(seconds / 0.5))):
            self.now += 0.5 if seconds else 0.0
            self.beats += 1
            for slot, words in self.alive.items():
                self.leader.hear(slot, json.dumps({"n": self.beats, **words}), self.now)
            plan = self.leader.decide(self.now)
        return plan

    def dies(self, slot: int) -> None:
        del self.alive[slot]


def full() -> tuple[Job, list[int]]:
    job = Job()
    slots = [job.arrive(f"n{i}", order=i) for i in range(3)]
    assert job.after(0).round == 1
    return job, slots


def test_a_full_job_begins_at_once_and_a_smaller_one_after_the_last_call() -> None:
    job = Job()
    job.arrive("a")
    assert job.after(9).round == 0
    plan = job.after(2)
    assert plan.round == 1 and plan.world_size == 2
    assert full()[0].leader.plan.world_size == 6


def test_ranks_follow_the_order_of_nodes_not_of_their_arrival() -> None:
    job = Job()
    last, first, middle = job.arrive("c", 2, 1), job.arrive("a", 0, 4), job.arrive("b", 1, 2)
    members = job.after(0).members
    assert [(m.slot, m.first_rank) for m in members] == [(first, 0), (middle, 4), (last, 6)]


def test_a_failure_on_one_node_breaks_the_round_and_all_meet_again_at_once() -> None:
    job, _ = full()
    assert job.leader.plan.why == ""
    job.arrive("n1", order=1, why="rank 2 failed")
    plan = job.after(0)
    assert plan.regroup == "hard" and plan.round == 1 and plan.why == ""
    job.arrive("n0", order=0)
    assert job.after(0).round == 1  # n2 still trains
    job.arrive("n2", order=2)
    plan = job.after(0)
    assert (plan.round, plan.regroup, plan.world_size) == (2, "", 6)
    assert plan.why == "rank 2 failed" and Plan.from_json(plan.to_json()) == plan


def test_a_lost_node_is_noticed_in_its_time_and_the_others_go_on_at_once() -> None:
    job, slots = full()
    job.dies(slots[2])
    assert job.after(14).regroup == ""
    assert job.after(2).regroup == "hard"
    job.arrive("n0", order=0)
    job.arrive("n1", order=1)
    plan = job.after(0)
    assert (plan.round, plan.world_size, plan.why) == (2, 4, "a node was lost")


def test_a_node_that_returns_is_let_in_after_a_checkpoint() -> None:
    job, slots = full()
    job.dies(slots[2])
    job.after(16)
    for i in (0, 1):
        job.arrive(f"n{i}", order=i)
    assert job.after(0).round == 2
    job.arrive("n2", order=2)
    assert job.after(0).regroup == "soft"
    job.arrive("n0", order=0)
    assert job.after(0).regroup == "hard"
    job.arrive("n1", order=1)
    plan = job.after(0)
    assert (plan.round, plan.world_size, plan.regroup) == (3, 6, "")
    assert plan.why == "a node has joined"


def test_a_node_that_starts_anew_replaces_itself_without_waiting_for_its_loss() -> None:
    job, slots = full()
    job.dies(slots[1])
    job.arrive("n1", order=1)
    assert job.after(0).regroup == "hard"
    job.arrive("n0", order=0)
    job.arrive("n2", order=2)
    plan = job.after(0)
    assert plan.world_size == 6 and plan.why == "the launcher of a node was started anew"


def test_a_job_of_all_its_nodes_waits_for_a_lost_one_and_gives_up_in_time() -> None:
    job = Job(Limits(2, 2, lost_s=15, join_s=60))
    slots = [job.arrive("n0"), job.arrive("n1", 1)]
    assert job.after(0).round == 1
    job.dies(slots[1])
    job.after(16)
    job.dies(slots[0])
    job.arrive("n0")
    assert job.after(50).ended is None
    ended = job.after(12).ended
    assert ended and ended[0] == 1 and "1 of at least 2 nodes" in ended[1]


def test_one_nodes_failure_ends_the_job_for_all_with_its_words() -> None:
    job, slots = full()
    job.says(slots[1], left=[1, "ValueError: first"])
    assert job.after(0).ended == (1, "ValueError: first")


def test_a_stop_is_told_to_all_and_ends_when_all_have_left() -> None:
    job, slots = full()
    job.says(slots[0], stops=True)
    assert job.after(0).exits and job.leader.plan.ended is None
    for slot in slots:
        assert job.leader.plan.ended is None
        job.says(slot, left=[75, ""])
        job.after(0)
    assert job.leader.plan.ended == (75, "")


def test_a_stop_before_the_first_round_ends_at_once() -> None:
    job = Job()
    job.says(job.arrive("a"), stops=True)
    assert job.after(0).ended == (75, "")


def test_no_node_is_let_in_while_the_job_stops() -> None:
    job, slots = full()
    job.dies(slots[2])
    job.after(16)
    slots = [job.arrive("n0"), job.arrive("n1", 1)]
    job.after(0)
    job.says(slots[0], stops=True)
    job.arrive("n2", 2)
    assert job.after(0).regroup == ""


EVENTS = st.sampled_from(["arrive", "die", "wait", "fail", "long"])


@given(st.lists(st.tuples(EVENTS, st.integers(0, 3)), max_size=30))
def test_whatever_happens_rounds_grow_and_hold_only_nodes_that_were_heard_of(
    events: list[tuple[str, int]],
) -> None:
    job, rounds = Job(), 0
    names: dict[int, int] = {}
    for event, node in events:
        if event in ("arrive", "fail"):
            if event == "fail" and node not in names:
                continue
            job.alive.pop(names.get(node, -1), None)
            names[node] = job.arrive(f"n{node}", node)
        elif event == "die" and node in names:
            job.alive.pop(names.pop(node), None)
        plan = job.after(20 if event == "long" else 1)
        assert plan.round >= rounds
        if plan.round > rounds:
            recent = {m.slot for m in plan.members}
            assert recent and len(recent) == len(plan.members) <= LIMITS.max_nodes
            firsts = [m.first_rank for m in plan.members]
            assert firsts == sorted(firsts) and plan == Plan.from_json(plan.to_json())
        rounds = plan.round
