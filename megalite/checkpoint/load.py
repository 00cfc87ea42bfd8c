"""Reading a checkpoint of any layout into any layout, and keeping the right ones."""

from __future__ import annotations

import json
import mmap
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch

from megalite.checkpoint.header import check_header, expected_headers
from megalite.checkpoint.manifest import (
    DTYPES,
    MANIFEST,
    Chunk,
    Manifest,
    Share,
    alone,
    check_hash,
    naming,
    read_manifest,
    together,
)
from megalite.checkpoint.piece import copy_overlap, inside, overlap
from megalite.checkpoint.save import clean, discard
from megalite.errors import CheckpointError
from megalite.slices import Piece

Verify = Literal["all", "mine", "none"]
FOR_GOOD = "kept_for_good"
"""In ``extra`` of a checkpoint that ``prune`` never removes."""
_STEP = re.compile(r"step_(\d{8,})(\.old)?")


@dataclass
class Checkpoint:
    """A complete checkpoint. ``verify_reads``: hash each file before its first use."""

    path: Path
    manifest: Manifest
    verify_reads: bool = False
    _verified: set[str] = field(default_factory=set)

    @cached_property
    def _headers(self) -> dict[str, dict[str, tuple[object, ...]]]:
        return expected_headers(self.manifest)

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def extra(self) -> dict[str, Any]:
        return self.manifest.extra

    @property
    def names(self) -> list[str]:
        return list(self.manifest.tensors)

    def missing(self, names: Iterable[str]) -> list[str]:
        """Which of these tensors are not stored."""
        return sorted(set(names) - self.manifest.tensors.keys())

    def unwanted(self, names: Iterable[str]) -> list[str]:
        """Which stored tensors are none of these."""
        return sorted(self.manifest.tensors.keys() - set(names))

    def files_to_verify(self, rank: int = 0, world_size: int = 1) -> list[str]:
        """This rank's share of the files, so that the job reads each once."""
        files = self.manifest.files
        return sorted(files, key=lambda name: (-files[name].size, name))[rank::world_size]

    def verify(self, files: Iterable[str]) -> None:
        """Compare the hashes of these files, once each, and their own headers with the manifest.

        Raises:
            CheckpointError: naming the first file that is not the one that was saved.
        """
        for name in files:
            if name not in self._verified:
                check_hash(self.path / name, self.manifest.files[name])
                check_header(self.path / name, self._headers[name])
                self._verified.add(name)

    def read(self, pieces: Iterable[Piece], *, cast: bool = False, share: Share = alone) -> None:
        """Fill the pieces' tensors from the files; collective over ``share``.

        Nothing is filled on any rank before all have found all of theirs.

        Args:
            cast: convert where the stored dtype is another; else that is an error.
        Raises:
            CheckpointError: the same on every rank, listing what is missing or does not fit.
        """
        jobs = together(share, lambda: self._plan(pieces, cast))
        together(share, lambda: self._fill(jobs))

    def _plan(self, pieces: Iterable[Piece], cast: bool) -> dict[str, list[tuple[Chunk, Piece]]]:
        """For each file, which chunks are to be copied where."""
        wanted = list(pieces)
        problems = [p for p in (self._problem(piece, cast) for piece in wanted) if p]
        if problems:
            more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
            raise CheckpointError(self.path / MANIFEST, "; ".join(problems[:10]) + more)
        jobs: dict[str, list[tuple[Chunk, Piece]]] = {}
        for piece in wanted:
            for chunk in self.manifest.tensors[piece.name].chunks:
                mine = (piece.offset, tuple(piece.tensor.shape))
                if overlap(mine, (chunk.offset, chunk.extent)):
                    jobs.setdefault(chunk.file, []).append((chunk, piece))
        if self.verify_reads:
            self.verify(jobs)
        return jobs

    def _problem(self, piece: Piece, cast: bool) -> str:
        entry = self.manifest.tensors.get(piece.name)
        if entry is None:
            return f"{piece.name!r} is not stored"
        if entry.shape != piece.shape:
            return f"{piece.name!r} is stored with shape {entry.shape}, wanted {piece.shape}"
        if not inside(piece.shape, piece.offset, piece.tensor.shape):
            extent = tuple(piece.tensor.shape)
            return f"{piece.name!r} of {piece.shape} has no {extent} at {piece.offset}"
        if DTYPES[entry.dtype] != piece.tensor.dtype and not cast:
            return f"{piece.name!r} is stored as {DTYPES[entry.dtype]}, wanted {piece.tensor.dtype}"
        return ""

    def _fill(self, jobs: dict[str, list[tuple[Chunk, Piece]]]) -> None:
        for name, copies in jobs.items():
            path = self.path / name
            # a private mapping counts as writable, as torch asks, and never changes the file
            with naming(path), open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            for chunk, piece in sorted(copies, key=lambda copy: copy[0].begin):
                dtype = DTYPES[self.manifest.tensors[piece.name].dtype]
                flat = torch.frombuffer(
                    mapped, dtype=dtype, count=prod(chunk.extent), offset=chunk.begin
                )
                copy_overlap(piece.tensor, piece.offset, flat.view(chunk.extent), chunk.offset)


