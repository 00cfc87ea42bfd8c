"""Writing a checkpoint: complete or absent, never half.

Each rank writes its files and its part of the manifest into ``step_00000010.tmp``. When all have
succeeded, rank 0 joins the parts, proves that every tensor is whole, and renames the directory.
A crash at any moment leaves the earlier checkpoints and perhaps a ``.tmp`` (removed by the next
save). An existing checkpoint of the same step waits as ``.old`` while it is replaced.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from megalite.checkpoint.header import Stored, make_header
from megalite.checkpoint.manifest import (
    BLOCK_BYTES,
    DTYPES,
    MANIFEST,
    Entry,
    FileInfo,
    Manifest,
    Share,
    alone,
    naming,
    read_manifest,
    together,
)
from megalite.checkpoint.piece import inside
from megalite.errors import CheckpointError
from megalite.slices import Piece

MAX_FILE_BYTES = 4 << 30
EARLY_BYTES = 64 << 20
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LEFTOVER = re.compile(r"(step_\d{8,})\.(tmp|trash|old)")


def save(
    directory: Path,
    step: int,
    pieces: Iterable[Piece],
    extra: Mapping[str, Any],
    *,
    rank: int = 0,
    world_size: int = 1,
    share: Share = alone,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Write ``directory/step_XXXXXXXX``; collective over ``share``. Returns its path.

    Args:
        pieces: what this rank must write, in host or device memory; those with ``owner`` false
            are left out. Over all ranks, each element of each tensor exactly once.
        extra: all that is no tensor; that of rank 0 is written. Anything JSON can hold.
        max_file_bytes: a rank begins another file above this size.
    Raises:
        CheckpointError: the same on every rank; the earlier checkpoints are still good.
    """
    final = directory / f"step_{step:08d}"
    tmp = directory / f"{final.name}.tmp"
    try:
        together(share, lambda: prepare(tmp) if rank == 0 else None)
        together(share, lambda: write_part(tmp, rank, step, pieces, max_file_bytes))
        together(share, lambda: commit(tmp, final, world_size, extra) if rank == 0 else None)
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(tmp, ignore_errors=True)
        raise
    return final


def discard(path: Path) -> None:
    """Remove a checkpoint so that it is never seen half: renamed aside first, then deleted."""
    trash = path.with_name(f"{path.name.removesuffix('.old')}.trash")
    with naming(path):
        if trash.exists():
            shutil.rmtree(trash)
        os.rename(path, trash)
        shutil.rmtree(trash)


def clean(directory: Path) -> None:
    """Undo what saves and removals that were cut short left; only while no save runs."""
    for path in directory.iterdir():
        found = _LEFTOVER.fullmatch(path.name)
        if found and found[2] == "old" and not path.with_name(found[1]).exists():
            os.rename(path, path.with_name(found[1]))
        elif found:
            shutil.rmtree(path)


def prepare(tmp: Path) -> None:
    """Make the directory into which all ranks write, and remove what earlier saves left."""
    with naming(tmp.parent):
        tmp.parent.mkdir(parents=True, exist_ok=True)
        clean(tmp.parent)
        tmp.mkdir()


def _part(tmp: Path, rank: int) -> Path:
    return tmp / f"rank_{rank:05d}.json"


def write_part(
    tmp: Path, rank: int, step: int, pieces: Iterable[Piece], max_file_bytes: int
) -> None:
    """Write this rank's files, then its part of the manifest."""
    part = Manifest(step)
    owned = [piece for piece in pieces if piece.owner]
    for piece in owned:
        dtype = _NAMES.get(piece.tensor.dtype)
        if dtype is None or not inside(piece.shape, piece.offset, piece.tensor.shape):
            found = f"{piece.tensor.dtype} {tuple(piece.tensor.shape)} at {piece.offset}"
            raise CheckpointError(tmp, f"{piece.name!r} of {piece.shape}: cannot store {found}")
        part.add(piece.name, Entry(dtype, piece.shape, []), tmp)
    for index, group in enumerate(_groups(owned, max_file_bytes)):
        path = tmp / f"rank_{rank:05d}_{index:03d}.safetensors"
        header, chunks = make_header(path, map(_stored, group), step)
        for piece, chunk in zip(group, chunks, strict=True):
            part.tensors[piece.name].chunks.append(chunk)
        tensors = chain.from_iterable(blocks(piece.tensor) for piece in group)
        part.files[path.name] = write_file(path, chain([memoryview(header)], tensors))
    write_file(_part(tmp, rank), [memoryview(part.to_json())])


