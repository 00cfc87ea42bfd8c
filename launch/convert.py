"""Checkpoints to and from other programs: what ``tools/convert_checkpoint.py`` does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

import torch
from torch import Tensor

from data.files import sync, whole_directory, write_whole
from data.hf_tokenizer import hf_files
from data.manifest import TOKENIZER
from data.tokenizer import Tokenizer
from launch.state import Position, check_contents
from launch.stored import find_tokenizer, model_of, open_named, tokenizer_of
from megalite.checkpoint.load import Checkpoint, open_checkpoint
from megalite.checkpoint.manifest import DTYPES
from megalite.checkpoint.save import save
from megalite.errors import CheckpointError, ConfigError
from megalite.slices import Piece
from model.config import GPTConfig
from model.hf_files import read_config, read_pieces, write_model

TORCH_FILE = "model.pt"


def export_hf(path: Path, out: Path, tokenizer: str = "", max_file_bytes: int = 5 << 30) -> str:
    """Write a directory that ``transformers`` loads; what was written, in words.

    Raises:
        ConfigError, CheckpointError: for a checkpoint that is damaged, or of another kind of
            model, and an ``out`` that exists; nothing is left there.
    """
    checkpoint = open_named("--checkpoint", path, "all")
    model = model_of(path, checkpoint.extra)
    made = None
    if tokenizer or find_tokenizer(path):
        made = tokenizer_of(path, tokenizer, model)

    def read(wanted: Mapping[str, tuple[int, ...]]) -> Mapping[str, Tensor]:
        return _read(checkpoint, wanted)

    dtype = _dtype(checkpoint)
    with whole_directory(out) as folder:
        eod = None if made is None else made.eod
        names = write_model(folder, model, dtype, read, eod=eod, max_file_bytes=max_file_bytes)
        for name, content in ({} if made is None else hf_files(made, model.seq_length)).items():
            write_whole(folder / name, content)
            names.append(name)
    about = f"{out}: {model.num_parameters():,} parameters in {dtype}; {', '.join(names)}"
    return about + _about_tokenizer(made)


def _about_tokenizer(tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return f"\nno tokenizer: there is no {TOKENIZER} beside the run; name one with --tokenizer"
    if not tokenizer.exact:
        return (
            f"\n{TOKENIZER} is copied as it is: it was not made by tools/train_tokenizer.py, so "
            "whether transformers reads it alike is not known"
        )
    return ""


def export_torch(path: Path, out: Path) -> str:
    """Write the weights as tensors by global name, which ``torch.load(weights_only=True)`` reads,
    and the model's settings as JSON; what was written, in words."""
    checkpoint = open_named("--checkpoint", path, "all")
    model = model_of(path, checkpoint.extra)
    shapes = {name: checkpoint.manifest.tensors[name].shape for name in _weights(checkpoint)}
    with whole_directory(out) as folder:
        torch.save(dict(_read(checkpoint, shapes)), folder / TORCH_FILE)
        sync(folder / TORCH_FILE)
        write_whole(folder / "config.json", json.dumps(asdict(model), indent=1).encode())
    return f"{out / TORCH_FILE}: {len(shapes)} tensors"


def import_hf(source: Path, out: Path) -> str:
    """Write a checkpoint of step 0, without optimizer state; what a run with it has to say."""
    model = read_config(source)
    pieces = read_pieces(source, model)
    extra = {
        "position": asdict(Position()),
        "layout": "imported",
        "model": asdict(model),
        "reset_at_document": False,
        "loss_scale": None,
    }
    with whole_directory(out) as folder:
        path = save(folder, 0, pieces, extra)
        for file in path.iterdir():
            file.rename(folder / file.name)
        path.rmdir()
        if tokenizer := _foreign_tokenizer(source):
            write_whole(folder / TOKENIZER, tokenizer)
    told = "" if tokenizer else f"\nno {TOKENIZER} of sentencepiece there: text needs --tokenizer"
    return (
        f"{out}: {model.num_parameters():,} parameters. A run begins with it by\n"
        f"--checkpoint.resume {out} {_flags(model)}{told}"
    )


def _foreign_tokenizer(source: Path) -> bytes | None:
    """A sentencepiece model that lies beside the weights, if it can be used."""
    try:
        return Tokenizer.load(source / TOKENIZER).model
    except ConfigError:
        return None


def _flags(model: GPTConfig) -> str:
    """Every field as a flag: a configuration's own preset would fill what is left out."""
    names = [field.name for field in fields(model) if field.name != "preset"]
    return " ".join(f"--model.{name} {getattr(model, name)}" for name in names)


def verify(path: Path) -> tuple[str, list[CheckpointError]]:
    """Whether a checkpoint is whole, in words, and everything that is wrong with its files.

    Raises:
        CheckpointError: for a manifest that is missing, damaged or not fulfilled.
    """
    checkpoint = open_checkpoint(path, verify="none")
    bad: list[CheckpointError] = []
    for name in checkpoint.files_to_verify():
        try:
            checkpoint.verify([name])
        except CheckpointError as error:
            bad.append(error)
    files = checkpoint.manifest.files
    size = sum(file.size for file in files.values())
    state = f"bad: {len(bad)} of them" if bad else "whole, every hash is right"
    try:
        check_contents(checkpoint)
    except CheckpointError as error:
        state += f"\nnote: no run can go on from it: {error}"
    return (
        f"{path}: step {checkpoint.step}, {len(checkpoint.names)} tensors in {len(files)} files, "
        f"{size:,} bytes: {state}",
        bad,
    )


def _weights(checkpoint: Checkpoint) -> list[str]:
    return [name for name in checkpoint.names if not name.startswith("optim.")]


def _dtype(checkpoint: Checkpoint) -> torch.dtype:
    """That of the weights; the widest where an import had several."""
    found = {DTYPES[checkpoint.manifest.tensors[name].dtype] for name in _weights(checkpoint)}
    widest = sorted(found, key=str)[0]
    for dtype in found:
        widest = torch.promote_types(widest, dtype)
    return widest


def _read(checkpoint: Checkpoint, wanted: Mapping[str, tuple[int, ...]]) -> Mapping[str, Tensor]:
    """Whole tensors, in one dtype."""
    dtype = _dtype(checkpoint)
    found = {name: torch.empty(shape, dtype=dtype) for name, shape in wanted.items()}
    pieces = [Piece(n, tuple(t.shape), (0,) * t.dim(), t) for n, t in found.items()]
    checkpoint.read(pieces, cast=True)
    return found
