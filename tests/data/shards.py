"""Small prepared directories for tests, with tokens and documents that the test chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.dataset import TokenDataset
from data.manifest import TOKENIZER, File, Manifest, Split
from data.sources import Documents

EOD = 1
TEXTS = [f"Document {i}\nhas the words of line {i * i}.\n" for i in range(40)]


@dataclass(frozen=True)
class Listed:
    """A source that is a list."""

    texts: tuple[str | None, ...]
    name: str = "a list"

    def settings(self) -> dict[str, str]:
        return {"source": self.name}

    def open(self, cache: Path) -> Documents:
        return Documents(len(self.texts), 0, lambda: iter([self.texts]))


SOURCE = Listed(tuple(TEXTS))


def write_shards(
    directory: Path,
    documents: Sequence[Sequence[int]],
    *,
    shard_tokens: int = 1 << 20,
    model: bytes = b"a tokenizer",
    name: str = "train",
) -> TokenDataset:
    """A directory with one split; each document is followed by ``EOD``."""
    directory.mkdir(parents=True)
    (directory / TOKENIZER).write_bytes(model)
    stream = np.array([t for document in documents for t in (*document, EOD)], "<u2")
    shards = []
    for number, start in enumerate(range(0, len(stream), shard_tokens)):
        path = directory / f"{name}_{number:05d}.bin"
        stream[start : start + shard_tokens].tofile(path)
        shards.append(File.of(path))
    offsets = directory / f"{name}_documents.bin"
    np.cumsum([0, *(len(d) + 1 for d in documents)]).astype("<i8").tofile(offsets)
    split = Split(tuple(shards), File.of(offsets), len(documents), len(stream), 3 * len(stream))
    Manifest(
        dtype="uint16",
        tokenizer=File.of(directory / TOKENIZER),
        vocab_size=1 << 16,
        eod=EOD,
        splits={name: split},
        held_out="nothing",
        settings={},
        skipped_documents=0,
        unknown_tokens=0,
    ).write(directory)
    return TokenDataset.open(directory, name)


def counting_shards(directory: Path, num_tokens: int, **more: int) -> TokenDataset:
    """One document 2, 3, 4, ... so that ``num_tokens`` counts its border too."""
    return write_shards(directory, [range(2, num_tokens + 1)], **more)  # type: ignore[arg-type]
