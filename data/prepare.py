"""Directories of memory-mapped token shards, made once.

A directory is written aside under a lock and renamed when it is complete, so it is there whole or
not at all, and processes that want the same one wait for the first.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from data.config import DataConfig, sources
from data.files import sync, write_whole
from data.manifest import MANIFEST, TOKENIZER, Manifest
from data.pack import pack
from data.sources import EmbeddedSource, Source
from data.split import Packing, split_texts
from data.tokenizer import Tokenizer, train_tokenizer
from megalite.errors import ConfigError

EMBEDDED = "embedded"
EMBEDDED_PATH = "corpora/embedded"
"""The last part of a directory's name that stands for the embedded corpus."""

EMBEDDED_VOCAB = 2048
_WAIT_S = 10.0

Say = Callable[[str], None]


def say_aloud(line: str) -> None:
    print(line, flush=True)


def prepare(
    source: Source,
    out: str | Path,
    *,
    tokenizer: str | Path | int,
    packing: Packing,
    say: Say = say_aloud,
) -> Manifest:
    """Make ``out`` from ``source``, or take it as it is if equal settings made it.

    Args:
        tokenizer: a model file, or the size of a vocabulary to be trained on the train split.

    Raises:
        ConfigError: if ``out`` holds anything else, or the source or the tokenizer cannot be read.
    """
    out = Path(os.path.abspath(out))
    settings = {
        **source.settings(),
        "tokenizer": f"trained, {tokenizer} pieces"
        if isinstance(tokenizer, int)
        else Tokenizer.load(tokenizer).hash,
        "val_fraction": repr(packing.val_fraction),
        "seed": str(packing.seed),
        "shard_tokens": str(packing.shard_tokens),
    }
    with _locked(out, say) as scratch:
        if (found := _existing(out, settings)) is not None:
            say(f"{out} is prepared already")
            return found
        started = time.monotonic()
        say(f"preparing {out} from {settings['source']}")
        documents = source.open(scratch / "cache")
        shards = scratch / "shards"
        shards.mkdir()
        if isinstance(tokenizer, int):
            texts = (t for name, t in split_texts(documents, packing) if name == "train")
            train_tokenizer(texts, tokenizer, shards / TOKENIZER)
        else:
            write_whole(shards / TOKENIZER, Path(tokenizer).read_bytes())
        manifest = pack(documents, shards, settings, packing, say)
        _appear(shards, out)
        say(f"{summary(manifest)} ({time.monotonic() - started:.1f} s)")
    return manifest


def prepare_default(
    out: str | Path, vocab_size: int = EMBEDDED_VOCAB, *, say: Say = say_aloud
) -> Manifest:
    """The embedded corpus with a tokenizer of its own, trained on the train split; 5 % held out."""
    packing = Packing(val_fraction=0.05, num_workers=1)
    return prepare(EmbeddedSource(), out, tokenizer=vocab_size, packing=packing, say=say)


def ensure_prepared(cfg: DataConfig, *, say: Say = say_aloud) -> None:
    """Prepare the embedded corpus where ``data.path`` is ``corpora/embedded`` and it is not there.

    Every process of a job may call this, before any process group exists: the first on each disk
    prepares, the others say what they wait for. Other missing directories are left to whoever
    opens them.

    Raises:
        ConfigError: if it cannot be prepared there.
    """
    for _, directory in sources(cfg):
        if Path(directory) == Path(EMBEDDED_PATH) and not Path(directory, MANIFEST).exists():
            try:
                prepare_default(directory, say=say)
            except ConfigError as error:
                raise ConfigError("data.path", error.problem, error.fix) from error


def summary(manifest: Manifest) -> str:
    """A line a split for the console."""
    lines = [
        f"{name}: {s.num_tokens:,} tokens of {s.utf8_bytes:,} bytes in {s.num_documents:,} texts"
        for name, s in manifest.splits.items()
    ]
    lines.append(
        f"held out: {manifest.held_out}; {manifest.skipped_documents} texts were empty; "
        f"{manifest.unknown_tokens} unknown pieces"
    )
    return "\n".join(lines)


def _existing(out: Path, settings: dict[str, str]) -> Manifest | None:
    """The shards that are there already, if these settings made them."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    fix = "Remove it, or name another directory"
    if not (out / MANIFEST).exists():
        raise ConfigError("--out", f"{out} exists and holds no prepared shards", fix)
    found = Manifest.read(out)
    names = sorted({*found.settings, *settings})
    changed = [
        f"{n} {found.settings.get(n)!r} -> {settings.get(n)!r}"
        for n in names
        if found.settings.get(n) != settings.get(n)
    ]
    if changed:
        raise ConfigError("--out", f"{out} was made otherwise: {'; '.join(changed)}", fix)
    return found


def _appear(shards: Path, out: Path) -> None:
    """Rename a complete directory into place; it survives a power cut from here on."""
    sync(shards)
    os.rename(shards, out)
    sync(out.parent)


@contextmanager
def _locked(out: Path, say: Say) -> Iterator[Path]:
    """An empty directory beside ``out``, for one process on this disk at a time.

    The lock ends with its process, however that ends; what a killed one left is removed.
    """
    scratch = out.with_name(f".{out.name}.partial")
    with _open_lock(out) as lock:
        started, told = time.monotonic(), -_WAIT_S
        while not _try_lock(lock.fileno(), out):
            waited = time.monotonic() - started
            if waited - told >= _WAIT_S:
                told = waited
                say(f"waiting for another process to prepare {out} ({waited:.0f} s)")
            time.sleep(0.1)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _open_lock(out: Path) -> IO[str]:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return open(out.with_name(f".{out.name}.lock"), "w")
    except OSError as error:
        raise ConfigError(
            "--out", f"{out} cannot be made ({error.strerror})", "Name another directory"
        ) from error


def _try_lock(handle: int, out: Path) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(
            "--out",
            f"the file system of {out} has no file locks ({error.strerror})",
            "Prepare on another disk and copy the directory",
        ) from error
    return True
