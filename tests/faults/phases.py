"""Which phase a job is in, seen from outside, and in which one its processes have died.

Of a worker: the place that it marks for the watchdog, in memory that outlives it here. Of a save:
what lies in the directory of checkpoints.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from megalite.checkpoint.manifest import MANIFEST
from megalite.place import Phase as Mark
from megalite.place import Reading, Where


class Phase(StrEnum):
    """Where a kill has met a job."""

    TRAIN = "train: in a step"
    WRITING = "save: data is written"
    WRITTEN = "save: manifest is there, not renamed"
    PRUNING = "save: renamed, old ones not removed"
    SAVE = "save: begun or just done"
    BEFORE = "change: before the first byte"
    MOVING = "change: bytes move"
    AFTER = "change: after the last byte"
    LAUNCHER = "restart: no worker yet"
    FORKED = "restart: forked, not joined"
    JOINED = "restart: joined, not restored"


SAVES = (Phase.WRITING, Phase.WRITTEN, Phase.PRUNING)
CHANGES = (Phase.BEFORE, Phase.MOVING, Phase.AFTER)
RESTARTS = (Phase.FORKED, Phase.JOINED)
_OF = {
    Mark.START: Phase.JOINED,
    Mark.SAVE: Phase.SAVE,
    Mark.CHANGE: Phase.BEFORE,
    Mark.MOVE: Phase.MOVING,
    Mark.CHANGED: Phase.AFTER,
}


class Places:
    """The places of workers, by process; one that was looked at before its death stays readable."""

    def __init__(self) -> None:
        self._words: dict[int, memoryview] = {}

    def of(self, pid: int) -> Phase:
        words = self._words.get(pid) or self._open(pid)
        if words is None:
            return Phase.FORKED
        return _OF.get(Where.of(Reading.of(words).word).phase, Phase.TRAIN)

    def _open(self, pid: int) -> memoryview | None:
        folder = f"/proc/{pid}/fd"
        try:
            for name in os.listdir(folder):
                if os.readlink(f"{folder}/{name}").startswith("/memfd:megalite_place"):
                    with open(f"{folder}/{name}", "rb") as file:
                        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                    self._words[pid] = memoryview(memory).cast("q")
                    return self._words[pid]
        except (OSError, ValueError):  # it is gone, or has not given it its size yet
            pass
        return None


Leftovers = dict[tuple[str, int], Phase]
"""Directories, by name and inode, that show a save which is under way or was cut short."""


def leftovers(checkpoints: Path, keep: int = 2) -> Leftovers:
    found: Leftovers = {}
    whole: list[tuple[str, int]] = []
    trash = False
    try:
        with os.scandir(checkpoints) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                if entry.name.endswith(".tmp"):
                    written = os.path.exists(Path(entry.path, MANIFEST))
                    found[entry.name, entry.inode()] = Phase.WRITTEN if written else Phase.WRITING
                elif entry.name.endswith(".trash"):
                    trash = True
                elif not entry.name.endswith(".old"):
                    whole.append((entry.name, entry.inode()))
    except OSError:  # not there yet, or renamed just now
        return {}
    if whole and (len(whole) > keep or trash):
        found[whole[-1]] = Phase.PRUNING
    return found


def died_in(found: Leftovers, known: Leftovers, places: Iterable[Phase]) -> Phase:
    """The phase of a kill: of a save what the dead have left and was not there before; else that
    of the first of their places that is no ordinary step."""
    new = [phase for key, phase in found.items() if known.get(key) != phase]
    if new:
        return new[0]
    seen = list(places)
    if not seen:
        return Phase.LAUNCHER
    return next((phase for phase in seen if phase is not Phase.TRAIN), Phase.TRAIN)
