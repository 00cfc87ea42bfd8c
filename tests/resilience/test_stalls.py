"""Who waits for whom, from invented places of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.mesh_shape import MeshShape
from megalite.place import Phase, Where
from megalite.resilience.stalls import (
    MOST_LINES,
    UNSEEN,
    Job,
    Seen,
    Stall,
    blockers,
    find,
    main_thread,
    waits_by_stack,
)
from megalite.schedule.action import Op

# tp 2 x pp 4, a stage a pipeline rank: ranks 0 and 1 have stage 0.
CUT = Job(MeshShape(tp=2, pp=4), (0, 1, 2, 3))
PIPE = Job(MeshShape(pp=4), (0, 1, 2, 3))
HERE = 'File "/src/megalite/x.py", line 1 in {}'


def acts(op: Op, stage: int, m: int, waits: bool = False, **options: object) -> Seen:
    where = Where(Phase.ACTIONS, op, waits, stage, m)
    return replace(Seen(7, where, 10 + m, 40.0), **options)  # type: ignore[arg-type]


def phase(phase: Phase, **options: object) -> Seen:
    return replace(Seen(7, Where(phase), 90, 40.0), **options)  # type: ignore[arg-type]


def found(job: Job, *seen: Seen, watchdog_s: float = 10.0) -> Stall | None:
    return find(job, dict(enumerate(seen)), lambda s: s.age_s > watchdog_s)


def test_the_rank_that_all_wait_for_is_named_first_in_the_pipelines_words() -> None:
    stall = found(
        PIPE,
        acts(Op.BACKWARD, 0, 0, True),
        acts(Op.WEIGHT_GRAD, 1, 3, age_s=41.0, state="T"),
        acts(Op.FORWARD, 2, 12, True),
        acts(Op.FORWARD, 3, 12, True),
    )
    assert stall is not None and stall.rank == 1
    first, *rest = stall.text.splitlines()
    assert first == (
        "step 7 stalls: rank 1 (stage 1) is in W of microbatch 3 since 41 s; "
        "its process is stopped (SIGSTOP) and cannot show its stack"
    )
    where = "which is in W of microbatch 3 since 41 s"
    assert rest == [
        f"  rank 0 (stage 0) waits for B of microbatch 0 from rank 1, {where}",
        f"  rank 2 (stage 2) waits for F of microbatch 12 from rank 1, {where}",
        "  rank 3 (stage 3) waits for F of microbatch 12 from rank 2",
    ]
    assert stall.fields["action"] == "W" and stall.fields["microbatch"] == 3


def test_virtual_stages_are_followed_to_the_ranks_that_have_them() -> None:
    job = Job(MeshShape(pp=2, dp=2), (0, 1, 1, 0))  # a V
    seen = {
        0: acts(Op.BACKWARD, 0, 1, True),
        1: acts(Op.FORWARD, 3, 1, True),
        2: acts(Op.INPUT_GRAD, 2, 1, True),
        3: acts(Op.FORWARD, 1, 1),
    }
    assert [blockers(job, seen, rank) for rank in range(4)] == [[2], [3], [0], []]
    seen[3] = acts(Op.WAIT_B, 1, 1)
    assert blockers(job, seen, 3) == [1]


def test_a_rank_that_is_slow_only_because_it_waits_is_no_stall() -> None:
    """And one whose sender is busy with an action of the usual length."""
    busy = acts(Op.FORWARD, 1, 3, age_s=0.2)
    waiting = [acts(Op.FORWARD, s, 3, True, age_s=300.0) for s in (2, 3)]
    assert found(PIPE, acts(Op.BACKWARD, 0, 0, True), busy, *waiting) is None
    assert found(PIPE, acts(Op.BACKWARD, 0, 0, True), replace(busy, age_s=300.0), *waiting)


@pytest.mark.parametrize("state", ["T", "Z", "X", UNSEEN])
def test_of_two_tp_ranks_in_one_action_the_one_that_cannot_run_is_named(state: str) -> None:
    waits = HERE.format("forward")
    for stuck in (0, 1):
        seen = [acts(Op.FORWARD, 0, 3, stack=waits) for _ in range(2)]
        seen[stuck] = replace(seen[stuck], state=state, stack="", unseen_s=44.0)
        stall = found(Job(MeshShape(tp=2), (0,)), *seen)
        assert stall is not None and stall.rank == stuck
        if state == UNSEEN:
            assert "last seen 44 s ago" in stall.text


@pytest.mark.parametrize("stuck", [0, 1])
def test_of_two_running_tp_ranks_the_one_outside_of_collectives_is_named(stuck: int) -> None:
    stacks = ['File "/x/torch/distributed/c.py", line 3 in all_reduce', HERE.format("spin")]
    seen = [acts(Op.FORWARD, 0, 3, stack=stacks[rank == stuck]) for rank in range(2)]
    stall = found(Job(MeshShape(tp=2), (0,)), *seen)
    assert stall is not None and stall.rank == stuck and "spin" in stall.stack


def test_a_tp_rank_that_is_behind_is_named_whatever_the_stacks_say() -> None:
    ahead, behind = acts(Op.BACKWARD, 0, 3), acts(Op.FORWARD, 0, 3, count=5)
    stall = found(Job(MeshShape(tp=2), (0,)), ahead, behind)
    assert stall is not None and stall.rank == 1
    assert "in B of microbatch 3 and waits for rank 1" not in stall.text.splitlines()[0]


def test_in_a_collective_of_all_the_rank_that_has_not_come_is_named() -> None:
    seen = [phase(Phase.TOTALS) for _ in range(8)]
    seen[3] = phase(Phase.REDUCTION, state="T")
    stall = found(CUT, *seen)
    assert stall is not None and stall.rank == 3
    assert stall.text.splitlines()[0].startswith(
        "step 7 stalls: rank 3 (stage 1, tp 1) is in the reduction of gradients since 40 s"
    )
    (rest,) = stall.text.splitlines()[1:]
    assert rest == "  ranks 0-2 and 4-7 are in the totals of the step and wait for rank 3"


def test_a_replica_that_is_a_step_behind_is_named() -> None:
    job = Job(MeshShape(dp=2), (0,))
    stall = found(job, acts(Op.FORWARD, 0, 0), phase(Phase.OPTIMIZER, step=6))
    assert stall is not None and stall.rank == 1


def test_a_lost_message_is_a_circle_of_ranks_that_wait() -> None:
    job = Job(MeshShape(pp=2), (0, 1))
    stall = found(job, acts(Op.BACKWARD, 0, 1, True), acts(Op.FORWARD, 1, 2, True))
    assert stall is not None and "wait for each other" in stall.text.splitlines()[0]
    fresh = acts(Op.FORWARD, 1, 2, True, age_s=1.0)
    assert found(job, acts(Op.BACKWARD, 0, 1, True), fresh) is None


def test_a_collective_in_which_nobody_is_behind_is_told_of_all() -> None:
    stack = 'File "/x/torch/distributed/c.py", line 3 in all_reduce'
    stall = found(PIPE, *[phase(Phase.TOTALS, stack=stack) for _ in range(4)])
    assert stall is not None and "the same holds for ranks 1-3" in stall.text


def test_a_report_of_many_ranks_stays_short() -> None:
    job = Job(MeshShape(tp=8, pp=16, dp=8), tuple(range(16)))
    seen = [acts(Op.FORWARD, job.stages(r)[0], r % 9, True) for r in range(1024)]
    seen[17] = acts(Op.FORWARD, job.stages(17)[0], 3, state="T")
    for rank in job.lines["tp"][17]:
        if rank != 17:
            seen[rank] = acts(Op.FORWARD, job.stages(17)[0], 3)
    stall = found(job, *seen)
    assert stall is not None and stall.rank == 17
    assert len(stall.text.splitlines()) <= MOST_LINES
    assert max(map(len, stall.text.splitlines())) < 250
    seen = [phase(Phase.TOTALS) if rank % 2 else s for rank, s in enumerate(seen)]
    seen[17] = phase(Phase.REDUCTION, state="T")
    stall = found(job, *seen)
    assert stall is not None and stall.rank == 17 and len(stall.text.splitlines()) <= MOST_LINES


def test_the_main_thread_of_a_stack_says_whether_it_waits() -> None:
    stack = (
        'Thread 0x1 (most recent call first):\n  File "/a/threading.py", line 5 in wait\n\n'
        'Current thread 0x2 (most recent call first):\n  File "/a/x.py", line 9 in step\n'
    )
    assert main_thread(stack).startswith("Current")
    assert waits_by_stack(stack, lambda file, line: "work.wait()")
    assert not waits_by_stack(stack, lambda file, line: "x = x + 1")
    assert not waits_by_stack("")
