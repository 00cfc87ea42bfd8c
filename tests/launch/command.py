"""Runs the project's commands: as a user does, or in processes that have torch imported."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ranks import run_exits

ROOT = Path(__file__).resolve().parents[2]
TRAIN = "launch/pretrain_gpt.py"
TINY = ["--config", "launch/configs/gpt_tiny_cpu.yaml"]
SMALL = [
    *("--model.hidden_size", "32", "--model.num_heads", "4", "--model.ffn_hidden_size", "64"),
    *("--model.seq_length", "16", "--train.global_batch_size", "8"),
    *("--train.micro_batch_size", "1", "--train.dtype", "fp64", "--train.eval_every", "0"),
    *("--checkpoint.every", "0", "--run.wandb", "disabled", "--run.watchdog_s", "0"),
]


Change = Callable[[], object]


@dataclass
class Result:
    code: int
    output: str

    def last_lines(self, count: int = 20) -> str:
        return "\n".join(self.output.splitlines()[-count:])


def run(command: list[str], timeout_s: float = 120, **env: str) -> Result:
    """Run in the repository's root, its output and errors in one text, as on a screen."""
    full = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **env}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=full,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    return Result(done.returncode, done.stdout)


def launcher(ranks: int) -> list[str]:
    """Plain python for one rank, else torchrun."""
    if ranks == 1:
        return [sys.executable]
    module = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, *module]


def train(
    ranks: int,
    run_dir: Path,
    *flags: str,
    timeout_s: float = 120,
    as_user: bool = False,
    **env: str,
) -> Result:
    """The small model's training, in fp64, without evaluation, checkpoints, wandb and watchdog.

    Args:
        as_user: start it with the command that a user types, which takes seconds of imports a
            rank. Else its processes are forked from one that has imported all, where torchrun's
            variables are set and there is no agent.
        env: further variables, for a command that a user types.
    """
    words = [*TINY, *SMALL, "--run.dir", str(run_dir), *flags]
    if as_user or env:
        return run([*launcher(ranks), TRAIN, *words], timeout_s, **env)
    return forked(ranks, words, timeout_s)


def forked(
    ranks: int, words: list[str], timeout_s: float = 120, change: Change | None = None
) -> Result:
    """The training in processes forked from one that has imported all.

    Args:
        change: is called in each process before the training begins.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    codes, outputs = run_exits(ranks, be_pretrain, ranks, port, words, change, timeout_s=timeout_s)
    return Result(next(filter(None, codes), 0), "".join(outputs))


def be_pretrain(rank: int, ranks: int, port: int, words: list[str], change: Change | None) -> None:
    """One process of the training, started by something like torchrun."""
    os.chdir(ROOT)
    sys.argv = [TRAIN, *words]
    if ranks > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ |= {name: str(value) for name, value in place.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["HF_HUB_OFFLINE"] = "1"
    from launch.pretrain_gpt import main

    if change is not None:
        change()
    main(words)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """The events of one kind, in their order."""
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]
