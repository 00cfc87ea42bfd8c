"""What a checkpoint directory holds, the proof that it is whole, and how ranks agree about it.

``step_00000010/`` holds safetensors files and ``manifest.json``, which lists each file's size and
hash and each global tensor's dtype, shape and chunks. A chunk is a rectangle of the global tensor
and the bytes of one file that hold it, in row-major order. Nothing else is ever opened.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash

from megalite.checkpoint.piece import inside, miscounted
from megalite.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
BLOCK_BYTES = 8 << 20
MAX_DIMS = 8
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
}
_FILE_NAME = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)

T = TypeVar("T")
Share = Callable[[str], list[str]]
"""All-gather of a short string: every rank's, in rank order. The only communication here."""


def alone(text: str) -> list[str]:
    """The ``Share`` of a job of one rank."""
    return [text]


def together(share: Share, action: Callable[[], T]) -> T:
    """Run ``action`` on every rank; if it fails on any, every rank raises the same error.

    No rank goes on, or waits for one that failed, so this is a barrier too.

    Raises:
        CheckpointError: the problem of the first rank that had one.
    """
    results: list[T] = []
    failure: Exception | None = None
    report = ""
    try:
        results.append(action())
    except CheckpointError as error:
        failure, report = error, json.dumps([error.path, error.problem])
    except Exception as error:  # a rank that only died here would leave the others waiting
        failure, report = error, json.dumps(["checkpoint", f"{type(error).__name__}: {error}"])
    for rank, text in enumerate(reports := share(report)):
        if text:
            path, problem = json.loads(text)
            where = f" (rank {rank})" if len(reports) > 1 else ""
            raise CheckpointError(path, problem + where) from failure
    return results[0]


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn an operating system's error into a ``CheckpointError`` that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(path, error.strerror or str(error)) from error


@dataclass(frozen=True)
class FileInfo:
    """Size in bytes and xxh3-128 in hex of a file."""

    size: int
    xxh3_128: str


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a global tensor, in bytes [begin, end) of ``file``."""

    file: str
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Entry:
    """A global tensor; ``dtype`` is a key of ``DTYPES``."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk]


@dataclass
class Manifest:
    """All that a checkpoint holds, or one rank's part of it; ``extra`` is any JSON data."""

    step: int
    files: dict[str, FileInfo] = field(default_factory=dict)
    tensors: dict[str, Entry] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, entry: Entry, path: Path) -> None:
        """Add chunks of a tensor; ``path`` is named where they contradict the earlier ones."""
        found = self.tensors.setdefault(name, Entry(entry.dtype, entry.shape, []))
        if (found.dtype, found.shape) != (entry.dtype, entry.shape):
            both = f"{found.dtype} {list(found.shape)} and {entry.dtype} {list(entry.shape)}"
            raise CheckpointError(path, f"ranks disagree about {name!r}: {both}")
        found.chunks.extend(entry.chunks)

    def check(self, directory: Path) -> None:
        """Prove that the files are there, alone and of the right size, and every tensor whole.

        Raises:
            CheckpointError: naming the file.
        """
        for name, info in self.files.items():
            check_regular(directory / name, info.size)
        with naming(directory):
            present = {name for name in os.listdir(directory) if name.endswith(".safetensors")}
        for name in sorted(present - self.files.keys()):
            raise CheckpointError(directory / name, "is not in the manifest")
        for name, entry in self.tensors.items():
            self._check_entry(directory / MANIFEST, name, entry)

    def _check_entry(self, path: Path, name: str, entry: Entry) -> None:
        if entry.dtype not in DTYPES or len(entry.shape) > MAX_DIMS:
            raise CheckpointError(path, f"{name!r}: no support for {entry.dtype} {entry.shape}")
        for c in entry.chunks:
            if c.file not in self.files:
                raise CheckpointError(path, f"{name!r} is in {c.file!r}, which is not listed")
            num_bytes = prod(c.extent) * DTYPES[entry.dtype].itemsize
            if c.end - c.begin != num_bytes or c.end > self.files[c.file].size:
                span = f"bytes [{c.begin}, {c.end}) of {c.file} do not hold"
                raise CheckpointError(path, f"{name!r}: {span} {entry.dtype} {c.extent}")
            if not inside(entry.shape, c.offset, c.extent):
                raise CheckpointError(path, f"{name!r} of {entry.shape} has no {c}")
        wrong = miscounted(entry.shape, [(c.offset, c.extent) for c in entry.chunks])
        if wrong:
            at, times = wrong
            raise CheckpointError(path, f"{name!r}: element {at} is stored {times} times")

    def to_json(self) -> bytes:
        """The text of a manifest file, with a hash of its own content."""
        files = {n: {"size": f.size, "xxh3_128": f.xxh3_128} for n, f in self.files.items()}
        tensors = {name: _plain(entry) for name, entry in self.tensors.items()}
        # What JSON makes of the extra, so that the hash is that of a reader.
        extra = json.loads(json.dumps(self.extra))
        known = {"format": FORMAT, "step": self.step}
        hashed = _hash({**known, "files": files, "tensors": tensors, "extra": extra})
        head = json.dumps({"xxh3_128": hashed, **known}, indent=1).removesuffix("\n}")
        parts = (f' "{n}": {_lines(x)}' for n, x in (("files", files), ("tensors", tensors)))
        return ",\n".join([head, *parts, f' "extra": {json.dumps(extra)}\n}}']).encode()


