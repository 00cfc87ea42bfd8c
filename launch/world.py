"""Who this process is: what torchrun or Slurm have put into the environment."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megalite.errors import ConfigError
from megalite.resilience.stop import VARIABLE

WHY = "MEGALITE_WHY"
"""The variable in which our launcher tells its workers why the round before theirs ended."""


@dataclass(frozen=True)
class World:
    """This process among those of the job, and among those of its node."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def world_from_env(env: Mapping[str, str] = os.environ) -> World:
    """What torchrun, or no launcher at all, has put into the environment.

    Raises:
        ConfigError: for incomplete variables, or where srun's tasks each start a job of their own.
    """
    rank, size = _whole(env, "RANK", 0), _whole(env, "WORLD_SIZE", 1)
    local_size = _whole(env, "LOCAL_WORLD_SIZE", size)
    world = World(rank, size, _whole(env, "LOCAL_RANK", rank), local_size)
    if not (rank < size and world.local_rank < local_size <= size):
        raise ConfigError("RANK", f"no process can be {world}", "Start the job with torchrun")
    steps = _whole(env, "SLURM_STEP_NUM_TASKS", 1)
    if size == 1 and steps > 1:
        raise ConfigError(
            "SLURM_STEP_NUM_TASKS",
            f"srun started {steps} tasks that know nothing of each other, each a run of its own",
            "Use launch/slurm.sbatch, or srun --ntasks-per-node=1 torchrun ...",
        )
    tasks = _tasks_per_node(env)
    if local_size > 1 and tasks > 1:
        raise ConfigError(
            "SLURM_NTASKS",
            f"srun starts {tasks} tasks a node and torchrun starts {local_size} processes in "
            f"each, {tasks * local_size} in all",
            "Drop srun's tasks (--ntasks-per-node=1), keep torchrun: launch/slurm.sbatch does so",
        )
    return world


def restarted(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this job ran before: Slurm has requeued it, or its workers are not the first."""
    first = 1 if VARIABLE in env else 0  # our launcher counts its rounds from 1
    rounds = _whole(env, "TORCHELASTIC_RESTART_COUNT", 0)
    return rounds > first or _whole(env, "SLURM_RESTART_COUNT", 0) > 0


def why_started(env: Mapping[str, str] = os.environ) -> str:
    """Why this process was started, as far as what started it says so."""
    if env.get(WHY):
        return env[WHY]
    if _whole(env, "SLURM_RESTART_COUNT", 0):
        return "requeued by Slurm"
    if VARIABLE not in env and _whole(env, "TORCHELASTIC_RESTART_COUNT", 0):
        return "torchrun started the workers anew"
    return "the job was started"


def _whole(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name) or str(default)
    if not text.isdecimal():
        raise ConfigError(name, f"{text!r} is no whole number", "Let torchrun or Slurm set it")
    return int(text)


def _tasks_per_node(env: Mapping[str, str]) -> int:
    """Slurm's tasks on a node: of the step if it says so, else of the job; 1 outside Slurm."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if counts := re.findall(r"(?:^|,)(\d+)", env.get(name, "")):  # such as 2(x3),1
            return max(map(int, counts))
    nodes = _whole(env, "SLURM_NNODES", 1)
    return math.ceil(_whole(env, "SLURM_NTASKS", 1) / max(nodes, 1))
