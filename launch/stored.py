"""A checkpoint that is read without its run: to generate, to convert, to begin another run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from data.manifest import TOKENIZER
from data.tokenizer import Tokenizer
from launch.config import Config
from launch.world import restarted
from megalite.checkpoint.load import Checkpoint, Verify, latest, open_checkpoint
from megalite.checkpoint.manifest import MANIFEST
from megalite.errors import CheckpointError, ConfigError
from model.config import GPTConfig


def open_named(field: str, path: Path, verify: Verify = "none") -> Checkpoint:
    """The checkpoint that ``field`` names; what is wrong with it is bad input.

    Raises:
        ConfigError: names the file, and where ``path`` holds checkpoints, the newest.
    """
    try:
        return open_checkpoint(path, verify)
    except CheckpointError as error:
        fix = "Name the directory of a checkpoint, such as RUN/checkpoints/step_00000010"
        inside = _checkpoints_in(path)
        raise ConfigError(
            field, str(error), f"Name a checkpoint, such as {inside[0]}" if inside else fix
        ) from error


def has_begun(cfg: Config) -> bool:
    """Whether ``run.dir`` holds a run that began as ``checkpoint.resume`` says, so that it goes on.

    With none a run begins anew each time that somebody starts it, but not when it is restarted.
    """
    wanted = cfg.checkpoint.resume
    if wanted == "auto" or (wanted == "none" and not restarted()):
        return False
    begun = wanted if wanted == "none" else str(Path(wanted).resolve())
    for path in latest(Path(cfg.run.dir, "checkpoints")):
        with suppress(CheckpointError, KeyError, TypeError):
            return bool(open_checkpoint(path, "none").extra["position"].get("begun") == begun)
    return False


def _checkpoints_in(path: Path) -> list[Path]:
    """Those of a run's directory or of a directory of checkpoints, newest first."""
    places = [place for place in (path, path / "checkpoints") if place.is_dir()]
    return [] if (path / MANIFEST).exists() else [c for place in places for c in latest(place)]


def model_of(path: Path, extra: Mapping[str, Any], field: str = "--checkpoint") -> GPTConfig:
    """The model that a checkpoint at ``path``, which ``field`` names, says it is of.

    Raises:
        ConfigError: if it says nothing, or what this version does not know.
    """
    known = {f.name: type(getattr(GPTConfig, f.name)) for f in fields(GPTConfig)}
    stored = extra.get("model")
    if not isinstance(stored, dict) or not stored:
        raise ConfigError(field, f"{path} does not say of which model it is", "Name one of a run")
    for name, value in stored.items():
        if known.get(name) is not type(value):
            raise ConfigError(
                field,
                f"{path} is of a model with {name} {value!r}, which this version does not know",
                "Use the version that wrote it",
            )
    return GPTConfig(**stored)


def find_tokenizer(path: Path) -> Path | None:
    """The tokenizer's file of a checkpoint: beside an import, or in the directory of its run."""
    for place in (path, path.absolute().parent.parent):
        if (place / TOKENIZER).is_file():
            return place / TOKENIZER
    return None


def tokenizer_of(path: Path, named: str, model: GPTConfig) -> Tokenizer:
    """The tokenizer of a checkpoint at ``path``, unless ``named``.

    Raises:
        ConfigError: if there is none, or it has more tokens than the model.
    """
    found = Path(named) if named else find_tokenizer(path)
    if found is None:
        raise ConfigError(
            "--tokenizer",
            f"there is no {TOKENIZER} in {path} nor in the directory of its run",
            "Name the tokenizer's file",
        )
    try:
        tokenizer = Tokenizer.load(found)
    except ConfigError as error:
        raise ConfigError("--tokenizer", error.problem, error.fix) from error
    if tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            "--tokenizer",
            f"{found} has {tokenizer.vocab_size} tokens, the model {model.vocab_size}",
            "Name the tokenizer that the model was trained with",
        )
    return tokenizer
