"""Trainings in which a rank stops, or loops, at a given place until that is reported."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

REPORTED = '"event": "stall",'
LIMIT_S = 20.0


@dataclass(frozen=True)
class Planted:
    """What rank ``rank`` does in a step.

    Attributes:
        at: a method of ``Stage`` that is about to compute a microbatch, or what else it is at.
        step: 0: each of them.
        how: stop by SIGSTOP, or loop in Python, until there is a report; sleep for ``sleep_s``;
            note: write the children's processes into the run's directory, and with kill then end.
    """

    rank: int
    step: int
    at: Literal["forward", "backward", "data", "reduction", "totals", "save"]
    microbatch: int = -1
    how: Literal["stop", "loop", "sleep", "kill", "note"] = "stop"
    sleep_s: float = 0.0


def plant(
    planted: tuple[Planted, ...], run_dir: str, each_a_node: bool = False, look_every: int = 0
) -> None:
    """In a process that is about to train; perhaps as the only one of its node, and with another
    number of steps between two looks at all ranks' times."""
    if each_a_node:
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    from data.loader import TokenLoader
    from launch import build, figures, pretrain_gpt
    from megalite.data_parallel.reducer import GradReducer
    from megalite.pipeline.stage import Stage

    figures.EVERY = look_every or figures.EVERY
    now = {"step": 0}
    mine = [p for p in planted if p.rank == int(os.environ.get("RANK", "0"))]

    def wrap(owner: Any, name: str, at: str) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **options: Any) -> Any:
            microbatch = args[1] if isinstance(args[0], Stage) else -1
            for p in mine:
                if (p.at, p.microbatch) == (at, microbatch) and p.step in (0, now["step"]):
                    hold(p, Path(run_dir, "events.jsonl"))
            return inner(*args, **options)

        setattr(owner, name, outer)

    def train_step(training: Any, loader: Any, recorder: Any, step: int) -> None:
        now["step"] = step
        inner_step(training, loader, recorder, step)

    inner_step = pretrain_gpt.train_step
    pretrain_gpt.train_step = train_step
    wrap(Stage, "forward", "forward")
    wrap(Stage, "backward", "backward")
    wrap(TokenLoader, "batch", "data")
    wrap(GradReducer, "finish", "reduction")
    wrap(build, "step_totals", "totals")
    wrap(pretrain_gpt, "save_state", "save")


def planting(run_dir: Path, *planted: Planted, **options: Any) -> partial[None]:
    """What ``command.forked`` calls in each process."""
    return partial(plant, planted, str(run_dir), **options)


def hold(planted: Planted, events: Path) -> None:
    wanted = reports(events) + 1
    deadline = time.monotonic() + LIMIT_S
    if planted.how == "sleep":
        time.sleep(planted.sleep_s)
    elif planted.how in ("kill", "note"):
        pid = os.getpid()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        events.with_name("children").write_text(children)
        if planted.how == "kill":
            os.kill(pid, signal.SIGKILL)
    elif planted.how == "loop":
        while reports(events) < wanted and time.monotonic() < deadline:
            busy_until = time.monotonic() + 0.1
            while time.monotonic() < busy_until:
                pass
    else:
        count = f"grep -cs '{REPORTED}' {events}"
        wait = f"n=0; until [ $({count}) -ge {wanted} -o $n -ge {20 * LIMIT_S:.0f} ]"
        again = "do sleep 0.05; n=$((n+1)); done; sleep 0.2"
        subprocess.run(["sh", "-c", f"({wait}; {again}; kill -CONT {os.getpid()}) &"], check=True)
        os.kill(os.getpid(), signal.SIGSTOP)


def reports(events: Path) -> int:
    return events.read_text().count(REPORTED) if events.exists() else 0
