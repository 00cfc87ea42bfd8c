"""The configuration of a chosen layout, and the command that starts it."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml

from megalite.planner.estimate import Estimate, Estimator
from model.config import GPTConfig

CONFIG, SUBMIT = "config.yaml", "submit.sh"


def config_of(e: Estimate, model: GPTConfig, dtype: str) -> dict[str, Any]:
    """What ``launch/pretrain_gpt.py --config`` reads; data and optimizer are left to the user.

    A balanced partition is written out: what was simulated is what runs."""
    usual = GPTConfig()
    shown = {f.name: getattr(model, f.name) for f in fields(GPTConfig)}
    p = e.job.parallel
    kept = ("tp", "pp", "virtual_stages", "schedule", "sequence_parallel", "zero1", "recompute")
    parallel = {name: asdict(p)[name] for name in kept}
    layers = Estimator(e.job, e.machine).layers
    parallel["partition"] = "uniform" if p.partition == "uniform" else [len(r) for r in layers]
    return {
        "model": {k: v for k, v in shown.items() if v != getattr(usual, k)},
        "parallel": parallel,
        "train": {
            "global_batch_size": e.job.global_batch,
            "micro_batch_size": e.job.micro_batch,
            "dtype": dtype,
        },
    }


def command_of(e: Estimate, path: Path) -> str:
    """For Slurm, from the repository's root; which data is left to the user."""
    each = min(e.machine.hw.node_size, e.job.world_size)
    nodes = -(-e.job.world_size // each)
    start = f"sbatch --nodes {nodes} --gpus-per-node {each} launch/slurm.sbatch"
    return f"{start} --config {path} --data.path DIR"


def data_flag(e: Estimate) -> str:
    """What the configuration lacks, in words."""
    return (
        "add --data.path DIR (made by tools/prepare_data.py) to train, and to "
        f"tools/check_layout.py --world-size {e.job.world_size}"
    )


def write(e: Estimate, model: GPTConfig, dtype: str, folder: Path) -> list[Path]:
    """Config and submit script; the paths written."""
    folder.mkdir(parents=True, exist_ok=True)
    config, submit = folder / CONFIG, folder / SUBMIT
    head = (
        f"# {e.job.world_size} x {e.machine.hw.name}: {e.step_s:.4g} s a step and "
        f"{e.peak_bytes / 1e9:.1f} GB a GPU, as planned\n# The data are yours: {data_flag(e)}\n"
    )
    text = yaml.safe_dump(config_of(e, model, dtype), sort_keys=False)
    config.write_text(head + text, encoding="utf-8")
    submit.write_text(f"#!/usr/bin/env bash\n{command_of(e, config)}\n", encoding="utf-8")
    submit.chmod(0o755)
    return [config, submit]
