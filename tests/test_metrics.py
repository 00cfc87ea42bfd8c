"""The files of a run: exact numbers, one continuous file over restarts, one writer."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.errors import ConfigError
from megalite.metrics import (
    EvalRecord,
    EventLog,
    MetricsLog,
    RunLock,
    StepRecord,
    cut_back,
    read_lines,
)

RECORD = StepRecord(
    step=1,
    loss=0.1 + 0.2,
    grad_norm=1e-300,
    lr=3e-4,
    tokens=2**53 + 1,
    samples=32,
    step_time_s=0.25,
    tokens_per_s=1234.5,
    skipped=False,
    layout="tp 2 x pp 2 x dp 2",
)

# Another process that holds the lock of the directory it is given, until its input ends.
HOLDER = """
import fcntl, sys
file = open(sys.argv[1] + "/lock", "a+b")
fcntl.flock(file, fcntl.LOCK_EX)
file.write(b"process 7 on elsewhere"); file.flush()
print("held", flush=True)
sys.stdin.read()
"""


def write_steps(run_dir: Path, last_step: int, steps: range) -> None:
    log = MetricsLog.open(run_dir, last_step)
    for step in steps:
        log.write(replace(RECORD, step=step, loss=float(last_step)))
        if step % 2 == 0:
            log.write_eval(EvalRecord.of(step, 2.0, 4.0, 100 * step))
    log.close()


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def refuse(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


def test_a_line_has_exactly_the_fields_that_users_rely_on(tmp_path: Path) -> None:
    log = MetricsLog.open(tmp_path, 0)
    log.write(RECORD)
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    log.close()
    names = "step loss grad_norm lr tokens samples step_time_s tokens_per_s skipped layout"
    assert list(line) == names.split() == [f.name for f in fields(StepRecord)]
    assert line == asdict(RECORD)


@settings(deadline=None)
@given(value=st.floats())
def test_every_float_reads_back_to_the_same_value_from_valid_json(value: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        log = MetricsLog.open(name, 0)
        log.write(replace(RECORD, loss=value))
        log.close()
        path = Path(name) / "metrics.jsonl"
        strict = json.loads(path.read_text(), parse_constant=refuse)["loss"]
        back = StepRecord(**read_lines(path)[0]).loss
    assert type(back) is float
    assert back == value or (math.isnan(back) and math.isnan(value))
    assert float(strict) == back or math.isnan(back)


def test_the_check_for_valid_json_refuses_the_usual_nan() -> None:
    with pytest.raises(AssertionError, match="NaN"):
        json.loads(json.dumps({"value": math.nan}), parse_constant=refuse)


def test_a_resume_cuts_back_to_the_restored_step_and_goes_on(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, range(1, 13))
    write_steps(tmp_path, 8, range(9, 15))
    assert steps_in(tmp_path / "metrics.jsonl") == list(range(1, 15))
    assert steps_in(tmp_path / "eval.jsonl") == [2, 4, 6, 8, 10, 12, 14]
    losses = [line["loss"] for line in read_lines(tmp_path / "metrics.jsonl")]
    assert losses == [0.0] * 8 + [8.0] * 6, "the lines after step 8 are the new ones"


def test_without_the_cut_steps_stand_twice(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, range(1, 13))
    write_steps(tmp_path, 99, range(9, 15))
    assert steps_in(tmp_path / "metrics.jsonl") != list(range(1, 15))


def test_a_run_from_step_zero_keeps_nothing(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, range(1, 5))
    MetricsLog.open(tmp_path, 0).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    assert (tmp_path / "eval.jsonl").read_bytes() == b""


@pytest.mark.parametrize("torn", [b"{", b'{"step": 4, "loss": 1.5', b"\0\0\0\0", b'{"step": 4}'])
def test_a_line_that_a_kill_left_half_written_goes(tmp_path: Path, torn: bytes) -> None:
    write_steps(tmp_path, 0, range(1, 4))
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(torn)
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    write_steps(tmp_path, 99, range(4, 6))
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2, 3, 4, 5]


@settings(deadline=None)
@given(num_steps=st.integers(0, 30), last_step=st.integers(0, 35), torn=st.binary(max_size=9))
def test_a_cut_keeps_the_bytes_of_every_earlier_line(
    num_steps: int, last_step: int, torn: bytes
) -> None:
    lines = [f'{{"step": {s}, "x": {s * 0.1}}}\n'.encode() for s in range(1, num_steps + 1)]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "lines"
        path.write_bytes(b"".join(lines) + torn.replace(b"\n", b""))
        cut_back(path, last_step)
        assert path.read_bytes() == b"".join(lines[:last_step])


def test_a_line_stands_in_the_file_before_write_returns(tmp_path: Path) -> None:
    log = MetricsLog.open(tmp_path, 0)
    for step in (1, 2):
        log.write(replace(RECORD, step=step))
        assert steps_in(tmp_path / "metrics.jsonl")[-1] == step
    log.sync()
    log.close()


def test_a_second_job_in_the_same_directory_is_refused_by_name(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=r"run\.dir: .* process 7 on elsewhere"):
            RunLock(tmp_path, wait_s=0.1)
        assert not (tmp_path / "metrics.jsonl").exists()
        other.kill()
        other.wait()
        write_steps(tmp_path, 0, range(1, 3))
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2]


def test_a_lock_ends_with_its_log_and_names_its_process(tmp_path: Path) -> None:
    log = MetricsLog.open(tmp_path, 0)
    with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
        RunLock(tmp_path, wait_s=0.0)
    log.close()
    lock = RunLock(tmp_path, wait_s=0.0)
    MetricsLog.open(tmp_path, 0, lock).close()
    RunLock(tmp_path, wait_s=0.0).close()


def test_events_are_only_added_and_carry_time_and_name(tmp_path: Path) -> None:
    for step in (1, 2):
        log = EventLog(tmp_path)
        log.write("save", step=step, seconds=math.inf, axes=("tp", math.nan))
        log.close()
        with open(tmp_path / "events.jsonl", "ab") as file:
            file.write(b'{"torn')
    found = read_lines(tmp_path / "events.jsonl")
    assert [line["step"] for line in found] == [1, 2]
    assert all(line["event"] == "save" and line["time"] > 1.6e9 for line in found)
    assert found[0]["seconds"] == math.inf and found[0]["axes"] == ["tp", "nan"]


def test_a_missing_file_has_no_lines(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "metrics.jsonl") == []


def test_an_evaluation_is_given_in_all_three_units() -> None:
    record = EvalRecord.of(10, math.log(16), 2.0, 640)
    assert record.perplexity == pytest.approx(16.0, rel=1e-12)
    assert record.bits_per_byte == pytest.approx(2.0, rel=1e-12)
    assert EvalRecord.of(10, 1.0, None, 640).bits_per_byte is None
    assert EvalRecord.of(10, 1e6, 2.0, 640).perplexity == math.inf
    assert math.isnan(EvalRecord.of(10, math.nan, 2.0, 640).perplexity)
