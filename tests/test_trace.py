"""What a trace keeps, what it costs when it is off, and what stands in its file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from megalite.trace import HostClock, Offset, Origin, Span, Trace, file_of, read_trace, write_trace

PLAN = {"name": "1f1b", "num_microbatches": 1, "rank_of": [0, 1]}
ORIGIN = Origin(3, 4, {"pp": 1, "dp": 1, "tp": 0}, "tp 1 x pp 2 x dp 2", PLAN, ["0F0", "0B0"])


class Done:
    def wait(self) -> None:
        return None


class Ticks:
    """A clock that moves by one at each mark; ``passed`` is how far the device has come."""

    def __init__(self) -> None:
        self.now, self.passed, self.read = 0, 10**9, 0

    def mark(self) -> int:
        self.now += 1
        return self.now

    def done(self, mark: int) -> bool:
        return mark <= self.passed

    def seconds(self, mark: int) -> float:
        self.read += 1
        return float(mark)

    def drift(self) -> float:
        return 0.0


def record(trace: Trace, steps: range, spans: int = 9) -> None:
    for number in steps:
        with trace.step(number):
            for i in range(spans):
                with trace.span(f"part {i}"):
                    pass


def test_a_trace_that_is_off_keeps_nothing_and_hands_works_through() -> None:
    trace, work = Trace(), Done()
    with trace.step(1):
        assert not trace.recording
        assert trace.message(1, work) is work and trace.reduction("dp", work) is work
    record(trace, range(3))
    assert trace.steps == {} and trace.newest() == []
    on = Trace(most=10)
    with on.step(1):
        assert on.recording
        assert on.message(1, work) is not work and on.reduction("dp", work) is not work
    # Outside its steps, such as in an evaluation, it records nothing either.
    assert not on.recording and on.message(1, work) is work


def test_steps_are_thinned_out_evenly_when_there_is_no_more_room() -> None:
    trace = Trace(most=100)  # ten steps of ten spans
    record(trace, range(1, 11))
    trace.finish()
    assert list(trace.steps) == list(range(1, 11)) and trace.every == 1
    record(trace, range(11, 60))
    trace.finish()
    assert trace.every == 8 and list(trace.steps) == [8, 16, 24, 32, 40, 48, 56]
    assert sum(map(len, trace.steps.values())) <= 100
    # One that is too large alone is kept nevertheless.
    record(trace, range(64, 65), spans=200)
    trace.finish()
    assert list(trace.steps) == [64]


def test_marks_of_a_device_are_read_when_it_has_passed_them() -> None:
    clock = Ticks()
    trace = Trace(clock, most=10_000)
    record(trace, range(1, 4))
    assert list(trace.steps) == [1]  # two steps later
    clock.passed = 0
    read = clock.read
    record(trace, range(4, 6))
    assert clock.read == read, "the host would have waited for the device"
    record(trace, range(6, 20))
    assert len(trace._pending) < 8, "what is not read grows without bound"
    trace.finish()
    assert list(trace.steps) == list(range(1, 20))


def test_a_step_that_fails_is_kept_as_far_as_it_came() -> None:
    trace = Trace(most=100)
    with pytest.raises(RuntimeError), trace.step(7):
        with trace.span("data"):
            pass
        raise RuntimeError
    trace.finish()
    assert [s.name for s in trace.steps[7]] == ["data", "step 7 (failed)"]


def some_trace() -> Trace:
    trace = Trace(Ticks(), most=1000)
    for step in (1, 2):
        with trace.step(step):
            with trace.span("data"):
                pass
            mark = trace.clock.mark
            for op, row in (("RECV_F", "message"), ("F", "message"), ("F", "compute")):
                name = f"{row} {op}"
                trace.add(Span(row, name, mark(), mark(), op, 1, 0, 0 if row == "message" else -1))
            trace.reduction("dp", Done()).wait()
    return trace


def written(folder: Path, *offsets: Offset) -> dict[str, Any]:
    path = write_trace(folder, some_trace(), ORIGIN, *offsets)
    assert path == file_of(folder, 3) and path.name == "rank_00003.json"
    whole: dict[str, Any] = json.loads(path.read_text())
    return whole


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    written(tmp_path, Offset(0.0))
    trace = some_trace()
    trace.finish()
    found = read_trace(file_of(tmp_path, 3))
    assert found.origin == ORIGIN
    for step, spans in trace.steps.items():
        kept = [s for s in spans if s.row != "reduction in flight"]
        assert sorted(found.steps[step]) == sorted(kept)
    part = read_trace(file_of(tmp_path, 3), step=2, row="step")
    assert list(part.steps) == [2] and [s.name for s in part.steps[2]] == ["step 2", "data"]
    assert [p.name for p in tmp_path.iterdir()] == ["rank_00003.json"]


def test_events_are_those_of_the_format(tmp_path: Path) -> None:
    events = written(tmp_path, Offset(0.0))["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]}
    assert names == {"rank 3: pp 1, dp 1, tp 0", "step", "compute", "message", "reduce"}
    for e in events:
        assert e["pid"] == 3 and e["ph"] in "MXbesf"
        if e["ph"] == "X":
            assert e["dur"] >= 0 and e["tid"] in range(4) and e["args"]["step"] in (1, 2)
    starts = [e["ts"] for e in events if e["ph"] == "X"]
    assert starts == sorted(starts)
    arrows = [e for e in events if e["ph"] in "sf"]
    assert [(e["ph"], e["id"]) for e in arrows] == [
        ("f", "1.dp1.tp0.F1.0"),
        ("f", "2.dp1.tp0.F1.0"),
    ]
    flights = [e for e in events if e["ph"] in "be"]
    assert [e["ph"] for e in flights] == ["b", "e", "b", "e"]
    assert flights[0]["id"] == flights[1]["id"] != flights[2]["id"]


def test_times_are_those_of_rank_0_and_the_file_says_how_well(tmp_path: Path) -> None:
    base = written(tmp_path, Offset(0.0))["traceEvents"]
    fast = Offset(0.0, 100.0, 2e-6, False)
    moved = written(tmp_path, fast)
    for a, b in zip(base, moved["traceEvents"], strict=True):
        if "ts" in a:
            assert b["ts"] == pytest.approx(a["ts"] - 100e6)
    clock = moved["otherData"]["clock"]
    assert clock["drift_s"] is None and clock["uncertainty_s"] == 2e-6
    assert clock["same_host_as_rank_0"] is False
    # A clock that gains a second in 100 is set back by ever more.
    drifting = written(tmp_path, fast, Offset(100.0, 101.0, 3e-6, False))
    assert drifting["otherData"]["clock"]["drift_s"] == 1.0
    assert drifting["otherData"]["clock"]["uncertainty_s"] == 3e-6
    for a, b in zip(base, drifting["traceEvents"], strict=True):
        if "ts" in a:
            assert b["ts"] == pytest.approx(a["ts"] - 100e6 - 0.01 * a["ts"])


def test_the_hosts_clock_is_the_one_of_all_its_processes() -> None:
    clock = HostClock()
    before, mark, after = time.monotonic(), clock.mark(), time.monotonic()
    assert before <= clock.seconds(mark) <= after
    assert time.get_clock_info("monotonic").implementation.endswith("CLOCK_MONOTONIC)")
