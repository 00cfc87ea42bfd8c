"""A job whose disk is full or cannot be written any more: a small file system of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.load import open_checkpoint
from megalite.metrics import read_lines
from tests.faults.job import Host, Job, until
from tests.faults.test_kills import calm_run

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root"),
]


def mount(*words: object) -> None:
    subprocess.run(["mount", *map(str, words)], check=True, capture_output=True)


@pytest.fixture
def disk() -> Iterator[Path]:
    """The directory of a job, whose checkpoints lie on a file system that the test changes."""
    with tempfile.TemporaryDirectory(prefix="faults_", dir="/tmp") as name:
        checkpoints = Path(name, "run", "checkpoints")
        yield Path(name)
        with suppress(subprocess.CalledProcessError):
            subprocess.run(["umount", "-l", checkpoints], check=True, capture_output=True)


def told(job: Job, name: str) -> list[dict[str, Any]]:
    return [e for e in read_lines(job.run_dir / "events.jsonl") if e["event"] == name]


def good(job: Job) -> list[int]:
    """The steps of the checkpoints, each of which is proven."""
    paths = sorted((job.run_dir / "checkpoints").glob("step_????????"))
    return [open_checkpoint(path).step for path in paths]


@pytest.mark.parametrize("fault", ["full", "read-only"])
@pytest.mark.parametrize("behind", ["False", "True"], ids=["at once", "in the background"])
def test_training_goes_on_without_its_disk_and_the_last_checkpoint_stays_good(
    disk: Path, fault: str, behind: str
) -> None:
    flags = ["--checkpoint.async_save", behind]
    host = Host("only")
    with Job(disk, 100_000, [host], flags=flags) as job:
        until(lambda: len(told(job, "save")) >= 2, job, 60)
        os.kill(host.launcher(), signal.SIGUSR1)
        assert host.process is not None and host.process.wait(30) == 75
        checkpoints = job.run_dir / "checkpoints"
        newest = sorted(checkpoints.glob("step_????????"))[-1]
        nbytes = sum(file.stat().st_size for file in newest.iterdir())
        aside = disk / "aside"
        checkpoints.rename(aside)
        checkpoints.mkdir()
        room = int(nbytes * (1.5 if fault == "full" else 9))
        mount("-t", "tmpfs", "-o", f"size={room}", "tmpfs", checkpoints)
        subprocess.run(["cp", "-a", aside / newest.name, checkpoints], check=True)
        if fault == "read-only":
            mount("-o", "remount,ro", checkpoints)
        before = good(job)
        assert len(before) == 1

        job.start(host)
        until(lambda: len(told(job, "save_failed")) >= 3, job, 60)
        why = "No space left on device" if fault == "full" else "Read-only file system"
        assert all(why in event["problem"] for event in told(job, "save_failed"))
        assert len(job.lines()) >= before[0] + 10, "steps go on"
        assert good(job) == before
        # Asked to stop, it cannot save: it says so and does not claim a checkpoint.
        os.kill(host.launcher(), signal.SIGUSR1)
        until(lambda: host.process is not None and host.process.poll() is not None, job, 60)
        assert host.process.poll() == 1 and why in job.logs()
        assert good(job) == before

        mount("-o", f"remount,rw,size={9 * nbytes}", checkpoints)
        job.start(host)
        until(lambda: good(job)[-1] > before[0] + 10, job, 60)
        os.kill(host.launcher(), signal.SIGUSR1)
        assert host.process.wait(30) == 75, job.logs()
    last = len(job.lines())
    (disk / "calm").mkdir()
    calm = calm_run(disk / "calm", 100_000, ["--run.stop_at", str(last)])
    assert calm.lines() == job.lines() and calm.last_hashes() == job.last_hashes()
