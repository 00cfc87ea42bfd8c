"""The directory of a run: what says which run it holds, and who may take it up."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from data.dataset import Mixture
from data.files import hash_file, write_whole
from data.manifest import MANIFEST, TOKENIZER
from launch.config import CONFIG, DATA, Config, check_same_run
from launch.stored import has_begun, model_of, open_named
from megalite.config import to_yaml
from megalite.errors import ConfigError
from megalite.schedule.action import Plan
from megalite.schedule.lower import as_written
from megalite.schedule.render import render_text

SCHEDULE = "schedule.txt"
_TRACES = ("checkpoints", "metrics.jsonl", "eval.jsonl", "events.jsonl")


def data_identity(data: Mixture) -> list[str]:
    """A hash of each data set's manifest, which itself has those of the shards."""
    return [hash_file(dataset.directory / MANIFEST) for dataset in data.datasets]


def check_run_dir(cfg: Config, data: Mixture) -> list[str]:
    """Whether this run may write in ``run.dir``; before anything starts.

    Returns:
        what differs and may, for the log.
    Raises:
        ConfigError: if the directory holds another run, other data, or something else.
    """
    folder = Path(cfg.run.dir)
    try:
        told = _check_contents(cfg, data, folder)
        _check_writable(folder)
        return told
    except OSError as error:
        raise ConfigError(
            "run.dir",
            f"{folder} cannot be used: {error.strerror}",
            "Name a directory that exists or can be made",
        ) from error


def _check_contents(cfg: Config, data: Mixture, folder: Path) -> list[str]:
    if not (folder / CONFIG).exists():
        found = [name for name in _TRACES if (folder / name).exists()]
        if found:
            raise ConfigError(
                "run.dir",
                f"{folder} has {' and '.join(found)} but no {CONFIG} that says of which run",
                "Name another directory, or put the run's config.yaml back",
            )
        folder.mkdir(parents=True, exist_ok=True)  # the last check: whether it can be made
        return []
    told = [
        f"taking up {folder} with {name} {new} (was {old})"
        for name, old, new in check_same_run(cfg, folder / CONFIG)
    ]
    if (folder / DATA).exists():
        if _data_before(folder / DATA) != data_identity(data):
            raise ConfigError(
                "data.path",
                f"the shards are not those that {folder} began with: they were prepared anew",
                "Put the old shards back, or begin in another --run.dir",
            )
    return told


def _data_before(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            "run.dir",
            f"{path} does not say with which data the run began: it is no JSON",
            "Remove it if data.path names the same shards as then, or name another directory",
        ) from error


def _check_writable(folder: Path) -> None:
    """What is written first is written by one rank, when the others have joined already."""
    files = [folder / name for name in (CONFIG, DATA, "lock", *_TRACES[1:])]
    wrong = next((f for f in files if f.exists() and not f.is_file()), None)
    if wrong is None and (folder / _TRACES[0]).exists() and not (folder / _TRACES[0]).is_dir():
        wrong = folder / _TRACES[0]
    if wrong:
        raise ConfigError("run.dir", f"{wrong} is something else", "Name another directory")
    for path in (folder, *filter(Path.exists, files)):
        if not os.access(path, os.W_OK):
            raise ConfigError(
                "run.dir", f"{path} cannot be written", "Name a directory that can be written"
            )


def write_run_dir(cfg: Config, data: Mixture) -> None:
    """Say which run this directory holds; the first thing that a run writes."""
    folder = Path(cfg.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / DATA, json.dumps(data_identity(data)).encode())
    tokenizer = Path(cfg.data.tokenizer or data.datasets[0].tokenizer_path)
    write_whole(folder / TOKENIZER, tokenizer.read_bytes())
    write_whole(folder / CONFIG, to_yaml(cfg).encode())


def write_schedule(folder: Path, plan: Plan) -> None:
    """The schedule that runs now, as ``file:PATH`` reads it: ``auto`` finds another plan in other
    times."""
    write_whole(folder / SCHEDULE, render_text(as_written(plan)).encode())


def check_named_checkpoint(cfg: Config) -> None:
    """Whether the directory of ``checkpoint.resume``, if one is named, fits the model.

    Raises:
        ConfigError: if it is no checkpoint, or of a model of another shape.
    """
    if cfg.checkpoint.resume in ("auto", "none") or has_begun(cfg):
        return
    path = Path(cfg.checkpoint.resume)
    extra = open_named("checkpoint.resume", path).extra
    stored = model_of(path, extra, "checkpoint.resume") if "model" in extra else cfg.model
    ours = asdict(cfg.model.explicit())
    for name, value in asdict(stored.explicit()).items():
        if name not in ("preset", "dropout", "init_std") and ours[name] != value:
            raise ConfigError(
                f"model.{name}",
                f"the checkpoint {cfg.checkpoint.resume} is of a model with {name} {value}, "
                f"not {ours[name]}",
                f"Use --model.{name} {value}, or another checkpoint",
            )
