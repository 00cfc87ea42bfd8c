"""Prepared shards as samples: windows of one token stream, and a mix of several streams.

A sample is ``seq + 1`` tokens, ``seq`` after the last one: the inputs of all samples in order are
the stream, each but the first token is a target once, and only a tail shorter than a window is
left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data.manifest import TOKENIZER, Manifest, Split, verify
from data.order import Interleave, Ints, mix, permute
from data.tokenizer import Tokenizer
from megalite.errors import ConfigError


class TokenDataset:
    """One split of a directory of prepared shards, memory-mapped."""

    def __init__(self, directory: Path, manifest: Manifest, name: str) -> None:
        self.directory, self.manifest = directory, manifest
        self.split: Split = manifest.splits[name]
        dtype = np.dtype(manifest.dtype).newbyteorder("<")
        paths = [directory / shard.file for shard in self.split.shards]
        self._shards = [np.memmap(path, dtype=dtype, mode="r") for path in paths]
        self._starts = np.cumsum([0, *(len(s) for s in self._shards)])

    @classmethod
    def open(cls, directory: str | Path, split: str = "train") -> TokenDataset:
        """Open without reading any token; the manifest, sizes and ends of files are checked.

        Raises:
            ConfigError: if the directory holds no such split, or a file is missing, truncated
                or foreign.
        """
        manifest = Manifest.read(Path(directory))
        if split not in manifest.splits or not manifest.splits[split].num_tokens:
            held = [name for name, s in manifest.splits.items() if s.num_tokens]
            raise ConfigError(
                "data.path",
                f"{directory} holds no split {split!r}, only {', '.join(held)}",
                "Prepare it with a --val-fraction above 0",
            )
        return cls(Path(directory), manifest, split)

    @property
    def num_tokens(self) -> int:
        return self.split.num_tokens

    @property
    def utf8_bytes(self) -> int:
        """Bytes of text that the tokens stand for; document borders have none."""
        return self.split.utf8_bytes

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer that made the shards; a copy lies beside them."""
        return self.directory / TOKENIZER

    def documents(self) -> npt.NDArray[np.int64]:
        """(num_documents + 1,) offsets of document starts in the stream, and its end."""
        return np.memmap(self.directory / self.split.documents.file, dtype="<i8", mode="r")

    def tokens(self, start: int, stop: int) -> Ints:
        """(stop - start,) ids of the stream, over shard borders.

        Raises:
            IndexError: unless 0 <= start <= stop <= num_tokens.
        """
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start} to {stop} of {self.num_tokens}")
        out = np.empty(stop - start, np.int64)
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        filled = 0
        while filled < len(out):
            at = start + filled - int(self._starts[shard])
            part = self._shards[shard][at : at + len(out) - filled]
            out[filled : filled + len(part)] = part
            filled += len(part)
            shard += 1
        return out

    def num_samples(self, seq: int) -> int:
        return max(0, (self.num_tokens - 1) // seq)

    def num_dropped(self, seq: int) -> int:
        """Tokens at the end that are in no sample."""
        samples = self.num_samples(seq)
        return self.num_tokens - (samples * seq + 1 if samples else 0)

    def sample(self, i: int, seq: int) -> Ints:
        """(seq + 1,) the i-th window; its first ``seq`` are inputs, its last ``seq`` targets.

        Raises:
            IndexError: unless 0 <= i < num_samples(seq).
        """
        if not 0 <= i < self.num_samples(seq):
            raise IndexError(f"sample {i} of {self.num_samples(seq)}")
        return self.tokens(i * seq, (i + 1) * seq + 1)


class Mixture:
    """Endless samples from several data sets of one tokenizer, in shares of ``weights``.

    Sample g is a pure function of (seed, g): no data set's order depends on the layout or on
    the steps before. Each data set is read in a new order every time it has been read once.
    """

    def __init__(self, datasets: Sequence[TokenDataset], weights: Sequence[float] = (1.0,)) -> None:
        if len(datasets) != len(weights):
            raise ValueError(f"{len(datasets)} data sets and {len(weights)} weights")
        self.datasets = tuple(datasets)
        self.interleave = Interleave(weights)
        first = self.datasets[0]
        for other in self.datasets[1:]:
            if other.manifest.tokenizer.xxh3_128 != first.manifest.tokenizer.xxh3_128:
                raise ConfigError(
                    "data.path",
                    f"{first.directory} and {other.directory} are of different tokenizers",
                    "Prepare all of them with one tokenizer",
                )

    @classmethod
    def open(cls, sources: Sequence[tuple[float, str]], split: str = "train") -> Mixture:
        """From (weight, directory) pairs.

        Raises:
            ConfigError: see ``TokenDataset.open``; or if there is no source, or tokenizers differ.
        """
        if not sources:
            raise ConfigError("data.path", "no prepared shards are named", "Set --data.path DIR")
        opened = [TokenDataset.open(directory, split) for _, directory in sources]
        return cls(opened, [weight for weight, _ in sources])

    def check(self, seq: int) -> None:
        """Refuse a sequence length that leaves a data set without a sample.

        Raises:
            ConfigError: names the data set.
        """
        for dataset in self.datasets:
            if not dataset.num_samples(seq):
                raise ConfigError(
                    "model.seq_length",
                    f"{dataset.directory} has {dataset.num_tokens} tokens, fewer than the "
                    f"{seq + 1} of one sample",
                    f"Use at most {dataset.num_tokens - 1}, or more text",
                )

    def locate(self, g: Ints, seq: int, seed: int) -> tuple[Ints, Ints]:
        """(data set, window in it) of each sample number, 0 .. without end."""
        source, turn = self.interleave.locate(g)
        window = np.empty_like(turn)
        for number, dataset in enumerate(self.datasets):
            epoch, at = np.divmod(turn, dataset.num_samples(seq))
            for e in np.unique(epoch[source == number]):
                mine = (source == number) & (epoch == e)
                key = mix(seed, number, int(e))
                window[mine] = permute(at[mine], dataset.num_samples(seq), key)
        return source, window

    def samples(self, g: Ints, seq: int, seed: int) -> Ints:
        """(len(g), seq + 1) the tokens of each sample number."""
        out = np.empty((len(g), seq + 1), np.int64)
        for row, (source, window) in enumerate(zip(*self.locate(g, seq, seed), strict=True)):
            out[row] = self.datasets[source].sample(int(window), seq)
        return out


def check_tokenizer(dataset: TokenDataset, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer other than the one that made the shards.

    Raises:
        ConfigError: gives both hashes.
    """
    made = dataset.manifest.tokenizer.xxh3_128
    if tokenizer.hash != made:
        raise ConfigError(
            "data.tokenizer",
            f"{dataset.directory} was made with another tokenizer "
            f"(hash {made[:12]}, this one has {tokenizer.hash[:12]})",
            f"Leave it empty to use {dataset.tokenizer_path}",
        )


__all__ = ["Mixture", "TokenDataset", "check_tokenizer", "permute", "verify"]