def _stored(piece: Piece) -> Stored:
    dtype, extent = _NAMES[piece.tensor.dtype], tuple(piece.tensor.shape)
    return piece.name, dtype, piece.shape, piece.offset, extent


def _groups(pieces: list[Piece], max_file_bytes: int) -> list[list[Piece]]:
    """The pieces of each file, wide dtypes first: so each tensor is aligned to its items."""
    groups: list[list[Piece]] = []
    size = 0
    for piece in sorted(pieces, key=lambda p: -p.tensor.itemsize):
        if piece.tensor.nbytes == 0:
            continue
        if not groups or size + piece.tensor.nbytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += piece.tensor.nbytes
    return groups


def blocks(tensor: Tensor) -> Iterator[memoryview]:
    """A tensor's bytes in row-major order, a few megabytes at a time.

    Memory of the host that is contiguous is passed on as it is; of all else, one block at a time
    is copied.
    """
    tensor = tensor.detach()
    limit = BLOCK_BYTES // tensor.itemsize
    if tensor.is_contiguous():
        for part in torch.split(tensor.reshape(-1), limit):
            yield _memory(part.cpu())
    elif rows := limit // tensor[0].numel():
        for part in torch.split(tensor, rows):
            yield from blocks(part.contiguous())
    else:
        for row in tensor:
            yield from blocks(row)


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of the host, which lives as long as they do.

    ``numpy()`` would do as well, but forbids for good to resize the storage, as a live change of
    layout does to free it.
    """
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def write_file(path: Path, data: Iterable[memoryview]) -> FileInfo:
    """Write a new file and see it on the disk; its hash is taken on the way.

    A second thread sees to it that the disk is at work while blocks are copied and hashed, or it
    would have all of them to write at the end.
    """
    digest, size, since = xxhash.xxh3_128(), 0, 0
    begun: Future[None] | None = None
    with naming(path), ThreadPoolExecutor(1, "write-back") as early:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            for block in data:
                digest.update(block)
                size, since = size + len(block), since + len(block)
                while block:
                    block = block[os.write(descriptor, block) :]
                if since >= EARLY_BYTES and (begun is None or begun.done()):
                    _raise(begun)
                    begun, since = early.submit(os.fsync, descriptor), 0
            _raise(begun)
            os.fsync(descriptor)
        finally:
            if begun:
                wait([begun])
            os.close(descriptor)
    return FileInfo(size, digest.hexdigest())


def _raise(begun: Future[None] | None) -> None:
    """What failed in writing back: the kernel tells of it once only."""
    if begun is not None:
        begun.result()


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(tmp: Path, final: Path, world_size: int, extra: Mapping[str, Any]) -> None:
    """Join the parts of all ranks, prove that every tensor is whole, and give it its name."""
    parts = [_part(tmp, rank) for rank in range(world_size)]
    whole = Manifest(int(final.name.removeprefix("step_")), extra=dict(extra))
    for path in parts:
        part = read_manifest(path)
        whole.files.update(part.files)
        for name, entry in part.tensors.items():
            whole.add(name, entry, path)
    whole.check(tmp)
    old = final.with_name(f"{final.name}.old")
    with naming(final):
        for path in parts:
            os.unlink(path)
        write_file(tmp / MANIFEST, [memoryview(whole.to_json())])
        _sync_directory(tmp)
        if final.exists():
            os.rename(final, old)
        os.rename(tmp, final)
        _sync_directory(final.parent)
        if old.exists():
            discard(old)
