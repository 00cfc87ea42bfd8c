"""A job under ``launch/elastic.py`` that a test may kill as it likes, and its supervisor.

The test starts a launcher again that was killed, as Slurm or a container's manager would.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megalite.checkpoint.manifest import read_manifest
from megalite.metrics import read_lines
from megalite.resilience.stop import Control
from tests.launch.command import ROOT, SMALL, TINY, TRAIN

SAME = ("step", "loss", "grad_norm", "lr", "tokens", "samples", "skipped")


@dataclass
class Host:
    """One launcher: ``command`` starts it with the run's flags; none: alone, with two workers."""

    name: str
    command: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = None

    def launcher(self) -> int:
        """Its pid, below what the prefix starts; 0: not yet, or gone."""
        return next((p for p in family(self.pid()) if "launch/elastic.py" in command_of(p)), 0)

    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    def forkserver(self) -> int:
        below = children(self.launcher())
        return next((p for p in below if "multiprocessing.forkserver" in command_of(p)), 0)

    def workers(self) -> list[int]:
        return children(self.forkserver())


@dataclass
class Job:
    """A run of the small model over ``hosts``; use as a context, which leaves no process."""

    folder: Path
    steps: int
    hosts: list[Host] = field(default_factory=lambda: [Host("only")])
    flags: Sequence[str] = ()
    turns: Sequence[Sequence[str]] = ((),)
    """Further flags; each start of a launcher takes the next in turn."""
    starts: int = 0

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def __enter__(self) -> Job:
        for host in self.hosts:
            self.start(host)
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            for pid in (*family(host.pid()),):
                kill(pid)
            if host.process is not None:
                host.process.wait(20)

    def start(self, host: Host) -> None:
        if host.process is not None:
            host.process.wait(20)
        scratch = self.folder / f"tmp_{host.name}"
        scratch.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)}
        alone = [
            sys.executable,
            "launch/elastic.py",
            "--standalone",
            "--nproc-per-node",
            "2",
            TRAIN,
        ]
        words = [*(host.command or alone), *TINY, *SMALL]
        words += ["--train.steps", str(self.steps), "--run.dir", str(self.run_dir)]
        words += ["--checkpoint.every", "5", "--train.deterministic", "True", *self.flags]
        words += self.turns[self.starts % len(self.turns)]
        self.starts += 1
        with open(self.folder / f"{host.name}.log", "ab") as log:
            host.process = subprocess.Popen(words, cwd=ROOT, env=env, stdout=log, stderr=log)

    def supervise(self) -> bool:
        """Start anew what was killed; whether all have ended by themselves."""
        for host in self.hosts:
            assert host.process is not None
            code = host.process.poll()
            if code is not None and code != 0:
                assert code in (-signal.SIGKILL, 128 + signal.SIGKILL), self.logs()
                self.start(host)
        return all(host.process is not None and host.process.poll() == 0 for host in self.hosts)

    def finish(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not self.supervise():
            assert time.monotonic() < deadline, f"no end in {limit_s} s\n{self.logs()}"
            time.sleep(0.05)

    def times(self) -> list[float]:
        """When each worker of each host made its newest step; 0: none since it was started."""
        found: list[float] = []
        for host in self.hosts:
            pages = [*(self.folder / f"tmp_{host.name}").glob("megalite_*/control")]
            if not pages:
                return [0.0]
            newest = max(pages, key=born)
            try:
                found += Control.of_launcher(newest).times
            except (OSError, ValueError):  # being removed, or just being made
                return [0.0]
        return found

    def wait_for_steps(self, since: float, limit_s: float = 60) -> float:
        """Until every rank has stepped after ``since``; how long after that was."""
        deadline = time.monotonic() + limit_s
        while True:
            times = self.times()
            if times and min(times) > since:
                return max(times) - since
            assert not self.supervise(), "the job is over"
            assert time.monotonic() < deadline, f"no step in {limit_s} s\n{self.logs()}"
            time.sleep(0.01)

    def logs(self) -> str:
        files = [self.folder / f"{host.name}.log" for host in self.hosts]
        return "\n".join(f"{f.name}:\n{f.read_text()[-3000:]}" for f in files if f.exists())

    def lines(self) -> list[dict[str, object]]:
        """What must not depend on what happened to the job."""
        found = read_lines(self.run_dir / "metrics.jsonl")
        return [{name: line[name] for name in SAME} for line in found]

    def layouts(self) -> list[str]:
        """Of each step."""
        return [line["layout"] for line in read_lines(self.run_dir / "metrics.jsonl")]

    def last_hashes(self) -> dict[str, str]:
        """The hash of every file of the last checkpoint: weights and optimizer state."""
        (path, *_) = sorted(self.run_dir.glob("checkpoints/step_*/manifest.json"), reverse=True)
        assert path.parent.name == f"step_{len(self.lines()):08d}"
        return {name: info.xxh3_128 for name, info in read_manifest(path).files.items()}

    def restores(self) -> Iterator[tuple[int, int]]:
        """Of each start after the first: (newest step known to be saved, step it began from)."""
        saved = 0
        for event in read_lines(self.run_dir / "events.jsonl")[1:]:
            if event["event"] == "save":
                saved = event["step"]
            elif event["event"] == "start":
                yield saved, event["step"]
                saved = event["step"]  # perhaps saved by one who was killed before it said so


def born(path: Path) -> float:
    try:
        return path.stat().st_ctime
    except OSError:
        return 0.0


def until(done: Callable[[], bool], job: Job, limit_s: float) -> float:
    """Wait for something; how long it took."""
    began = time.monotonic()
    while not done():
        assert time.monotonic() - began < limit_s, job.logs()
        time.sleep(0.1)
    return time.monotonic() - began


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def children(pid: int) -> list[int]:
    """Living children of a process, in the order of their birth."""
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    except OSError:
        pass
    return sorted(p for p in found if is_alive(p))


def family(pid: int) -> list[int]:
    """A process and all that it started, if it lives."""
    return [pid, *(q for p in children(pid) for q in family(p))] if is_alive(pid) else []


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
