"""The header of a safetensors file: written from its chunks, and compared with the manifest's.

8 bytes of length, then JSON that gives each tensor's dtype, shape and place after the header
(https://huggingface.co/docs/safetensors, "Format"). So a file can be read without its manifest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

from megalite.checkpoint.manifest import DTYPES, Chunk, Manifest, naming
from megalite.errors import CheckpointError

_METADATA = "__metadata__"
Stored = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Name, dtype and shape of a tensor, offset and extent of the rectangle that a file has of it."""


def make_header(path: Path, stored: Iterable[Stored], step: int) -> tuple[bytes, list[Chunk]]:
    """The header of ``path``, padded with spaces to a multiple of 8 bytes, and its chunks.

    Raises:
        CheckpointError: for a rectangle that comes twice.
    """
    listed = list(stored)
    sizes = [DTYPES[dtype].itemsize * prod(extent) for _, dtype, _, _, extent in listed]
    ends = list(accumulate(sizes, initial=0))
    header: dict[str, Any] = {_METADATA: {"format": "megalite", "step": str(step)}}
    for (name, dtype, shape, offset, extent), begin, end in zip(
        listed, ends, ends[1:], strict=False
    ):
        key = _key(name, shape, offset, extent)
        if key in header:
            raise CheckpointError(path, f"{key!r} is to be written twice")
        header[key] = {"dtype": dtype, "shape": extent, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    chunks = [
        Chunk(path.name, offset, extent, base + begin, base + end)
        for (_, _, _, offset, extent), begin, end in zip(listed, ends, ends[1:], strict=False)
    ]
    return len(text).to_bytes(8, "little") + text, chunks


def expected_headers(manifest: Manifest) -> dict[str, dict[str, tuple[object, ...]]]:
    """What each file holds after the manifest: key to (dtype, shape, first byte, last byte + 1)."""
    found: dict[str, dict[str, tuple[object, ...]]] = {name: {} for name in manifest.files}
    for name, entry in manifest.tensors.items():
        for chunk in entry.chunks:
            key = _key(name, entry.shape, chunk.offset, chunk.extent)
            found[chunk.file][key] = (entry.dtype, chunk.extent, chunk.begin, chunk.end)
    return found


def check_header(path: Path, expected: dict[str, tuple[object, ...]]) -> None:
    """Prove that a file says of itself what the manifest says of it.

    Raises:
        CheckpointError: naming the file and a tensor about which they differ.
    """
    found = _read(path)
    if found == expected:
        return
    for key in sorted(found.keys() | expected.keys()):
        if found.get(key) != expected.get(key):
            own, told = (_words(side.get(key)) for side in (found, expected))
            raise CheckpointError(path, f"has {own} as {key!r}, and {told} in the manifest")


def _words(entry: tuple[object, ...] | None) -> str:
    if entry is None:
        return "nothing"
    dtype, shape, begin, end = entry
    return f"{dtype} {shape} in bytes [{begin}, {end})"


def _read(path: Path) -> dict[str, tuple[object, ...]]:
    with naming(path), open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise CheckpointError(path, f"is no safetensors file (a header of {length} bytes)")
        text = file.read(length)
    try:
        return {
            key: (
                entry["dtype"],
                tuple(entry["shape"]),
                *(8 + length + place for place in entry["data_offsets"]),
            )
            for key, entry in json.loads(text).items()
            if key != _METADATA
        }
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CheckpointError(path, f"is no safetensors file ({error})") from error


def _key(
    name: str, shape: tuple[int, ...], offset: tuple[int, ...], extent: tuple[int, ...]
) -> str:
    """The name in the safetensors file: a cut tensor's has its rectangle, ``w[0:4,8:16]``."""
    if extent == shape:
        return name
    return f"{name}[{','.join(f'{o}:{o + e}' for o, e in zip(offset, extent, strict=True))}]"
