"""Directories of Hugging Face's GPT-2 and Llama: written and read one tensor at a time.

Of a foreign directory only config.json, the index and safetensors files are opened; a pickle never
is. What is written depends on the weights alone: equal weights of any layout give equal files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megalite.checkpoint.manifest import DTYPES
from megalite.checkpoint.save import blocks, write_file
from megalite.errors import CheckpointError, ConfigError
from megalite.slices import Piece
from model.config import GPTConfig
from model.hf import HfTensor, check_tie, config_from_hf, full_name, hf_config, hf_tensors

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
MAX_FILE_BYTES = 5 << 30
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Read = Callable[[Mapping[str, tuple[int, ...]]], Mapping[str, Tensor]]
"""Our global tensors of these names and shapes."""


# --- writing -----------------------------------------------------------------------------------


def write_model(
    folder: Path,
    cfg: GPTConfig,
    dtype: torch.dtype,
    read: Read,
    *,
    eod: int | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[str]:
    """Write config.json, generation_config.json and the weights; the names of the files.

    Args:
        read: gives the tensors that one of theirs is made of, in ``dtype``; no others are held.
        eod: the token that ends a text, if there is a tokenizer.
        max_file_bytes: more are cut into several files and an index.
    Raises:
        ConfigError: for a model that is neither a GPT-2 nor a Llama.
        CheckpointError: for a file that cannot be written.
    """
    listed = hf_tensors(cfg)
    groups = _groups(listed, dtype.itemsize, max_file_bytes)
    names = [WEIGHTS]
    if len(groups) > 1:
        names = [f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n in _numbers(groups)]
    settings = {**hf_config(cfg), "eos_token_id": eod, "dtype": str(dtype).partition(".")[2]}
    _write_json(folder / CONFIG, settings)
    _write_json(folder / GENERATION, {"eos_token_id": eod, "pad_token_id": eod})
    for name, group in zip(names, groups, strict=True):
        write_file(folder / name, _file_content(group, dtype, read))
    if len(groups) > 1:
        total = sum(_num_bytes(t, dtype.itemsize) for t in listed)
        placed = {t.name: n for n, group in zip(names, groups, strict=True) for t in group}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": placed})
        names.append(INDEX)
    return [CONFIG, GENERATION, *names]


def _numbers(groups: list[list[HfTensor]]) -> range:
    return range(1, len(groups) + 1)


def _num_bytes(tensor: HfTensor, item_bytes: int) -> int:
    return prod(tensor.shape) * item_bytes


def _groups(listed: list[HfTensor], item_bytes: int, most: int) -> list[list[HfTensor]]:
    """The tensors of each file; one that is larger than a file may be has one of its own."""
    groups: list[list[HfTensor]] = [[]]
    size = 0
    for tensor in listed:
        more = _num_bytes(tensor, item_bytes)
        if groups[-1] and size + more > most:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += more
    return groups


def _file_content(group: list[HfTensor], dtype: torch.dtype, read: Read) -> Iterator[memoryview]:
    """A safetensors file: 8 bytes of length, JSON, spaces to a multiple of 8, the tensors."""
    ends = list(accumulate((_num_bytes(t, dtype.itemsize) for t in group), initial=0))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for tensor, begin, end in zip(group, ends, ends[1:], strict=False):
        place = {"dtype": _NAMES[dtype], "shape": tensor.shape, "data_offsets": [begin, end]}
        header[tensor.name] = place
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for tensor in group:
        whole = tensor.join(read(tensor.parts))
        assert whole.dtype == dtype and tuple(whole.shape) == tensor.shape
        yield from blocks(whole)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    write_file(path, [memoryview(text.encode())])


# --- reading -----------------------------------------------------------------------------------


def read_config(folder: Path) -> GPTConfig:
    """The model of a directory.

    Raises:
        ConfigError: names what is missing, malformed, or not to be had in our model.
    """
    path = folder / CONFIG
    try:
        raw = json.loads(path.read_bytes())
    except OSError as error:
        raise _bad(f"{path}: {error.strerror}", "Name a directory of transformers") from error
    except ValueError as error:
        raise _bad(f"{path} is no JSON ({error})", "Correct it") from error
    if not isinstance(raw, dict):
        raise _bad(f"{path} holds no settings", "Correct it")
    return config_from_hf(raw)


def read_pieces(folder: Path, cfg: GPTConfig) -> list[Piece]:
    """Every tensor of ours, as views of the mapped files: nothing is read yet.

    Raises:
        ConfigError: for files that are missing, damaged, no safetensors, or not as the index says.
        CheckpointError: for a tensor that is missing, unknown, of another shape, or a head that
            differs from the embedding it is tied to.
    """
    listed = hf_tensors(cfg)
    known = {tensor.name: tensor.shape for tensor in listed}
    found: dict[str, Tensor] = {}
    for path in weight_files(folder):
        for name, tensor in _tensors(path):
            if (full := full_name(cfg, name, known)) is None:
                continue
            if full in found:
                raise _bad(f"{path} has {name} a second time", "Remove one of the files")
            found[full] = tensor
    check_tie(cfg, found)
    pieces = []
    for entry in listed:
        if entry.name not in found:
            raise CheckpointError(folder, f"{entry.name} is missing")
        tensor = found.pop(entry.name)
        if tuple(tensor.shape) != entry.shape:
            shapes = f"{tuple(tensor.shape)}, but {CONFIG} means {entry.shape}"
            raise CheckpointError(folder, f"{entry.name} has shape {shapes}")
        if tensor.dtype not in _NAMES:
            raise CheckpointError(folder, f"{entry.name} is of {tensor.dtype}, no plain float")
        for name, view in entry.views(tensor).items():
            pieces.append(Piece(name, tuple(view.shape), (0,) * view.dim(), view))
    if found:
        raise CheckpointError(folder, f"{next(iter(found))} has no place in the model of {CONFIG}")
    return pieces


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a directory, which are there and hold what the index lists.

    Raises:
        ConfigError: where not, and where there are only pickles.
    """
    if not (folder / INDEX).exists():
        if (folder / WEIGHTS).exists():
            return [folder / WEIGHTS]
        others = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth"))
        if others:
            raise _bad(
                f"{folder} holds {others[0]}, a pickle, which can run code when it is read",
                "Have transformers write it as safetensors: save_pretrained does",
            )
        raise _bad(f"{folder} holds no {WEIGHTS}", "Name a directory of transformers")
    placed = _index(folder / INDEX)
    for name in sorted(set(placed.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise _bad(f"{INDEX} names {name!r}, no safetensors file beside it", "Correct it")
        listed = {tensor for tensor, file in placed.items() if file == name}
        with _opened(folder / name) as file:
            inside = set(file.keys())
        if wrong := sorted(listed ^ inside):
            only = INDEX if wrong[0] in listed else name
            raise _bad(f"{wrong[0]} is only in {only}", "Get the directory anew")
    return [folder / name for name in sorted(set(placed.values()))]


def _index(path: Path) -> dict[str, str]:
    try:
        placed = json.loads(path.read_bytes())["weight_map"]
        if not all(isinstance(text, str) for pair in placed.items() for text in pair):
            raise TypeError("a name is no text")
        return dict(placed)
    except OSError as error:
        raise _bad(f"{path}: {error.strerror}", "Get the directory anew") from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise _bad(f"{path} is no index ({error})", "Get the directory anew") from error


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise _bad(f"{path}: {error}", "Get the file anew") from error


def _tensors(path: Path) -> Iterable[tuple[str, Tensor]]:
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118 - a file is no mapping
            yield name, file.get_tensor(name)


def _bad(problem: str, fix: str) -> ConfigError:
    return ConfigError("--from-hf", problem, fix)
