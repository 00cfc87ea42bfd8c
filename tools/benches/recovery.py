"""kill -9 of one rank until every rank has stepped again: our launcher beside plain torchrun."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megalite.resilience.stop import VARIABLE, Control
from tools.benches.ranks import BenchError
from tools.benches.rows import Goal, Row, Sample

ROOT = Path(__file__).resolve().parents[2]
RANKS, KILLS, PEER_KILLS, LIMIT_S = 4, 20, 7, 60.0
OURS = ["launch/elastic.py", "--standalone", "--nproc-per-node", str(RANKS)]
PLAIN = ["-m", "torch.distributed.run", *OURS[1:], "--max-restarts", str(PEER_KILLS)]
RUN = [
    *("launch/pretrain_gpt.py", "--config", "launch/configs/gpt_tiny_cpu.yaml"),
    *("--train.steps", "100000", "--train.eval_every", "0", "--train.micro_batch_size", "2"),
    *("--model.hidden_size", "64", "--model.num_heads", "4", "--model.ffn_hidden_size", "128"),
    *("--model.seq_length", "32", "--checkpoint.every", "10", "--run.wandb", "disabled"),
]


def run() -> list[Row]:
    """The goal holds the time of the checkpoint's load on our side, too: it is a few ms here."""
    limit = Sample((1.0,))
    with tempfile.TemporaryDirectory(prefix="recover_", dir="/tmp") as folder:
        ours = Sample(tuple(measure(OURS, Path(folder, "ours"), KILLS)))
        plain = Sample(tuple(measure(PLAIN, Path(folder, "plain"), PEER_KILLS)))
    name = f"kill -9 of one of {RANKS} ranks to all stepping, s"
    return [
        Row(f"{name}; peer: the goal", ours, limit, Goal("at most", 1.0)),
        Row(f"{name}; peer: torchrun", ours, plain, inverse=True),
    ]


def measure(launcher: list[str], folder: Path, kills: int) -> Iterator[float]:
    """The time of each kill."""
    folder.mkdir()
    control, rng = folder / "control", random.Random(1)
    Control.create(control, RANKS)
    with running(launcher, folder, control) as process:
        wait(process, folder, control, 0.0)
        for _ in range(kills):
            time.sleep(rng.uniform(0.1, 0.6))
            workers = workers_of(process.pid)
            struck = time.time()
            os.kill(rng.choice(workers), signal.SIGKILL)
            yield wait(process, folder, control, struck) - struck


@contextmanager
def running(launcher: list[str], folder: Path, control: Path) -> Iterator[subprocess.Popen[bytes]]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), VARIABLE: str(control)}
    words = [sys.executable, *launcher, *RUN, "--run.dir", str(folder / "run")]
    with open(folder / "log", "ab") as log:
        process = subprocess.Popen(words, cwd=ROOT, env=env, stdout=log, stderr=log)
    try:
        yield process
    finally:
        for pid in (process.pid, *workers_of(process.pid)):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def wait(process: subprocess.Popen[bytes], folder: Path, control: Path, since: float) -> float:
    """When the last of all ranks has stepped after ``since``."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        # Our launcher has a file of its own; torchrun's workers write into the given one.
        page = next(folder.glob("megalite_*/control"), control)
        times = Control.of_launcher(page).times
        if min(times) > since:
            return max(times)
        if process.poll() is not None or time.monotonic() > deadline:
            raise BenchError(f"no recovery:\n{(folder / 'log').read_text()[-3000:]}")
        time.sleep(0.002)


def workers_of(pid: int) -> list[int]:
    """The processes below a launcher that train."""
    commands = {child: Path(f"/proc/{child}/cmdline").read_text() for child in children(pid)}
    server = [child for child, words in commands.items() if "multiprocessing.forkserver" in words]
    if server:
        return children(server[0])
    return [child for child, words in commands.items() if "resource_tracker" not in words]


def children(pid: int) -> list[int]:
    """The child processes of a living one."""
    return [child for task in Path(f"/proc/{pid}/task").iterdir() for child in _children(task)]


def _children(task: Path) -> list[int]:
    return [int(word) for word in (task / "children").read_text().split()]
