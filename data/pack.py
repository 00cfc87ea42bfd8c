"""Documents to shard files: tokenise on several cores, append in order."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data.files import sync, write_whole
from data.manifest import TOKENIZER, File, Manifest, Split
from data.order import Ints
from data.sources import Documents
from data.split import SPLITS, Packing, explain, split_texts
from data.tokenizer import Tokenizer
from megalite.errors import ConfigError

_WORK_BYTES = 1 << 18
_POOL_BYTES = 32 << 20
_SAY_S = 10.0


def pack(
    documents: Documents,
    shards: Path,
    settings: dict[str, str],
    packing: Packing,
    say: Callable[[str], None],
) -> Manifest:
    """Fill the directory ``shards``, which holds the tokenizer, and describe it in its manifest.

    Args:
        settings: what decides the content, for the manifest.

    Raises:
        ConfigError: if a split that was asked for has no text.
    """
    tokenizer = Tokenizer.load(shards / TOKENIZER)
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    writers = {name: _SplitWriter(shards, name, packing.shard_tokens) for name in SPLITS}
    skipped, unknown, done, said = [0], 0, 0, time.monotonic()
    works = _works(split_texts(documents, packing), skipped)
    for part in _tokenise_all(works, shards / TOKENIZER, dtype, _workers(documents, packing)):
        writers[part.split].add(part)
        unknown += part.unknown
        done += part.utf8_bytes
        if time.monotonic() - said > _SAY_S:
            said = time.monotonic()
            say(f"tokenised {done / 1e6:,.0f} of about {documents.num_bytes / 1e6:,.0f} MB")
    splits = {name: writer.close() for name, writer in writers.items()}
    for name in SPLITS[: 2 if packing.val_fraction else 1]:
        if not splits[name].num_tokens:
            fix = "Name more text" + (", or --val-fraction 0" if name == "val" else "")
            raise ConfigError("--source", f"no text is left for {name}", fix)
    manifest = Manifest(
        dtype=dtype,
        tokenizer=File.of(shards / TOKENIZER),
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        splits=splits,
        held_out=explain(documents, packing),
        settings=settings,
        skipped_documents=skipped[0],
        unknown_tokens=unknown,
    )
    manifest.write(shards)
    return manifest


@dataclass(frozen=True)
class _Work:
    """Documents of one split."""

    split: str
    texts: list[str]


@dataclass(frozen=True)
class _Tokenised:
    """A work's documents one after the other, each with its border; ``lengths`` in tokens."""

    split: str
    tokens: npt.NDArray[np.unsignedinteger]
    lengths: Ints
    utf8_bytes: int
    unknown: int


def _tokenise(tokenizer: Tokenizer, dtype: str, work: _Work) -> _Tokenised:
    ids = [[*tokenizer.encode(text), tokenizer.eod] for text in work.texts]
    flat = np.array([i for one in ids for i in one], np.dtype(dtype).newbyteorder("<"))
    lengths = np.array([len(one) for one in ids], np.int64)
    size = sum(len(text.encode()) for text in work.texts)
    unknown = int((flat == tokenizer.unknown).sum()) if tokenizer.unknown >= 0 else 0
    return _Tokenised(work.split, flat, lengths, size, unknown)


def _works(texts: Iterator[tuple[str, str]], skipped: list[int]) -> Iterator[_Work]:
    """Gather documents to pieces of work; counts those without text in ``skipped``."""
    waiting: dict[str, list[str]] = {name: [] for name in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    for name, text in texts:
        if not text:
            skipped[0] += 1
            continue
        waiting[name].append(text)
        sizes[name] += len(text)
        if sizes[name] >= _WORK_BYTES:
            yield _Work(name, waiting[name])
            waiting[name], sizes[name] = [], 0
    yield from (_Work(name, rest) for name, rest in waiting.items() if rest)


def _workers(documents: Documents, packing: Packing) -> int:
    if packing.num_workers:
        return packing.num_workers
    return os.cpu_count() or 1 if documents.num_bytes > _POOL_BYTES else 1


def _tokenise_all(
    works: Iterator[_Work], model: Path, dtype: str, num_workers: int
) -> Iterator[_Tokenised]:
    """Results in the order of ``works``, with a bounded number of them under way."""
    if num_workers == 1:
        yield from map(partial(_tokenise, Tokenizer.load(model), dtype), works)
        return
    # Not forked: this process may have threads, of arrow for one.
    context = multiprocessing.get_context("spawn")
    under_way: deque[Future[_Tokenised]] = deque()
    with ProcessPoolExecutor(
        num_workers, mp_context=context, initializer=_start_worker, initargs=(str(model), dtype)
    ) as pool:
        for work in works:
            under_way.append(pool.submit(_work, work))
            if len(under_way) > 4 * num_workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()


_worker: Callable[[_Work], _Tokenised]


def _start_worker(model: str, dtype: str) -> None:
    global _worker
    _worker = partial(_tokenise, Tokenizer.load(model), dtype)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(work: _Work) -> _Tokenised:
    return _worker(work)


class _SplitWriter:
    """Appends tokens to shard files of bounded size."""

    def __init__(self, directory: Path, name: str, shard_tokens: int) -> None:
        self.directory, self.name, self.shard_tokens = directory, name, shard_tokens
        self.num_tokens = self.utf8_bytes = 0
        self._lengths: list[Ints] = [np.zeros(1, np.int64)]

    def add(self, part: _Tokenised) -> None:
        tokens = part.tokens
        while len(tokens):
            shard, filled = divmod(self.num_tokens, self.shard_tokens)
            fitting = tokens[: self.shard_tokens - filled]
            with open(self._path(shard), "ab") as file:
                file.write(fitting.tobytes())
            self.num_tokens += len(fitting)
            tokens = tokens[len(fitting) :]
        self._lengths.append(part.lengths)
        self.utf8_bytes += part.utf8_bytes

    def close(self) -> Split:
        """Describe what was written, once it is on the disk."""
        paths = [self._path(shard) for shard in range(-(-self.num_tokens // self.shard_tokens))]
        for path in paths:
            sync(path)
        offsets = np.cumsum(np.concatenate(self._lengths)).astype("<i8")
        documents = self.directory / f"{self.name}_documents.bin"
        write_whole(documents, offsets.tobytes())
        return Split(
            tuple(map(File.of, paths)),
            File.of(documents),
            len(offsets) - 1,
            self.num_tokens,
            self.utf8_bytes,
        )

    def _path(self, shard: int) -> Path:
        return self.directory / f"{self.name}_{shard:05d}.bin"
