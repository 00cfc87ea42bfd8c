"""The files of prepared shards and the JSON manifest that describes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from data.files import hash_ends, hash_file
from megalite.errors import ConfigError

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.model"
_FORMAT = "megalite-tokens"
_VERSION = 1
_DTYPES = {"uint16": 2, "uint32": 4}


@dataclass(frozen=True)
class File:
    """A file beside the manifest. ``ends`` tells it from another one without reading all of it."""

    file: str
    bytes: int
    xxh3_128: str
    ends: str

    @classmethod
    def of(cls, path: Path) -> File:
        """Describe a file that is complete."""
        return cls(path.name, path.stat().st_size, hash_file(path), hash_ends(path))


@dataclass(frozen=True)
class Split:
    """One stream of tokens over ``shards``; ``documents`` holds the int64 token offsets at which
    documents start, and the end. Borders count as tokens, not as bytes of text."""

    shards: tuple[File, ...]
    documents: File
    num_documents: int
    num_tokens: int
    utf8_bytes: int


@dataclass(frozen=True)
class Manifest:
    """What a directory of shards holds.

    Attributes:
        dtype: ``uint16`` or ``uint32``, little-endian.
        tokenizer: the model file; its ``xxh3_128`` is the tokenizer's identity.
        splits: by name, ``train`` and ``val``.
        held_out: how the split was made, in words.
        settings: everything that decides the content; equal settings give equal shards.
        skipped_documents: documents without text.
        unknown_tokens: pieces that the tokenizer did not know.
    """

    dtype: str
    tokenizer: File
    vocab_size: int
    eod: int
    splits: dict[str, Split]
    held_out: str
    settings: dict[str, str]
    skipped_documents: int
    unknown_tokens: int

    @property
    def token_bytes(self) -> int:
        return _DTYPES[self.dtype]

    def files(self) -> list[File]:
        """Every file but the manifest."""
        splits = self.splits.values()
        return [self.tokenizer, *(f for s in splits for f in (*s.shards, s.documents))]

    def write(self, directory: Path) -> None:
        content = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        content["xxh3_128"] = _hash_content(content)
        (directory / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read and check a manifest and the sizes and ends of its files; reads no tokens.

        Raises:
            ConfigError: if there is none, or it or a file is missing, damaged or foreign.
        """
        path = directory / MANIFEST
        try:
            found = _parse(json.loads(path.read_bytes()))
        except OSError as error:
            raise _bad(directory, "there are no prepared shards") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _bad(path, f"the manifest is damaged or foreign ({error})") from error
        for file in found.files():
            _check(directory / file.file, file)
        return found


def verify(directory: Path) -> Manifest:
    """Read every byte and compare it with the manifest.

    Raises:
        ConfigError: names the first file that differs.
    """
    manifest = Manifest.read(directory)
    for file in manifest.files():
        if hash_file(directory / file.file) != file.xxh3_128:
            raise _bad(directory / file.file, "its content is not what was written")
    return manifest


def _check(path: Path, file: File) -> None:
    try:
        size = path.stat().st_size
        if size != file.bytes:
            raise _bad(path, f"it has {size} bytes, not the {file.bytes} that were written")
        if hash_ends(path) != file.ends:
            raise _bad(path, "it is another file than the one that was written")
    except OSError as error:
        raise _bad(path, error.strerror or str(error)) from error


def _parse(content: dict[str, Any]) -> Manifest:
    if content.pop("format") != _FORMAT:
        raise ValueError("another format")
    if (version := content.pop("version")) != _VERSION:
        raise ValueError(f"version {version}, this program reads {_VERSION}")
    stated = content.pop("xxh3_128")
    if stated != _hash_content({"format": _FORMAT, "version": _VERSION, **content}):
        raise ValueError("its own hash does not match")
    content["tokenizer"] = File(**content["tokenizer"])
    content["splits"] = {name: _split(split) for name, split in content["splits"].items()}
    manifest = Manifest(**content)
    for split in manifest.splits.values():
        if sum(s.bytes for s in split.shards) != split.num_tokens * manifest.token_bytes:
            raise ValueError("tokens and bytes do not fit")
        if split.documents.bytes != 8 * (split.num_documents + 1):
            raise ValueError("documents and bytes do not fit")
    if any(Path(f.file).name != f.file for f in manifest.files()):
        raise ValueError("a file name leaves the directory")
    return manifest


def _split(content: Mapping[str, Any]) -> Split:
    shards = tuple(File(**s) for s in content["shards"])
    return Split(**{**content, "shards": shards, "documents": File(**content["documents"])})


def _hash_content(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def _bad(path: Path, problem: str) -> ConfigError:
    return ConfigError(
        "data.path", f"{path}: {problem}", "Prepare it with tools/prepare_data.py, or name another"
    )
