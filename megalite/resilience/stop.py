"""What a node's launcher and its workers tell each other without a message: one small shared file.

The launcher asks for a stop and reads how far each worker is; a worker looks at every step, which
costs it no system call. A worker that nobody launches so has a page of its own: nobody asks.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "MEGALITE_CONTROL"
"""Names the file; the launcher sets it for its workers."""

# Words of 8 bytes: the header, then a slot for each local rank.
_STOP, _ROUND, _FITS, _HEADER = 0, 1, 2, 4
_STEP, _TIME, _STOPPED, _SLOT = 0, 1, 2, 4


class Control:
    """The file of one node. Each word has one writer, and is read and written whole.

    The launcher writes the header, a worker its own slot.
    """

    def __init__(self, memory: mmap.mmap, num_workers: int, mine: int = 0) -> None:
        self._words = memoryview(memory).cast("q")
        self._num_workers, self._mine = num_workers, _HEADER + _SLOT * mine

    @classmethod
    def create(cls, path: Path, num_workers: int) -> Control:
        """The launcher's side, with a new file."""
        path.write_bytes(bytes(8 * (_HEADER + _SLOT * num_workers)))
        return cls.of_launcher(path)

    @classmethod
    def of_launcher(cls, path: Path | str, mine: int = 0) -> Control:
        """A file that exists, as the launcher or anybody who watches sees it."""
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        return cls(memory, (len(memory) // 8 - _HEADER) // _SLOT, mine)

    @classmethod
    def of_worker(cls, env: Mapping[str, str] = os.environ) -> Control:
        """The side of the worker with this environment."""
        if VARIABLE not in env:
            return cls(mmap.mmap(-1, 8 * (_HEADER + _SLOT)), 1)
        return cls.of_launcher(env[VARIABLE], int(env.get("LOCAL_RANK", "0")))

    # What the launcher says.

    def begin(self, round_number: int, fits: bool) -> None:
        """A new set of workers is about to start: nobody has made a step yet."""
        self._words[_ROUND], self._words[_FITS] = round_number, int(fits)
        for word in range(_HEADER, len(self._words)):
            self._words[word] = 0

    def ask_stop(self, stop: bool = True) -> None:
        """Have all workers of the job save the current step and end."""
        self._words[_STOP] = int(stop)

    @property
    def stop(self) -> bool:
        return self._words[_STOP] != 0

    @property
    def round(self) -> int:
        """Which set of workers this is, the same number on all nodes; 0 without a launcher."""
        return self._words[_ROUND]

    @property
    def fits(self) -> bool:
        """Whether the number of workers may differ from what the layout was written for."""
        return self._words[_FITS] != 0

    # What a worker says.

    def stepped(self, step: int) -> None:
        """This worker has made the step ``step``."""
        self._words[self._mine + _TIME] = time.time_ns()
        self._words[self._mine + _STEP] = step

    def mark_stopped(self) -> None:
        """This worker ends because it was asked to, and a complete checkpoint is on the disk."""
        self._words[self._mine + _STOPPED] = 1

    @property
    def steps(self) -> list[int]:
        """The newest step of each worker; 0: none since it was started."""
        return [self._words[slot + _STEP] for slot in self._slots()]

    @property
    def times(self) -> list[float]:
        """When each worker made its newest step, in seconds since 1970; 0: not yet."""
        return [self._words[slot + _TIME] / 1e9 for slot in self._slots()]

    @property
    def stopped(self) -> bool:
        """Whether every worker has marked that it stopped."""
        return all(self._words[slot + _STOPPED] for slot in self._slots())

    def _slots(self) -> range:
        return range(_HEADER, _HEADER + _SLOT * self._num_workers, _SLOT)
