from __future__ import annotations

import pytest

from launch.world import World, why_started, world_from_env
from megalite.errors import ConfigError

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def test_the_world_is_torchruns_or_one_process() -> None:
    assert world_from_env({}) == World(0, 1, 0, 1)
    assert world_from_env(TORCHRUN) == World(5, 8, 1, 4)


@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "1"},
        {**TORCHRUN, "RANK": "8"},
        {**TORCHRUN, "LOCAL_RANK": "4"},
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "16"},
        {**TORCHRUN, "WORLD_SIZE": "eight"},
        {**TORCHRUN, "RANK": "-1"},
    ],
)
def test_an_impossible_world_is_refused(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        world_from_env(env)


@pytest.mark.parametrize(
    "slurm",
    [
        {"SLURM_NTASKS": "8"},
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "3", "SLURM_NNODES": "2"},
        {"SLURM_NTASKS_PER_NODE": "4"},
        {"SLURM_STEP_TASKS_PER_NODE": "1,4(x2)"},
    ],
)
def test_two_launchers_are_told_apart(slurm: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="Drop srun's tasks .* keep torchrun"):
        world_from_env({**TORCHRUN, **slurm})


@pytest.mark.parametrize(
    "slurm",
    [
        {"SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_PROCID": "1"},
        {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
    ],
)
def test_one_task_a_node_is_one_launcher(slurm: dict[str, str]) -> None:
    assert world_from_env({**TORCHRUN, **slurm}) == World(5, 8, 1, 4)


def test_tasks_of_srun_without_torchrun_are_refused() -> None:
    with pytest.raises(ConfigError, match="srun started 8 tasks"):
        world_from_env({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0"})
    assert world_from_env({"SLURM_NTASKS": "8"}) == World()


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({}, "the job was started"),
        ({"MEGALITE_CONTROL": "x", "TORCHELASTIC_RESTART_COUNT": "1"}, "the job was started"),
        ({"MEGALITE_WHY": "a node was lost", "SLURM_RESTART_COUNT": "1"}, "a node was lost"),
        ({"SLURM_RESTART_COUNT": "2"}, "requeued by Slurm"),
        ({"TORCHELASTIC_RESTART_COUNT": "2"}, "torchrun started the workers anew"),
    ],
)
def test_the_start_of_a_run_has_a_reason(env: dict[str, str], why: str) -> None:
    assert why_started(env) == why
