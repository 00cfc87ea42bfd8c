"""Which tokens are read, and how they are mixed. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalite.errors import ConfigError


@dataclass(frozen=True)
class DataConfig:
    """Prepared shards and the tokenizer that made them."""

    path: tuple[str, ...] = ()
    """Directories of prepared shards, each DIR or WEIGHT:DIR (weights as shares of samples)."""
    tokenizer: str = ""
    """A tokenizer's file; empty: the one beside the first directory's shards."""
    reset_at_document: bool = False
    """Start attention and positions anew at each document."""


def sources(cfg: DataConfig) -> list[tuple[float, str]]:
    """(weight, directory) of each entry of ``data.path``, as given; the weight of DIR is 1.

    Raises:
        ConfigError: for an empty directory, or a weight that is not a finite number above 0.
    """
    return [_source(entry) for entry in cfg.path]


def _source(entry: str) -> tuple[float, str]:
    weight, colon, directory = entry.partition(":")
    try:
        share = float(weight) if colon else 1.0
    except ValueError:  # a colon inside the directory's own name
        share, directory, colon = 1.0, entry, ""
    directory = directory if colon else entry
    if not directory or not math.isfinite(share) or share <= 0:
        raise ConfigError(
            "data.path",
            f"{entry!r} is no directory with a weight above 0",
            "Write DIR or WEIGHT:DIR, such as 0.7:corpora/a",
        )
    return share, directory
