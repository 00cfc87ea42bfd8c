"""Traces of real pipelines whose stages sleep: what was done to them is what the traces say."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megalite.report.lost import CAUSES
from megalite.report.measured import Traced, read_traces, traced
from megalite.report.step import sentences
from megalite.schedule.generators import build_schedule
from megalite.schedule.lower import lower
from megalite.trace import file_of, read_trace
from tests.pipeline.sleeping import Case, run_traced
from tests.ranks import run_ranks

EVEN = Case()
SLOW = Case(slow={2: 2.0})
LATE = Case(late={(0, 1, "F"): 0.02})
CHUNKS = Case("interleaved_1f1b", 4, 2, forward_s=0.006, slow={5: 2.0})


def trace_of(case: Case, folder: Path) -> Traced:
    run_ranks(4, run_traced, case, str(folder))
    found = read_traces(folder)
    assert found is not None and len(found.pipelines) == 1
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace")


@pytest.fixture(scope="module")
def even(folder: Path) -> Traced:
    return trace_of(EVEN, folder / "even")


@pytest.fixture(scope="module")
def slow(folder: Path) -> Traced:
    return trace_of(SLOW, folder / "slow")


@pytest.fixture(scope="module")
def late(folder: Path) -> Traced:
    return trace_of(LATE, folder / "late")


def idle_from_files(folder: Path, step: int) -> list[float]:
    """Each rank's time in a step outside its computations, from the files alone."""
    steps = [json.loads(file_of(folder, rank).read_text())["traceEvents"] for rank in range(4)]
    spans = [[e for e in s if e["ph"] == "X" and e["args"]["step"] == step] for s in steps]
    begin = min(e["ts"] for rank in spans for e in rank)
    end = max(e["ts"] + e["dur"] for rank in spans for e in rank)
    busy = [sum(e["dur"] for e in rank if e["cat"] == "compute") for rank in spans]
    return [(end - begin - b) / 1e6 for b in busy]


@pytest.mark.parametrize("case", ["even", "slow", "late"])
def test_causes_are_together_the_measured_idle_time(
    case: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    traced: Traced = request.getfixturevalue(case)
    (pipeline,) = traced.pipelines
    idle = idle_from_files(folder / case, traced.step)
    for causes, expected in zip(pipeline.lost.causes, idle, strict=True):
        assert min(causes.values()) >= 0
        assert sum(causes.values()) == pytest.approx(expected, rel=1e-3)
    assert pipeline.lost.idle_s == pytest.approx(sum(idle), rel=1e-3)


def test_with_even_stages_only_the_schedule_loses_time(even: Traced) -> None:
    lost = even.pipelines[0].lost
    # (p - 1) (F + B) on each rank of 1F1B; a sleep is never shorter than asked for.
    assert lost.total("warm-up and drain") >= 4 * 3 * 0.03
    assert lost.total("warm-up and drain") > 0.5 * lost.idle_s


def test_a_slow_stage_is_imbalance_and_is_named(slow: Traced, even: Traced) -> None:
    pipeline, stage, times = slow.slowest
    assert stage == 2 and pipeline.ranks[pipeline.measured.plan.rank_of[2]] == 2
    assert times == pytest.approx(4 * 2 / 5, rel=0.15)
    lost = pipeline.lost
    assert max(CAUSES[1:], key=lost.total) == "imbalance"
    assert lost.total("imbalance") > 2 * even.pipelines[0].lost.total("imbalance")
    assert min(range(4), key=lambda rank: lost.causes[rank]["imbalance"]) == 2
    assert f"Stage 2 on rank 2 takes {times:.2f} x the mean" in sentences(slow)[1]


def test_a_delayed_message_is_communication_and_its_receiver_is_named(
    late: Traced, even: Traced
) -> None:
    lost = late.pipelines[0].lost
    assert (lost.late[0].sender, lost.late[0].receiver, lost.late[0].gradient) == (0, 1, False)
    # All six messages are waited for so long, in vain.
    assert len(lost.late[0].waits) == 6 and lost.late[0].wait_s >= 6 * 0.02
    assert lost.late[0].wait_s > sum(other.wait_s for other in lost.late[1:])
    assert lost.total("communication") > 2 * even.pipelines[0].lost.total("communication")
    assert max(CAUSES[1:], key=lost.total) == "communication"
    assert "Rank 1 waits" in sentences(late)[2] and "activations of rank 0" in sentences(late)[2]


def events(folder: Path, rank: int) -> list[dict[str, Any]]:
    whole = json.loads(file_of(folder, rank).read_text())
    assert whole["otherData"]["clock"]["same_host_as_rank_0"] is True
    found: list[dict[str, Any]] = whole["traceEvents"]
    return found


def test_each_action_stands_once_a_step_and_spans_of_a_row_follow_each_other(
    slow: Traced, folder: Path
) -> None:
    plan = lower(build_schedule("1f1b", 4, 6, 1))
    for rank in range(4):
        spans = [e for e in events(folder / "slow", rank) if e["ph"] == "X"]
        for step in (1, 2, 3):
            mine = [e for e in spans if e["args"]["step"] == step]
            names = Counter(e["name"] for e in mine if "op" in e["args"])
            assert {str(a): 1 for a in plan[rank]}.items() <= names.items()
            assert all(n == 1 for n in names.values())
        for row in ("compute", "message", "reduce"):
            times = [(e["ts"], e["ts"] + e["dur"]) for e in spans if e["cat"] == row]
            assert len(times) > 1
            assert all(a[1] <= b[0] + 1e-3 for a, b in pairwise(times)), row


def test_an_arrow_joins_both_ends_of_each_message_in_its_direction(
    slow: Traced, folder: Path
) -> None:
    ends: dict[str, dict[str, float]] = {}
    for rank in range(4):
        for e in events(folder / "slow", rank):
            if e["ph"] in ("s", "f"):
                assert e["ph"] not in ends.setdefault(e["id"], {})
                ends[e["id"]][e["ph"]] = e["ts"]
    # Six microbatches over three borders, forth and back, in three steps. Arrows end in the wait,
    # which may have begun before the message left.
    assert len(ends) == 6 * 3 * 2 * 3
    assert all(set(pair) == {"s", "f"} for pair in ends.values())


def test_chunks_of_a_rank_are_told_apart(folder: Path) -> None:
    traced = trace_of(CHUNKS, folder / "chunks")
    pipeline, stage, times = traced.slowest
    assert stage == 5 and times == pytest.approx(8 * 2 / 9, rel=0.15)
    assert "Stage 5 on rank 1" in sentences(traced)[1]
    lost = pipeline.lost
    assert max(CAUSES[1:], key=lost.total) == "imbalance"


def test_a_trace_that_is_not_of_its_plan_is_refused(even: Traced, folder: Path) -> None:
    traces = [read_trace(file_of(folder / "even", rank), even.step) for rank in range(4)]
    spans = list(traces[1].steps[even.step])
    missing = [s for s in spans if s.name != "1F3"]
    twice = [*spans, next(s for s in spans if s.name == "1F3")]
    for wrong, text in ((missing, "1F3"), (twice, "1F3 stands twice")):
        object.__setattr__(traces[1], "steps", {even.step: wrong})
        with pytest.raises(ValueError, match=text):
            traced(traces, even.step)
