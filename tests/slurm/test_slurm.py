"""launch/slurm.sbatch on a real Slurm of two nodes: preempted, requeued, finished, cancelled."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.command import ROOT, SMALL, TINY
from tests.slurm.cluster import Cluster, missing

WHY_NOT = missing()
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.timeout(280),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="slurm_", dir="/tmp"))  # short: a socket lies in it
    with Cluster(folder) as started:
        yield started
    shutil.rmtree(folder)


def submit(cluster: Cluster, run_dir: Path, steps: int) -> str:
    env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NPROC": "1"}
    flags = ["--train.steps", str(steps), "--run.dir", str(run_dir)]
    words = ["sbatch", "--parsable", "--nodes", "2", f"--output={run_dir}.out", f"--chdir={ROOT}"]
    return cluster.run(*words, "launch/slurm.sbatch", *TINY, *SMALL, *flags, **env).strip()


def steps_of(run_dir: Path) -> list[int]:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines]


def processes_of(run_dir: Path) -> list[str]:
    """Every process that names the run, or was forked for it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
                environ = (entry / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if str(run_dir) in command or str(run_dir) in environ:
                found.append(command.replace("\0", " "))
    return found


def test_a_preempted_job_comes_back_by_itself_and_finishes(
    cluster: Cluster, tmp_path: Path
) -> None:
    run_dir, total = tmp_path / "run", 240
    job = submit(cluster, run_dir, total)
    try:
        cluster.until(lambda: len(steps_of(run_dir)) > 5, 60)
        # What Slurm sends when the time is nearly up: to the script, which requeues itself once.
        cluster.run("scancel", "--signal=USR1", "--batch", job)
        cluster.until(lambda: cluster.restarts(job) == 1, 30)
        first = len(steps_of(run_dir))
        assert saved(run_dir) == first
        cluster.start_now(job)
        cluster.until(lambda: len(steps_of(run_dir)) > first + 5, 60)

        # Another job takes its nodes: Slurm sends TERM to all processes and requeues it.
        flags = ["--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1"]
        other = cluster.run("sbatch", "--parsable", "--partition=high", *flags).strip()
        cluster.until(lambda: cluster.restarts(job) == 2, 60)
        second = len(steps_of(run_dir))
        assert first + 5 < second < total and saved(run_dir) == second
        cluster.until(lambda: cluster.state(other) == "COMPLETED", 60)
        cluster.start_now(job)
        cluster.until(lambda: cluster.state(job) in ("COMPLETED", "FAILED"), 90)
        assert (cluster.state(job), cluster.exit_code(job)) == ("COMPLETED", "0:0")
    except AssertionError:
        print(Path(f"{run_dir}.out").read_text()[-6000:])
        raise
    assert steps_of(run_dir) == list(range(1, total + 1))


def saved(run_dir: Path) -> int:
    return max(int(path.name.removeprefix("step_")) for path in (run_dir / "checkpoints").iterdir())


def test_a_cancelled_job_saves_ends_for_good_and_leaves_no_process(
    cluster: Cluster, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    job = submit(cluster, run_dir, 100_000)
    try:
        cluster.until(lambda: len(steps_of(run_dir)) > 5, 60)
        assert processes_of(run_dir)
        cluster.run("scancel", job)
        cluster.until(lambda: cluster.state(job) == "CANCELLED", 30)
        cluster.until(lambda: cluster.idle() == 2, 30)
    except AssertionError:
        print(Path(f"{run_dir}.out").read_text()[-6000:])
        raise
    assert not processes_of(run_dir)
    assert cluster.restarts(job) == 0 and saved(run_dir) == len(steps_of(run_dir))
