"""The saves of a run, one after another, each at once or behind the training.

Behind the training the state is copied first, so that what is written is that of the step, and a
thread of each rank writes the copy. The threads send nothing, for the ranks are in the middle of
steps: a rank that has written its part leaves a mark in the directory, and rank 0's thread waits
for all marks before it commits.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.load import FOR_GOOD, prune
from megalite.checkpoint.manifest import Share, naming, together
from megalite.checkpoint.save import MAX_FILE_BYTES, commit, prepare, save, write_part
from megalite.errors import CheckpointError
from megalite.slices import Piece

_POLL_S = 0.02


@dataclass(frozen=True)
class Saved:
    """How a save ended.

    Attributes:
        path: of the checkpoint; nothing is there if there is an error.
        seconds: from the call to the commit. stalled_s: how long the caller had to wait.
        error: why the save failed; the checkpoints before it are still good.
        warning: what else went wrong: old checkpoints that could not be removed.
    """

    step: int
    path: Path
    seconds: float
    stalled_s: float
    error: CheckpointError | None = None
    warning: str = ""


@dataclass
class _Job:
    """A save that is under way in the background, as one rank sees it."""

    step: int
    since: float
    stalled_s: float = 0.0
    written: threading.Event = field(default_factory=threading.Event)
    given_up: threading.Event = field(default_factory=threading.Event)
    error: CheckpointError | None = None  # of this rank's part, or of all
    saved: Saved | None = None  # when all is done, on rank 0
    thread: threading.Thread | None = None


class Saver:
    """Writes the checkpoints of a run into ``directory``.

    A save that fails is told and not raised: training can go on, and the checkpoints before it
    are still good.

    Args:
        share: see ``manifest``; ``save`` and ``wait`` are collective over it.
        background: copy the state and write while training goes on. The copy, as much memory of
            the host as this rank writes, is kept for the next save.
        keep, keep_every: see ``load.prune``.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        world_size: int,
        share: Share,
        background: bool = False,
        keep: int = 2,
        keep_every: int = 0,
    ) -> None:
        self.directory, self.background = directory, background
        self.rank, self.world_size, self.share = rank, world_size, share
        self.keep, self.keep_every = keep, keep_every
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._job: _Job | None = None
        self._ended: list[Saved] = []

    def save(self, step: int, pieces: Iterable[Piece], extra: Mapping[str, Any]) -> None:
        """Save, or begin to, once the save before is over; as ``save.save``."""
        job = _Job(step, time.monotonic())
        if self.keep_every and step % self.keep_every == 0:
            extra = {**extra, FOR_GOOD: True}
        self.wait()
        try:
            if self.background:
                self._begin(job, pieces, extra)
                return
            where = {"rank": self.rank, "world_size": self.world_size}
            save(self.directory, step, pieces, extra, share=self.share, **where)
        except CheckpointError as error:
            job.error = error
        job.stalled_s = time.monotonic() - job.since
        self._ended.append(self._outcome(job))

    def finished(self) -> list[Saved]:
        """The saves that have ended since the last call, as far as this rank knows: rank 0 knows
        at once, the others when they wait. Sends nothing and waits for nothing."""
        if self._job and self._job.saved:
            self._ended.append(self._job.saved)
            self._job.saved = None
        ended, self._ended = self._ended, []
        return ended

    def wait(self) -> None:
        """Until the save that is under way is over on every rank."""
        job, self._job = self._job, None
        if job is None or job.thread is None:
            return
        job.written.wait()
        known = job.error
        try:
            together(self.share, lambda: _raise(known))
        except CheckpointError as error:
            job.error = error
            job.given_up.set()
        job.thread.join()
        if job.saved:
            self._ended.append(job.saved)
        elif self.rank != 0:
            self._ended.append(self._outcome(job))

    def _begin(self, job: _Job, pieces: Iterable[Piece], extra: Mapping[str, Any]) -> None:
        tmp = self._path(job.step, ".tmp")
        together(self.share, lambda: prepare(tmp) if self.rank == 0 else None)
        copies = together(self.share, lambda: self._copied(pieces))
        job.thread = threading.Thread(
            target=self._write, args=(job, tmp, copies, extra), name=f"save of step {job.step}"
        )
        self._job = job
        job.stalled_s = time.monotonic() - job.since
        job.thread.start()

    def _copied(self, pieces: Iterable[Piece]) -> list[Piece]:
        """The pieces that this rank writes, in memory of the host that nobody else changes."""
        held, self._buffers, copies = self._buffers, {}, []
        for piece in (p for p in pieces if p.owner):
            tensor, key = piece.tensor.detach(), (piece.name, piece.offset)
            buffer = held.pop(key, None)
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                pinned = not tensor.is_cpu
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._buffers[key] = buffer.copy_(tensor)
            copies.append(replace(piece, tensor=buffer))
        return copies

    def _write(self, job: _Job, tmp: Path, copies: list[Piece], extra: Mapping[str, Any]) -> None:
        """What a rank's thread does; rank 0's ends with the commit."""
        try:
            write_part(tmp, self.rank, job.step, copies, MAX_FILE_BYTES)
            _mark(tmp, self.rank, "done")
        except Exception as error:
            job.error = _as_checkpoint_error(tmp, error)
            with contextlib.suppress(OSError):  # else ``wait`` tells the others
                _mark(tmp, self.rank, "failed", job.error.problem)
        job.written.set()
        if self.rank == 0:
            self._finish(job, tmp, extra)

    def _finish(self, job: _Job, tmp: Path, extra: Mapping[str, Any]) -> None:
        try:
            _raise(job.error)
            while not _all_done(tmp, self.world_size):
                if job.given_up.wait(_POLL_S):
                    raise job.error or CheckpointError(tmp, "was given up")
            commit(tmp, self._path(job.step), self.world_size, extra)
        except Exception as error:
            job.error = _as_checkpoint_error(tmp, error)
            shutil.rmtree(tmp, ignore_errors=True)
        job.saved = self._outcome(job)

    def _outcome(self, job: _Job) -> Saved:
        """What is told of a save; after one that succeeded old checkpoints are removed."""
        seconds, warning = time.monotonic() - job.since, ""
        if self.rank == 0 and job.error is None:
            try:
                prune(self.directory, self.keep, self.keep_every, job.step)
            except (CheckpointError, OSError) as error:
                warning = f"old checkpoints could not be removed: {error}"
        path = self._path(job.step)
        return Saved(job.step, path, seconds, job.stalled_s, job.error, warning)

    def _path(self, step: int, ending: str = "") -> Path:
        return self.directory / f"step_{step:08d}{ending}"


def _mark(tmp: Path, rank: int, how: str, text: str = "") -> None:
    """Say to rank 0's thread how a rank's part went; seen whole or not at all."""
    aside = tmp / f"rank_{rank:05d}.mark"
    aside.write_text(text)
    aside.rename(tmp / f"rank_{rank:05d}.{how}")


def _all_done(tmp: Path, world_size: int) -> bool:
    """Whether all parts are written; the marks are then removed.

    Raises:
        CheckpointError: for a part that failed.
    """
    with naming(tmp):
        for failed in sorted(tmp.glob("rank_*.failed")):
            raise CheckpointError(tmp, f"{failed.read_text()} (rank {int(failed.stem[5:])})")
        done = list(tmp.glob("rank_*.done"))
        if len(done) < world_size:
            return False
        for path in done:
            path.unlink()
    return True


def _raise(error: CheckpointError | None) -> None:
    if error is not None:
        raise error


def _as_checkpoint_error(path: Path, error: Exception) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(path, f"{type(error).__name__}: {error}")
