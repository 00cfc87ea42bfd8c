"""The record of a run: a file a rank, JSON lines, of which all that are complete can be read.

A *head* says what the rank records, in order, and stands again wherever that changes; a *step*
holds the numbers, five words for each row of each entry, as base64 of little-endian memory.
Both have a ``step``, so that a record is cut back to a step as ``metrics.jsonl`` is.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.errors import ConfigError

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]
Rectangle = tuple[tuple[int, int], tuple[int, int]]

FOLDER = "record"
PHASES = ("forward", "backward", "gradient", "weight")
MADE, RECEIVED = "made", "received"
NUMBERS = ("sum", "squares", "largest", "projection")
WORDS = len(NUMBERS) + 1
VERSION = 1


class Entry(NamedTuple):
    """Something that a rank records once a step (and microbatch).

    Attributes:
        phase: of ``PHASES``: an output, the gradient that arrives there, the reduced gradient of
            a parameter, or its updated weights.
        name: global: of a place in the model (``layers.3.attention``) or of a parameter.
        role: ``MADE`` where it was computed, ``RECEIVED`` by a stage from its neighbour.
        samples: the row of the global batch of each row of numbers; -1 has none. A parameter has
            one row, number 0.
        shape: (rows, columns) of the whole tensor of a sample, or of the parameter.
        offset, extent: the rectangle of it that this rank has.
        owner: false for a copy of what another rank has as its own.
    """

    phase: str
    name: str
    role: str
    stage: int
    microbatch: int
    samples: tuple[int, ...]
    shape: tuple[int, int]
    offset: tuple[int, int]
    extent: tuple[int, int]
    owner: bool


@dataclass(frozen=True)
class Origin:
    """Whose record it is; ``places`` are the model's, in the order of a forward pass."""

    rank: int
    world_size: int
    pp: int
    dp: int
    tp: int
    layout: str
    dtype: str
    num_samples: int
    places: tuple[str, ...]


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.jsonl"


def head_line(step: int, origin: Origin, entries: Sequence[Entry]) -> dict[str, Any]:
    """What stands before the first step that has these entries."""
    return {"step": step, "version": VERSION, "origin": asdict(origin), "entries": list(entries)}


def step_line(step: int, words: npt.NDArray[np.int64]) -> dict[str, Any]:
    """The numbers of a step, (rows of all entries, WORDS): four float64, and the hash."""
    data = words.astype("<i8", copy=False).tobytes()
    return {"step": step, "words": base64.b64encode(data).decode("ascii")}


@dataclass(frozen=True)
class RankStep:
    """A step as one rank recorded it: (rows of all entries, 4) numbers and a hash each."""

    origin: Origin
    entries: tuple[Entry, ...]
    numbers: Floats
    hashes: Words


@dataclass(frozen=True)
class _Head:
    origin: Origin
    entries: tuple[Entry, ...]


class Records:
    """The record of one run, all of its ranks, as far as it is complete.

    Attributes:
        steps: those that every rank of the layout of that time has written.
    Raises:
        ConfigError: if there is none, or it cannot be read.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        found: dict[int, list[tuple[Path, int, _Head]]] = {}
        files = sorted((run_dir / FOLDER).glob("rank_*.jsonl"))
        for path in files:
            for step, at, head in _scan(path):
                found.setdefault(step, []).append((path, at, head))
        self._lines = {
            step: lines
            for step, lines in sorted(found.items())
            if len(lines) == lines[0][2].origin.world_size
        }
        self.steps = list(self._lines)
        if not self.steps:
            what = "has no step that all ranks have recorded" + _lacking(found) if files else ""
            what = what or "has no record"
            raise ConfigError("run.record", f"{run_dir} {what}", "Train it with --run.record True")
        # At the end ranks may be at other steps: the run lives, or it was killed.
        if holes := {s: found[s] for s in sorted(found.keys() - self._lines) if s < self.steps[-1]}:
            raise _damaged(run_dir / FOLDER, f"it has a hole{_lacking(holes)}")

    @property
    def origin(self) -> Origin:
        """Of some rank, at the first step."""
        return self._lines[self.steps[0]][0][2].origin

    def layout(self, step: int) -> str:
        return self._lines[step][0][2].origin.layout

    def load(self, step: int) -> list[RankStep]:
        """All ranks' records of a step, in the order of ranks."""
        ranks = [_read(path, at, head) for path, at, head in self._lines[step]]
        return sorted(ranks, key=lambda r: r.origin.rank)


def _lacking(found: Mapping[int, Sequence[tuple[Path, int, _Head]]]) -> str:
    """Which ranks have not recorded the first of these steps once each."""
    for step, lines in sorted(found.items()):
        ranks = [head.origin.rank for _, _, head in lines]
        for rank in range(lines[0][2].origin.world_size):
            if ranks.count(rank) != 1:
                return f": step {step} stands {ranks.count(rank)} times in the files of rank {rank}"
    return ""


def _scan(path: Path) -> list[tuple[int, int, _Head]]:
    """(step, where its line begins, what it records) of each complete step of a file."""
    found: list[tuple[int, int, _Head]] = []
    head: _Head | None = None
    at = 0
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break  # a run that lives is about to write the rest
            values = _parse(path, line)
            if "origin" in values:
                head = _head(path, values)
            elif head is None:
                raise _damaged(path, "its first line is not a head")
            else:
                found.append((int(values["step"]), at, head))
            at += len(line)
    return found


def _read(path: Path, at: int, head: _Head) -> RankStep:
    with open(path, "rb") as file:
        file.seek(at)
        values = _parse(path, file.readline())
    try:
        data = np.frombuffer(base64.b64decode(values["words"], validate=True), "<i8")
        words = data.reshape(sum(len(e.samples) for e in head.entries), WORDS)
    except (ValueError, TypeError) as error:
        raise _damaged(path, f"step {values['step']}: {error}") from error
    numbers = np.ascontiguousarray(words[:, :-1]).view(np.float64)
    return RankStep(head.origin, head.entries, numbers, words[:, -1].astype(np.uint64))


def _parse(path: Path, line: bytes) -> Mapping[str, Any]:
    try:
        values = json.loads(line)
        assert isinstance(values, dict) and isinstance(values["step"], int)
        assert "origin" in values or isinstance(values["words"], str)
    except (ValueError, KeyError, AssertionError) as error:
        raise _damaged(path, "a line of it is not that of a record") from error
    return values


def _head(path: Path, values: Mapping[str, Any]) -> _Head:
    if values.get("version") != VERSION:
        raise _damaged(path, f"its version is {values.get('version')}, not {VERSION}")
    try:
        origin = Origin(**{**values["origin"], "places": tuple(values["origin"]["places"])})
        return _Head(origin, tuple(_entry(fields) for fields in values["entries"]))
    except (TypeError, ValueError, KeyError) as error:
        raise _damaged(path, "its head is not that of a record") from error


def _entry(fields: Sequence[Any]) -> Entry:
    return Entry._make(tuple(f) if isinstance(f, list) else f for f in fields)


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError("run.record", f"{path} cannot be read: {why}", "Record the run anew")