def open_checkpoint(path: Path, verify: Verify = "all") -> Checkpoint:
    """Open one checkpoint directory and prove that it is whole.

    Args:
        verify: hash all files now ("all"), each before its first use ("mine"), or none. The
            manifest, file sizes and coverage are always checked.
    Raises:
        CheckpointError: naming the file that is missing, damaged or one too many.
    """
    manifest = read_manifest(path / MANIFEST)
    named = _STEP.fullmatch(path.name)
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(path / MANIFEST, f"is of step {manifest.step}")
    manifest.check(path)
    checkpoint = Checkpoint(path, manifest, verify_reads=verify == "mine")
    if verify == "all":
        checkpoint.verify(checkpoint.files_to_verify())
    return checkpoint


def latest(directory: Path) -> list[Path]:
    """The committed checkpoints, newest first; empty if there is no such directory.

    One that was just being replaced when the job died is found under its ``.old`` name.
    """
    found: dict[int, Path] = {}
    with naming(directory):
        for path in sorted(directory.iterdir() if directory.exists() else []):
            if name := _STEP.fullmatch(path.name):
                found.setdefault(int(name[1]), path)  # sorted: the plain name comes first
    return [found[step] for step in sorted(found, reverse=True)]


def load_latest(
    directory: Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    share: Share = alone,
    check: Callable[[Checkpoint], None] = lambda checkpoint: None,
) -> tuple[Checkpoint | None, list[CheckpointError]]:
    """The newest checkpoint that is good for every rank; collective over ``share``.

    What rank 0 sees decides which are tried; each file is hashed by one rank.

    Args:
        check: raises CheckpointError for one that is whole but of no use.
    Returns:
        the checkpoint (None if there is none at all) and what was wrong with newer ones.
    Raises:
        CheckpointError: the same on every rank, if there are checkpoints but none is good.
    """
    seen = together(share, lambda: [path.name for path in latest(directory)])
    names = json.loads(share(json.dumps(seen))[0])
    bad: list[CheckpointError] = []

    def attempt(path: Path) -> Checkpoint:
        checkpoint = open_checkpoint(path, verify="none")
        check(checkpoint)
        checkpoint.verify(checkpoint.files_to_verify(rank, world_size))
        return checkpoint

    for name in names:
        try:
            return together(share, partial(attempt, directory / name)), bad
        except CheckpointError as error:
            bad.append(error)
    if bad:
        raise CheckpointError(directory, "no good checkpoint: " + "; ".join(map(str, bad)))
    return None, bad


def _step_of(path: Path) -> int:
    """Of a path that ``latest`` found."""
    return int(path.name.removesuffix(".old").removeprefix("step_"))


def set_aside(directory: Path, last_step: int) -> list[Path]:
    """Move checkpoints of steps after ``last_step`` into ``DIRECTORY.left``, where no run looks for
    them; returns where they are. One of the same step that lies there already gives way."""
    left = []
    with naming(directory):
        for path in latest(directory):
            if _step_of(path) > last_step:
                target = directory.with_name(f"{directory.name}.left") / path.name
                target.parent.mkdir(exist_ok=True)
                if target.exists():
                    shutil.rmtree(target)
                left.append(path.rename(target))
    return left


def prune(
    directory: Path, keep: int, keep_every: int = 0, last_step: int | None = None
) -> list[Path]:
    """Remove all but the newest ``keep`` intact checkpoints, and leftovers; returns the removed.

    A damaged one neither counts nor is removed. For one rank, and not while a save runs.

    Args:
        keep_every: steps that are a multiple of it stay for good, 0 = none; and so do those whose
            manifest says ``FOR_GOOD``, whatever it is now.
        last_step: where the run is. What is there of later steps is not its own, and often what
            it could not go on from: it neither counts nor is removed.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    with naming(directory):
        clean(directory)
    listed = [p for p in latest(directory) if last_step is None or _step_of(p) <= last_step]
    if len(listed) <= keep:
        return []
    intact = [found for found in map(_opened, listed) if found]
    removed = [
        c.path
        for c in intact[keep:]
        if not c.extra.get(FOR_GOOD) and (not keep_every or c.step % keep_every)
    ]
    for path in removed:
        discard(path)
    return removed


def _opened(path: Path) -> Checkpoint | None:
    try:
        return open_checkpoint(path, verify="none")
    except CheckpointError:
        return None