def _plain(entry: Entry) -> dict[str, Any]:
    chunks = [vars(chunk) for chunk in entry.chunks]
    return {"dtype": entry.dtype, "shape": entry.shape, "chunks": chunks}


def _lines(table: Mapping[str, object]) -> str:
    """A line an entry, for a person and for speed: with an indent, json takes its slow encoder."""
    if not table:
        return "{}"
    lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items())
    return "{\n" + ",\n".join(lines) + "\n }"


def _hash(document: dict[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(document, sort_keys=True).encode()).hexdigest()


def read_manifest(path: Path) -> Manifest:
    """Parse a manifest file and check its own hash (not yet what it says: ``Manifest.check``)."""
    check_regular(path)
    with naming(path):
        text = path.read_bytes()
    try:
        document = json.loads(text)
        if document["format"] != FORMAT:
            problem = f"has format {document['format']!r}; this version reads format {FORMAT}"
            raise CheckpointError(path, problem)
        if document.pop("xxh3_128") != _hash(document):
            raise CheckpointError(path, "was changed after it was written (its hash is wrong)")
        return _parse(document)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        problem = f"is not a manifest ({type(error).__name__}: {error})"
        raise CheckpointError(path, problem) from error


def _parse(document: dict[str, Any]) -> Manifest:
    found = Manifest(_int(document["step"]), extra=dict(document["extra"]))
    for name, info in document["files"].items():
        found.files[_file_name(name)] = FileInfo(_int(info["size"]), str(info["xxh3_128"]))
    for name, entry in document["tensors"].items():
        chunks = [_chunk(**chunk) for chunk in entry["chunks"]]
        found.tensors[name] = Entry(str(entry["dtype"]), _ints(entry["shape"]), chunks)
    return found


def _chunk(file: str, offset: list[int], extent: list[int], begin: int, end: int) -> Chunk:
    return Chunk(_file_name(file), _ints(offset), _ints(extent), _int(begin), _int(end))


def _file_name(name: str) -> str:
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the plain name of a safetensors file")
    return name


def _int(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a size")
    return value


def _ints(values: Iterable[object]) -> tuple[int, ...]:
    return tuple(_int(value) for value in values)


def check_regular(path: Path, size: int | None = None) -> None:
    """Refuse what is no regular file (a link could lead anywhere) or has another size."""
    with naming(path):
        found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(path, "is not a regular file")
    if size is not None and found.st_size != size:
        raise CheckpointError(path, f"has {found.st_size} bytes, the manifest says {size}")


def check_hash(path: Path, info: FileInfo) -> None:
    """Read the whole file and compare its hash."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(BLOCK_BYTES))
    with naming(path), open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    if digest.hexdigest() != info.xxh3_128:
        raise CheckpointError(path, "is damaged or not the file that was saved (hash differs)")
