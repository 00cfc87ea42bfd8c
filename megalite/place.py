"""Where a rank is, for those who look from outside: a few words of memory, written as it goes.

A mark is a few words and a clock's reading, without a system call: under a microsecond. The memory
may be a file's, which another process maps: it then reads where a rank stands also when that is
stopped or dead.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from megalite.schedule.action import Action, Op

SLOT_BYTES = 32
_STEP, _WHERE, _SINCE, _COUNT = range(4)


class Phase(IntEnum):
    """Parts of a run, in the order in which a step meets them."""

    START = 0
    DATA = 1
    ACTIONS = 2
    REDUCTION = 3
    TOTALS = 4
    OPTIMIZER = 5
    RECORD = 6
    BETWEEN = 7
    SAVE = 8
    EVALUATION = 9
    SAMPLING = 10
    CHANGE = 11
    MOVE = 12
    CHANGED = 13
    END = 14


# A word: phase, action's op, whether it waits, whether a step is done, stage + 1, microbatch + 1.
_OPS = {op: n << 52 for n, op in enumerate(Op, 1)}
_OP_OF = dict(enumerate(Op, 1))
_PHASE_AT, _OP_AT, _STAGE_AT = 56, 52, 24
_WAITS, _SETTLED, _LOW = 1 << 51, 1 << 50, (1 << 24) - 1
_ACTING = {Phase.EVALUATION, Phase.SAMPLING}


@dataclass(frozen=True)
class Where:
    """A phase, and inside of one that runs actions which of them; ``waits``: for its message."""

    phase: Phase
    op: Op | None = None
    waits: bool = False
    stage: int = -1
    microbatch: int = -1

    @classmethod
    def of(cls, word: int) -> Where:
        """What a word of a slot says."""
        return cls(
            Phase(word >> _PHASE_AT),
            _OP_OF.get(word >> _OP_AT & 15),
            bool(word & _WAITS),
            (word >> _STAGE_AT & _LOW) - 1,
            (word & _LOW) - 1,
        )

    @property
    def action(self) -> Action | None:
        return None if self.op is None else Action(self.op, self.stage, self.microbatch)


@dataclass(frozen=True)
class Reading:
    """A slot at one moment.

    Attributes:
        since: of ``time.monotonic``.
        count: of marks in this step: ranks of one pipeline index make the same ones.
    """

    step: int
    word: int
    since: float
    count: int

    @property
    def settled(self) -> bool:
        """Whether the rank has made a step since its start."""
        return bool(self.word & _SETTLED)

    @classmethod
    def of(cls, words: memoryview) -> Reading:
        """Read a slot while its rank goes on; never a mixture of two marks of a slow rank."""
        found = cls(0, 0, 0.0, 0)
        for _ in range(8):
            before = words[_COUNT]
            found = cls(words[_STEP], words[_WHERE], words[_SINCE] / 1e9, before)
            if words[_COUNT] == before:
                break
        return found


class Place:
    """The slot of one rank, of which only that rank writes.

    Args:
        memory: ``SLOT_BYTES`` bytes, all zero; by default nobody else's.
    """

    def __init__(self, memory: Any = None) -> None:
        memory = bytearray(SLOT_BYTES) if memory is None else memory
        self._words = memoryview(memory).cast("B").cast("q")
        self._step = self._count = self._now = self._settled = 0
        self._begun = False
        self.at(Phase.START)

    def step(self, number: int) -> None:
        """A step of training begins: with its data."""
        self._step, self._count = number, 0
        self._settled, self._begun = (_SETTLED if self._begun else 0), True
        self.at(Phase.DATA)

    def at(self, phase: Phase) -> None:
        """This rank has come to a phase."""
        self._acts = phase if phase in _ACTING else Phase.ACTIONS
        self._base = (self._acts << _PHASE_AT) + self._settled + (1 << _STAGE_AT) + 1
        self._mark((phase << _PHASE_AT) + self._settled)

    def act(self, action: Action) -> None:
        """An action begins."""
        op, stage = _OPS[action.op], action.stage << _STAGE_AT
        self._now = now = self._base + op + stage + action.microbatch
        self._mark(now)

    def wait(self) -> None:
        """The action that has begun waits for a message from now on."""
        self._mark(self._now | _WAITS)

    def go_on(self) -> None:
        """The message of the action has come."""
        self._mark(self._now)

    def acted(self) -> None:
        """The actions are done."""
        self.at(Phase.REDUCTION if self._acts is Phase.ACTIONS else self._acts)

    def close(self) -> None:
        """No more is marked."""

    def _mark(self, word: int) -> None:
        self._count = count = self._count + 1
        self._write(self._step, word, count)

    def _write(self, step: int, word: int, count: int) -> None:
        words = self._words
        words[_SINCE] = time.monotonic_ns()
        words[_STEP] = step
        words[_WHERE] = word
        words[_COUNT] = count


class Marks(Protocol):
    """Marks on the stream of a device (of ``trace.Clock`` what is needed here)."""

    def mark(self) -> Any: ...
    def done(self, mark: Any) -> bool: ...


class DevicePlace(Place):
    """A place for a device that works behind its host: marks count when the device has come there.

    Each is a mark on the device's stream; a thread asks ``period_s`` apart which are passed, and
    writes the newest. The step itself waits for nothing.

    Args:
        period_s: 0: no thread; the caller follows.
    """

    def __init__(self, clock: Marks, memory: Any = None, period_s: float = 0.1) -> None:
        self._clock = clock
        self._ahead: deque[tuple[Any, int, int, int]] = deque()
        self._closed = threading.Event()
        super().__init__(memory)
        if period_s:
            threading.Thread(
                target=self._keep_following, args=(period_s,), name="place", daemon=True
            ).start()

    def follow(self) -> None:
        """Write where the device is by now."""
        passed = None
        while self._ahead and self._clock.done(self._ahead[0][0]):
            passed = self._ahead.popleft()
        if passed is not None:
            super()._write(*passed[1:])

    def close(self) -> None:
        self._closed.set()

    def _write(self, step: int, word: int, count: int) -> None:
        self._ahead.append((self._clock.mark(), step, word, count))

    def _keep_following(self, period_s: float) -> None:
        while not self._closed.wait(period_s):
            self.follow()
