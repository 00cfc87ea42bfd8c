"""A job that is killed from outside again and again is, in the end, one that nobody touched."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megalite.metrics import read_lines
from tests.checkpoint.jobs import rewrite
from tests.faults.job import Job, family
from tests.faults.phases import Phase
from tests.faults.rain import AIMS, FIRST, Rain, changes, changes_in, show


def check(job: Job, calm: Job) -> None:
    """Nothing is lost, nothing is done twice, and the end is the same bit for bit."""
    assert [line["step"] for line in job.lines()] == list(range(1, len(calm.lines()) + 1))
    assert job.lines() == calm.lines()
    assert job.last_hashes() == calm.last_hashes()
    for saved, began in job.restores():
        assert saved <= began <= saved + 5, "more was lost than the steps since a checkpoint"


def stopped(job: Job, again: bool = True) -> int:
    """Have the job stop as Slurm would, and start it ``again``; the step in which it stopped."""
    (host,) = job.hosts
    assert host.process is not None
    # As a signal to a whole job reaches all of its processes.
    for pid in reversed(family(host.pid())):
        os.kill(pid, signal.SIGTERM)
    assert host.process.wait(30) == 75, job.logs()
    steps = len(job.lines())
    assert (job.run_dir / "checkpoints" / f"step_{steps:08d}").exists()
    if again:
        job.start(host)
    return steps


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, for a socket lies in it."""
    with tempfile.TemporaryDirectory(prefix="faults_", dir="/tmp") as name:
        yield Path(name)


def calm_run(folder: Path, steps: int, flags: Sequence[str] = ()) -> Job:
    with Job(folder, steps, flags=flags) as job:
        job.finish(100 + steps / 5)
    return job


def test_a_job_that_is_killed_here_and_there_ends_as_if_nothing_had_happened(
    folder: Path,
) -> None:
    (folder / "calm").mkdir()
    calm = calm_run(folder / "calm", 110)
    (folder / "struck").mkdir()
    with Job(folder / "struck", 110, flags=["--run.watchdog_s", "10"]) as job:
        rain = Rain(job, random.Random(5))
        targets = ["worker", "forkserver", "agent", "worker", "worker"]
        found = list(rain.fall(targets, [Phase.TRAIN] * 3 + [Phase.JOINED]))
        assert stopped(job) < 110
        job.finish(100)
    show(found)
    check(job, calm)
    events = read_lines(job.run_dir / "events.jsonl")
    whys = [event["why"] for event in events if event["event"] == "start"]
    killed = "rank [01] \\(local rank [01]\\) was killed by SIGKILL"
    gone = "rank [01] .* went with the process that forks workers, which is gone"
    wanted = ["the job was started", killed, gone, "the job was started"]
    assert all(re.fullmatch(*pair) for pair in zip(wanted, whys, strict=False)), whys
    assert whys[-1] == "the job was started", "after the stop"
    for damage in (lose_a_step, change_a_weight):  # is told apart
        shutil.copytree(calm.run_dir, folder / damage.__name__ / "run")
        other = Job(folder / damage.__name__, 110)
        check(other, calm)
        damage(other)
        with pytest.raises(AssertionError):
            check(other, calm)


def lose_a_step(job: Job) -> None:
    path = job.run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:50] + lines[51:]))


def change_a_weight(job: Job) -> None:
    def change(manifest: dict[str, Any]) -> None:
        next(iter(manifest["files"].values()))["xxh3_128"] = "0" * 32

    rewrite(job.run_dir / "checkpoints" / "step_00000110", change)


NUM_KILLS = int(os.environ.get("KILLS", "200"))
SEED = int(os.environ.get("KILLS_SEED", "200"))


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_200_kills_of_any_process_in_any_phase_lose_nothing(folder: Path) -> None:
    """Layouts change all the while, at given steps and on request, and saves are made at once and
    behind the training in turn. The undisturbed run has the same layouts at the same steps."""
    steps, rng = 150 * NUM_KILLS, random.Random(SEED)
    targets = rng.choices(["worker", "forkserver", "agent", "host"], [6, 2, 1, 1], k=NUM_KILLS)
    aims = [aim for _ in range(NUM_KILLS // len(AIMS) + 1) for aim in rng.sample(AIMS, len(AIMS))]
    (folder / "struck").mkdir()
    flags = [*FIRST, "--run.watchdog_s", "10", *changes(100, steps)]
    turns = [["--checkpoint.async_save", value] for value in ("False", "True")]
    with Job(folder / "struck", steps, flags=flags, turns=turns) as job:
        rain = Rain(job, rng)
        found = []
        for blow in rain.fall(targets, aims):
            found.append(blow)
            print(f"{len(found)}: {blow}, step {len(job.lines())}", flush=True)
        give_up = time.monotonic() + 60
        while not rain.answered():
            assert time.monotonic() < give_up, "a request is lost"
            job.supervise()
            time.sleep(0.1)
        last = stopped(job, again=False)
    show(found)
    done = sum(text.startswith(("the layout is", "the job was restarted")) for text in rain.answers)
    print(f"{len(rain.asked)} requests, {done} met; {set(rain.answers)}")

    (folder / "calm").mkdir()
    same = [*FIRST, *changes_in(job.layouts()), "--run.stop_at", str(last)]
    with Job(folder / "calm", steps, flags=same) as calm:
        calm.finish(600 + last / 2)
    assert calm.layouts() == job.layouts()
    check(job, calm)
    met = Counter(blow.phase for blow in found)
    assert all(met[aim] >= NUM_KILLS // 50 for aim in AIMS), met
