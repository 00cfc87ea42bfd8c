"""The trainer, to which faults happen at named points, each once: a script for any launcher.

The variable MEGALITE_TEST_FAULTS names a JSON file with ``[[how, point, rank, step], ...]``; beside
it a directory for each fault says that it has happened.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

from data.loader import TokenLoader  # noqa: E402
from launch import build, pretrain_gpt  # noqa: E402
from launch.record import Recorder  # noqa: E402
from megalite.checkpoint import background, save  # noqa: E402
from megalite.data_parallel.reducer import GradReducer  # noqa: E402
from megalite.optim.adamw import AdamW  # noqa: E402
from megalite.pipeline.stage import Stage  # noqa: E402

OWNERS: dict[str, list[tuple[Any, str]]] = {
    "data": [(TokenLoader, "batch")],
    "forward": [(Stage, "forward")],
    "input gradient": [(Stage, "input_grad")],
    "weight gradient": [(Stage, "weight_grad")],
    "reduction": [(GradReducer, "finish")],
    "totals": [(build, "step_totals")],
    "optimizer": [(AdamW, "step")],
    "record": [(Recorder, "step")],
    "save": [(pretrain_gpt, "save_state")],
    "write": [(save, "write_part"), (background, "write_part")],
    "commit": [(save, "commit"), (background, "commit")],
    "restore": [(pretrain_gpt, "restore")],
}
FILE = Path(os.environ["MEGALITE_TEST_FAULTS"])
FAULTS = json.loads(FILE.read_text())
NOW = {"step": 0}


def happen(how: str, point: str) -> None:
    if how == "raise":
        raise ZeroDivisionError(f"planted at {point}")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "slow":
        time.sleep(1.0)
    elif how == "stop":
        subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        drop_connections()


def drop_connections() -> None:
    """Cut every connection of this process, as a network does."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as one:
                one.getpeername()
                one.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is no socket, or not connected
            pass


def due(point: str) -> list[str]:
    """The faults that are to happen now, marked as happened."""
    found = []
    for n, (how, where, rank, step) in enumerate(FAULTS):
        mark, before = FILE.with_name(f"happened_{n}"), FILE.with_name(f"happened_{n - 1}")
        # A save behind the training may come to its end some steps later.
        now = before.exists() if point == "restore" else 0 <= NOW["step"] - step < 5
        if where == point and now and rank == int(os.environ["RANK"]) and not mark.exists():
            mark.mkdir()
            found.append(how)
    return found


def wrap(owner: Any, name: str, point: str) -> None:
    inner = getattr(owner, name)

    def outer(*args: Any, **options: Any) -> Any:
        for how in due(point):
            happen(how, point)
        return inner(*args, **options)

    setattr(owner, name, outer)


for point, owners in OWNERS.items():
    for owner in owners:
        wrap(*owner, point)
train_step = pretrain_gpt.train_step


def stepping(training: Any, loader: Any, recorder: Any, step: int) -> None:
    NOW["step"] = step
    train_step(training, loader, recorder, step)


pretrain_gpt.train_step = stepping
pretrain_gpt.main(sys.argv[1:])
