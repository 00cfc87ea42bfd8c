"""Which documents are trained on and which are held out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data.order import mix, splitmix64
from data.sources import Documents
from megalite.errors import ConfigError

SPLITS = ("train", "val")
SHARD_TOKENS = 1 << 29


@dataclass(frozen=True)
class Packing:
    """How documents become shards.

    Attributes:
        val_fraction: share of documents that is held out.
        seed: which documents that are.
        shard_tokens: tokens a shard file, at most.
        num_workers: processes that tokenise; 0: one a core if there is enough to do.
    """

    val_fraction: float = 0.01
    seed: int = 0
    shard_tokens: int = SHARD_TOKENS
    num_workers: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.val_fraction <= 0.5:
            raise ConfigError(
                "--val-fraction",
                f"{self.val_fraction} is no share that can be held out",
                "Use 0.01",
            )
        if self.shard_tokens < 1:
            raise ConfigError("--shard-tokens", f"{self.shard_tokens} is below 1", "Leave it out")
        if self.num_workers < 0:
            raise ConfigError("--workers", f"{self.num_workers} is below 0", "Leave it out")


def split_texts(documents: Documents, packing: Packing) -> Iterator[tuple[str, str]]:
    """(split, text) of every document in order; the text of a missing one is empty.

    Held out are the documents with the smallest keys, a key being a hash of seed and position.
    A corpus that is one document is cut in two at a line.
    """
    if documents.count == 1 and packing.val_fraction:
        only = next(documents.batches())[0] or ""
        at = _cut(only, packing.val_fraction)
        yield from (("train", only[:at]), ("val", only[at:]))
        return
    held = _held_out(documents.count, packing)
    number = 0
    for batch in documents.batches():
        for text in batch:
            yield SPLITS[int(held[number])], text or ""
            number += 1


def _held_out(count: int, packing: Packing) -> npt.NDArray[np.bool_]:
    held = np.zeros(count, np.bool_)
    num_held = max(1, round(count * packing.val_fraction)) if packing.val_fraction else 0
    if 0 < num_held < count:
        keys = splitmix64(np.arange(count, dtype=np.uint64) ^ np.uint64(mix(packing.seed)))
        held[np.argpartition(keys, num_held)[:num_held]] = True
    return held


def _cut(text: str, val_fraction: float) -> int:
    """Where the tail begins: at the next line, if there is one."""
    at = int(len(text) * (1 - val_fraction))
    line = text.find("\n", at) + 1
    return line if 0 < line < len(text) else at


def explain(documents: Documents, packing: Packing) -> str:
    """What ``split_texts`` holds out, in words."""
    if not packing.val_fraction:
        return "nothing"
    if documents.count == 1:
        return f"the last {packing.val_fraction:.2%} of the only document, from the next line on"
    num_held = int(_held_out(documents.count, packing).sum())
    return (
        f"{num_held} of {documents.count} documents, those whose hash of position and seed "
        f"{packing.seed} is smallest"
    )
