"""Files that are there whole or not at all, and the hashes that tell."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from megalite.errors import ConfigError

_ENDS = 4096


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there either whole or not at all, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_bytes(content)
        sync(aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def whole_directory(out: Path) -> Iterator[Path]:
    """A directory to fill, which is there as ``out`` when the context ends well, and else not.

    Files must have been synced. For one process at a time; what a killed one left is removed.

    Raises:
        ConfigError: if ``out`` exists and is not an empty directory, or cannot be made.
    """
    out = Path(os.path.abspath(out))
    scratch = out.with_name(f".{out.name}.partial")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError("--out", f"{out} exists already", "Remove it, or name another directory")
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        yield scratch
        sync(scratch)
        os.rename(scratch, out)
        sync(out.parent)
    except OSError as error:
        raise ConfigError(
            "--out", f"{out} cannot be written: {error.strerror}", "Name another place"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file's content, or a directory's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def hash_file(path: Path) -> str:
    """xxh3-128 of the content: against rot, not against forgery."""
    state = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            state.update(block)
    return state.hexdigest()


def hash_ends(path: Path) -> str:
    """xxh3-128 of the size and the first and last 4096 bytes: tells files apart without a scan."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        head = file.read(_ENDS)
        file.seek(max(0, size - _ENDS))
        return xxhash.xxh3_128_hexdigest(f"{size}:".encode() + head + file.read(_ENDS))
