"""Kills from outside, at random times with a fixed seed, of every kind of process of a job."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from tests.faults.job import Host, Job, family, is_alive, kill


def family_of(host: Host) -> list[int]:
    return [host.launcher(), host.forkserver(), *host.workers()]


def victims(host: Host, target: str, rng: random.Random) -> list[int]:
    """What a blow at ``target`` kills; empty while there is no such process."""
    if target == "worker":
        workers = host.workers()
        return [rng.choice(workers)] if workers else []
    found = {"forkserver": [host.forkserver()], "agent": [host.launcher()]}
    pids = found.get(target) or family_of(host)
    return pids if all(pids) else []


def strike(job: Job, target: str, rng: random.Random) -> tuple[float, list[int]]:
    """Kill one thing of one host; when that was, and what must be gone soon after."""
    deadline = time.monotonic() + 30
    while True:
        host = rng.choice(job.hosts)
        old = family_of(host) if target in ("agent", "host") else host.workers()
        pids = victims(host, target, rng)
        if pids:
            break
        job.supervise()
        assert time.monotonic() < deadline, job.logs()
        time.sleep(0.01)
    now = time.time()
    for pid in pids:
        kill(pid)
    return now, [*old, *pids]


def rain(job: Job, targets: list[str], seed: int) -> Iterator[tuple[str, float]]:
    """Kill each target once, now and then again while the job recovers; the recovery times."""
    rng = random.Random(seed)
    job.wait_for_steps(0.0)
    for target in targets:
        time.sleep(rng.uniform(0, 0.8))  # somewhere in a step, a save, or between
        struck, old = strike(job, target, rng)
        if rng.random() < 0.3:  # in the middle of the restart
            time.sleep(rng.uniform(0, 0.5))
            struck, more = strike(job, "worker", rng)
            old += more
        gone = wait_until_gone(old, target)
        yield target, gone - struck + job.wait_for_steps(gone)


def wait_until_gone(pids: list[int], target: str) -> float:
    """When nothing of the old attempt was alive any more."""
    deadline = time.monotonic() + 10
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"{left} are alive after a kill of {target}"
        time.sleep(0.005)
    return time.time()


def check(job: Job, calm: Job) -> None:
    """Nothing is lost, nothing is done twice, and the end is the same bit for bit."""
    assert [line["step"] for line in job.lines()] == list(range(1, job.steps + 1))
    assert job.lines() == calm.lines()
    assert job.last_hashes() == calm.last_hashes()
    for saved, began in job.restores():
        assert saved <= began <= saved + 5, "more was lost than the steps since a checkpoint"


def stopped(job: Job) -> int:
    """Have the job stop as Slurm would, and start it again; the step in which it stopped."""
    (host,) = job.hosts
    assert host.process is not None
    # As a signal to a whole job reaches all of its processes.
    for pid in reversed(family(host.pid())):
        os.kill(pid, signal.SIGTERM)
    assert host.process.wait(30) == 75, job.logs()
    steps = len(job.lines())
    assert (job.run_dir / "checkpoints" / f"step_{steps:08d}").exists()
    job.start(host)
    return steps


def show(found: list[tuple[str, float]]) -> None:
    """The distribution of recovery times by what was killed."""
    for target in sorted({target for target, _ in found}):
        times = sorted(seconds for name, seconds in found if name == target)
        spread = f"{times[0]:.2f} to {times[-1]:.2f} s, median {median(times):.2f}"
        print(f"killed {target} {len(times)} times: stepping again after {spread}")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, for a socket lies in it."""
    with tempfile.TemporaryDirectory(prefix="faults_", dir="/tmp") as name:
        yield Path(name)


def calm_run(folder: Path, steps: int) -> Job:
    with Job(folder, steps) as job:
        job.finish(100 + steps / 5)
    return job


def test_a_job_that_is_killed_here_and_there_ends_as_if_nothing_had_happened(
    folder: Path,
) -> None:
    (folder / "calm").mkdir()
    calm = calm_run(folder / "calm", 110)
    (folder / "struck").mkdir()
    with Job(folder / "struck", 110) as job:
        found = list(rain(job, ["worker", "agent", "worker"], seed=5))
        assert stopped(job) < 110
        job.finish(100)
    show(found)
    check(job, calm)
    with pytest.raises(AssertionError):  # a run of another seed is told apart
        other = Job(calm.folder, 110)
        other.steps = 109
        check(other, calm)


NUM_KILLS = int(os.environ.get("KILLS", "200"))


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_200_kills_of_any_process_lose_nothing(folder: Path) -> None:
    steps = 45 * NUM_KILLS
    (folder / "calm").mkdir()
    calm = calm_run(folder / "calm", steps)
    rng = random.Random(200)
    targets = rng.choices(["worker", "forkserver", "agent", "host"], [6, 2, 1, 1], k=NUM_KILLS)
    (folder / "struck").mkdir()
    with Job(folder / "struck", steps) as job:
        found = list(rain(job, targets, seed=200))
        job.finish(1500)
    show(found)
    check(job, calm)
