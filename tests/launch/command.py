"""Runs the project's commands as a user does, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TRAIN = "launch/pretrain_gpt.py"
TINY = ["--config", "launch/configs/gpt_tiny_cpu.yaml"]
SMALL = [
    *("--model.hidden_size", "32", "--model.num_heads", "4", "--model.ffn_hidden_size", "64"),
    *("--model.seq_length", "16", "--train.global_batch_size", "8"),
    *("--train.micro_batch_size", "1", "--train.dtype", "fp64", "--train.eval_every", "0"),
    *("--checkpoint.every", "0", "--run.wandb", "disabled"),
]


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


def train(ranks: int, run_dir: Path, *flags: str, timeout_s: float = 120, **env: str) -> Result:
    """The small model's training, in fp64, without evaluation, checkpoints and wandb."""
    command = [*launcher(ranks), TRAIN, *TINY, *SMALL, "--run.dir", str(run_dir)]
    return run([*command, *flags], timeout_s, **env)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
