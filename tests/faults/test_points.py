"""Faults at every named point of a step and of a save, one after another in one run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from megalite.metrics import read_lines
from tests.faults.job import Host, Job
from tests.faults.test_kills import calm_run, check

IN_A_STEP = (
    *("data", "forward", "input gradient", "weight gradient"),
    *("reduction", "totals", "optimizer", "record"),
)
IN_A_SAVE = ("save", "write", "commit")
SCHEDULE = ["--parallel.pp", "2", "--parallel.schedule", "zb_h1", "--run.watchdog_s", "10"]
SCRIPT = "tests/faults/planted_training.py"
Fault = tuple[str, str, int, int]


def faults() -> list[Fault]:
    """How, where, in which rank and after which step."""
    chosen = [(how, at) for how in ("raise", "kill") for at in (*IN_A_STEP, *IN_A_SAVE)]
    chosen += [("raise", "restore"), ("kill", "forward"), ("kill", "restore")]
    chosen += [("drop", at) for at in ("forward", "reduction", "save")]
    chosen += [(how, at) for how in ("stop", "slow") for at in ("forward", "weight gradient")]
    chosen += [("stop", "write"), ("slow", "write"), ("slow", "commit")]
    return [
        (how, at, 0 if at == "commit" else n % 2, 5 * (n + 1) + (0 if at in IN_A_SAVE else 2))
        for n, (how, at) in enumerate(chosen)
    ]


def ends_a_round(fault: Fault) -> bool:
    """A save that cannot be made is told and does not end the run; a pause only takes time."""
    how, at, *_ = fault
    return how in ("kill", "drop") or (how == "raise" and at not in ("write", "commit"))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return calm_run(tmp_path_factory.mktemp("calm"), last_step(), SCHEDULE)


def last_step() -> int:
    return faults()[-1][3] + 5


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("behind", ["False", "True"], ids=["at once", "in the background"])
def test_no_fault_at_any_point_changes_the_run(
    behind: str, calm: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = faults()
    (tmp_path / "faults.json").write_text(json.dumps(planted))
    monkeypatch.setenv("MEGALITE_TEST_FAULTS", str(tmp_path / "faults.json"))
    start = [sys.executable, "launch/elastic.py", "--standalone", "--nproc-per-node", "2", SCRIPT]
    flags = [*SCHEDULE, "--checkpoint.async_save", behind]
    with Job(tmp_path, last_step(), [Host("only", start)], flags=flags) as job:
        job.finish(300)
    assert len(list(tmp_path.glob("happened_*"))) == len(planted)
    check(job, calm)
    events = read_lines(job.run_dir / "events.jsonl")
    started = [event["why"] for event in events if event["event"] == "start"]
    # A fault in a restore comes before the start is written that the fault before it has led to.
    pairs = zip(planted, planted[1:], strict=False)
    expected = [expected_why(f) for f, after in pairs if ends_a_round(f) and after[1] != "restore"]
    assert not [p for p in zip(expected, started[1:], strict=True) if not re.search(*p)]
    failed = [e for e in events if e["event"] == "save_failed"]
    of_saves = [f[3] for f in planted if f[0] == "raise" and f[1] in ("write", "commit")]
    assert all(e["step"] in (s, s - 5) for e, s in zip(failed, of_saves, strict=True))
    assert all("planted at" in e["problem"] for e in failed)


def expected_why(fault: Fault) -> str:
    how, at, rank, _ = fault
    if how == "drop":
        return "rank [01] .*ended with 1"
    end = "was killed by SIGKILL" if how == "kill" else f"ended with 1: .*planted at {at}$"
    return f"rank {rank} .*{end}"
