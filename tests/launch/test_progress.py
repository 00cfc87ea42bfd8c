"""The line about the newest step: in place on a terminal, plain and rare everywhere else."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from launch.progress import Progress, duration
from megalite.metrics import EvalRecord, StepRecord

RECORD = StepRecord(
    step=1,
    loss=3.21456,
    grad_norm=1.0,
    lr=3e-4,
    tokens=2048,
    samples=32,
    step_time_s=0.5,
    tokens_per_s=12345.6,
    skipped=False,
    layout="tp 1 x pp 1 x dp 1",
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Gone(io.StringIO):
    """A pipe whose reader has left."""

    writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        raise BrokenPipeError


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)


def run(stream: io.StringIO, num_steps: int, step_s: float, rank: int = 0) -> Progress:
    clock = Clock()
    progress = Progress(num_steps, rank, stream, clock)
    for step in range(1, num_steps + 1):
        clock.now += step_s
        progress.step(replace(RECORD, step=step, step_time_s=step_s))
    return progress


def controls(text: str) -> set[str]:
    return {c for c in text if (ord(c) < 32 or ord(c) > 126) and c != "\n"}


def test_a_pipe_gets_plain_lines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    progress = run(stream, 4, step_s=3.0)
    progress.evaluation(EvalRecord.of(4, 2.0, 2.0, 8192))
    progress.close()
    lines = stream.getvalue().splitlines()
    assert controls(stream.getvalue()) == set()
    assert lines[0] == "step 1/4  loss 3.2146  12,346 tokens/s  0:00:09 left"
    assert lines[3].startswith("step 4/4") and lines[3].endswith("0:00:00 left")
    assert lines[4] == "step 4: held-out loss 2.0000, 1.4427 bits/byte"
    assert len(lines) == 5


def test_a_pipe_gets_the_first_step_the_last_and_few_between() -> None:
    stream = io.StringIO()
    run(stream, 1000, step_s=0.01)
    steps = [int(line.split("/")[0].split()[1]) for line in stream.getvalue().splitlines()]
    assert steps[0] == 1 and steps[-1] == 1000
    assert len(steps) <= 2 + 10.0 / 2


def test_a_long_run_prints_once_a_minute() -> None:
    stream = io.StringIO()
    run(stream, 10_000, step_s=6.0)
    assert 900 < stream.getvalue().count("\n") < 1200


def test_the_newest_bits_per_byte_stay_on_the_line() -> None:
    stream = io.StringIO()
    progress = Progress(10, stream=stream)
    progress.evaluation(EvalRecord.of(9, 2.0, 2.0, 8192))
    progress.step(replace(RECORD, step=10, skipped=True))
    assert stream.getvalue().splitlines()[1].endswith("  val 1.443 bits/byte  skipped")


def test_other_ranks_show_nothing() -> None:
    for stream in (io.StringIO(), Terminal()):
        progress = run(stream, 5, step_s=3.0, rank=1)
        progress.note("loaded")
        progress.evaluation(EvalRecord.of(4, 2.0, 2.0, 8192))
        progress.close()
        assert stream.getvalue() == ""


def test_a_terminal_is_redrawn_in_place_and_its_cursor_stays_visible() -> None:
    stream = Terminal()
    progress = run(stream, 20, step_s=1.0)
    progress.close()
    text = stream.getvalue()
    assert text.count("\r\x1b[2K") == 20, "each drawing erases the one before"
    assert text.count("\n") == 1 and text.endswith("\n")
    assert "\x1b[?25l" not in text, "a hidden cursor would stay hidden after a kill"
    assert "12,346 tokens/s" in text


def test_a_terminal_is_not_redrawn_for_every_fast_step() -> None:
    stream = Terminal()
    run(stream, 1000, step_s=0.001)
    assert 5 <= stream.getvalue().count("\r") <= 12


def test_a_line_never_fills_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    run(stream, 1, step_s=1.0)
    drawn = stream.getvalue().split("\x1b[2K")[1].replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert drawn.startswith("step 1/1") and len(drawn) == 29


def test_a_note_stands_above_the_moving_line() -> None:
    stream = Terminal()
    progress = run(stream, 2, step_s=1.0)
    progress.note("checkpoint of step 2")
    progress.step(replace(RECORD, step=2))
    progress.close()
    text = stream.getvalue()
    assert "\r\x1b[2Kcheckpoint of step 2\n" in text
    assert text.count("\n") == 2


def test_a_terminal_without_abilities_is_treated_as_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    run(stream, 2, step_s=3.0)
    assert controls(stream.getvalue()) == set()


def test_a_console_that_is_gone_mutes_the_line_and_stops_nothing() -> None:
    stream = Gone()
    progress = run(stream, 5, step_s=3.0)
    progress.note("still here")
    progress.close()
    assert stream.writes == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00:00"), (59.6, "0:01:00"), (3723, "1:02:03"), (2 * 86400 + 3723, "2d 1:02:03")],
)
def test_a_duration_is_written_by_the_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text
