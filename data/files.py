"""Files that are there whole or not at all, and the hashes that tell."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

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
