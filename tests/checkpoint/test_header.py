"""A shard and the manifest each say what the shard holds; where they differ it is not read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from megalite.checkpoint.load import open_checkpoint
from megalite.checkpoint.manifest import MANIFEST
from megalite.errors import CheckpointError
from megalite.slices import Piece
from tests.checkpoint.jobs import rewrite, save_job

FILE = "rank_00000_000.safetensors"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two shards with half of ``w`` and of ``v`` each; a scalar and a whole one in the first."""
    halves: list[list[Piece]] = [[], []]
    for name in ("w", "v"):
        for rank in range(2):
            half = torch.arange(12.0).reshape(2, 6) + rank + (name == "v")
            halves[rank].append(Piece(name, (4, 6), (2 * rank, 0), half))
    for name, tensor in (("scalar", torch.tensor(3.0)), ("whole", torch.ones(3).double())):
        halves[0].append(Piece(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor))
    return save_job(tmp_path, 10, halves)


def swap_names(doc: dict[str, Any]) -> None:
    tensors = doc["tensors"]
    tensors["w"], tensors["v"] = tensors["v"], tensors["w"]


def swap_places(doc: dict[str, Any]) -> None:
    w, v = (doc["tensors"][name]["chunks"][0] for name in ("w", "v"))
    for side in ("begin", "end"):
        w[side], v[side] = v[side], w[side]


def reshape(doc: dict[str, Any]) -> None:
    doc["tensors"]["w"]["shape"] = [4, 3, 2]
    for chunk in doc["tensors"]["w"]["chunks"]:
        chunk.update(offset=[*chunk["offset"], 0], extent=[2, 3, 2])


def transpose(doc: dict[str, Any]) -> None:
    doc["tensors"]["w"]["shape"] = [6, 4]
    for rank, chunk in enumerate(doc["tensors"]["w"]["chunks"]):
        chunk.update(offset=[0, 2 * rank], extent=[6, 2])


def relabel(doc: dict[str, Any]) -> None:
    doc["tensors"]["whole"]["dtype"] = "I64"


def shift(doc: dict[str, Any]) -> None:
    chunk = doc["tensors"]["whole"]["chunks"][0]
    chunk.update(begin=chunk["begin"] - 8, end=chunk["end"] - 8)


def forget(doc: dict[str, Any]) -> None:
    del doc["tensors"]["scalar"]


def other_halves(doc: dict[str, Any]) -> None:
    first, second = doc["tensors"]["w"]["chunks"]
    first["offset"], second["offset"] = second["offset"], first["offset"]


@pytest.mark.parametrize(
    "lie",
    [swap_names, swap_places, reshape, transpose, relabel, shift, forget, other_halves],
    ids=lambda lie: lie.__name__,
)
def test_a_manifest_that_says_other_than_the_shard_is_refused(
    checkpoint: Path, lie: Callable[[dict[str, Any]], None]
) -> None:
    rewrite(checkpoint, lie)
    open_checkpoint(checkpoint, verify="none")  # of itself it holds together
    with pytest.raises(CheckpointError, match="in the manifest") as caught:
        open_checkpoint(checkpoint)
    assert Path(caught.value.path).suffix == ".safetensors"


def test_the_tensor_and_both_sides_are_named(checkpoint: Path) -> None:
    rewrite(checkpoint, relabel)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(checkpoint)
    assert caught.value.path == str(checkpoint / FILE)
    assert "has F64 (3,) in bytes [" in caught.value.problem
    assert "as 'whole', and I64 (3,) in bytes [" in caught.value.problem


def rewrite_header(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Put another header before a shard's data, with the hash that it then has."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = change(data[8 : 8 + length])
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    info = {
        "size": path.stat().st_size,
        "xxh3_128": xxhash.xxh3_128(path.read_bytes()).hexdigest(),
    }
    rewrite(path.parent, lambda doc: doc["files"].update({path.name: info}))


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(b"F64", b"I64"),
        lambda text: b"x" * len(text),
        lambda text: b"[" * len(text),
        lambda text: b"[]".ljust(len(text)),
        lambda text: b'{"w":1}'.ljust(len(text)),
        lambda text: b'{"w":{"dtype":"F32","shape":3,"data_offsets":[0,8]}}'.ljust(len(text)),
        lambda text: b'{"w":{"dtype":"F32","shape":[3],"data_offsets":["a","b"]}}'.ljust(len(text)),
    ],
)
def test_a_shard_whose_own_header_lies_is_refused(
    checkpoint: Path, change: Callable[[bytes], bytes]
) -> None:
    rewrite_header(checkpoint / FILE, change)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(checkpoint)
    assert caught.value.path == str(checkpoint / FILE)


def test_a_header_that_claims_more_than_the_file_is_not_read(checkpoint: Path) -> None:
    path = checkpoint / FILE
    data = path.read_bytes()
    path.write_bytes((1 << 60).to_bytes(8, "little") + data[8:])
    info = {"size": len(data), "xxh3_128": xxhash.xxh3_128(path.read_bytes()).hexdigest()}
    rewrite(checkpoint, lambda doc: doc["files"].update({FILE: info}))
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        open_checkpoint(checkpoint)


def test_a_header_written_anew_without_a_lie_is_taken(checkpoint: Path) -> None:
    rewrite_header(checkpoint / FILE, lambda text: text)
    assert open_checkpoint(checkpoint).step == 10


def test_another_reader_finds_the_same(checkpoint: Path) -> None:
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    found: dict[str, Tensor] = {}
    for name in manifest["files"]:
        with safe_open(checkpoint / name, "pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert sorted(found) == [
        "scalar",
        "v[0:2,0:6]",
        "v[2:4,0:6]",
        "w[0:2,0:6]",
        "w[2:4,0:6]",
        "whole",
    ]
    assert torch.equal(found["whole"], torch.ones(3).double())
    assert torch.equal(found["w[2:4,0:6]"], torch.arange(12.0).reshape(2, 6) + 1)
