"""The watchdog of one node: a process beside the ranks that sees where each of them stands.

It is started by the first rank of the node and told all by its standard input (``watching.py``).
It needs no torch, does nothing to a rank but read, ends with the rank that started it, and shows a
stall when there is one: docs/watchdog.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import ctypes
import json
import mmap
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from megalite.mesh_shape import MeshShape
from megalite.place import Phase, Reading, Where
from megalite.resilience.stalls import UNSEEN, Job, Seen, Stall, find

PERIOD_S = 0.5
FIRST_STEP_S = 60.0
"""Beyond ``run.watchdog_s``, in a run's first step, which sets things up."""
LONG_S = {
    Phase.START: 600.0,
    Phase.SAVE: 600.0,
    Phase.CHANGE: 600.0,
    Phase.MOVE: 600.0,
    Phase.CHANGED: 600.0,
    Phase.END: 600.0,
    Phase.BETWEEN: 60.0,
    Phase.EVALUATION: 60.0,
    Phase.SAMPLING: 60.0,
}
"""Beyond ``run.watchdog_s``, in phases that take long by nature."""
END = signal.SIGRTMIN
"""Ends the watchdog after a last word; signals that a launcher sends to a whole job do not."""
_HUSH = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_STACK_BYTES = 20_000


@dataclass(frozen=True)
class Spec:
    """What the watchdog of a node is told.

    Attributes:
        parent: the process with which it ends.
        run_dir: where events are written, and nodes tell each other what they see.
        token: of this start of the job; what another one has left is not read.
        nodes: the first rank of each node; ``node``: which of them this is.
        ranks: of this node: rank, process, and its files of place and of stacks.
        shape: sizes and order of the axes. rank_of, tied: of ``Job``.
    """

    parent: int
    run_dir: str
    token: str
    watchdog_s: float
    nodes: list[int]
    node: int
    ranks: list[list[int]]
    shape: dict[str, Any]
    rank_of: list[int]
    tied: bool

    @property
    def job(self) -> Job:
        shape = MeshShape(**{**self.shape, "order": tuple(self.shape["order"])})
        return Job(shape, tuple(self.rank_of), self.tied)


class Rank:
    """A rank of this node: its slot, its process, its stacks."""

    def __init__(self, pid: int, slot: int, stacks: int) -> None:
        self.pid = pid
        self.reading = Reading(0, 0, time.monotonic(), 0)
        self.age_s = 0.0
        self._slot, self._link = f"/proc/{pid}/fd/{slot}", ""
        self._words: memoryview | None = None
        self._asked, self._stack = (0, -1), ""
        try:
            self._link = os.readlink(self._slot)
            with open(self._slot, "rb") as file:
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._words = memoryview(memory).cast("q")
            self._stacks = open(f"/proc/{pid}/fd/{stacks}", "rb", buffering=0)
        except OSError:  # it is gone
            self._words = None

    def look(self) -> Reading:
        if self._words is not None:
            self.reading = Reading.of(self._words)
        return self.reading

    def state(self) -> tuple[str, str]:
        """Of the process, as ``Seen`` has it, and where in the kernel it is if it hangs there."""
        try:
            if self._words is None:
                return "X", ""
            text = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
            state = text[text.rindex(")") + 2]
            if state != "D":
                return state, ""
            return state, Path(f"/proc/{self.pid}/wchan").read_text(encoding="ascii")
        except OSError:
            return "X", ""

    def ask_stack(self) -> None:
        """Have the process write its stacks; once for each place where it is."""
        if self._asked == self._at or self._words is None:
            return
        self._asked, self._stack = self._at, ""
        with suppress(OSError):
            self._stacks.seek(0, os.SEEK_END)
            if os.readlink(self._slot) == self._link:  # else its number is another's by now
                os.kill(self.pid, signal.SIGUSR2)

    def stack(self) -> str:
        """What has come since it was asked, at the place where it still is."""
        if self._asked != self._at or self._words is None:
            return ""
        self._stack += self._stacks.read(_STACK_BYTES).decode(errors="replace")
        return self._stack

    def close(self) -> None:
        if self._words is not None:
            self._stacks.close()
            self._words = None

    @property
    def _at(self) -> tuple[int, int]:
        return self.reading.step, self.reading.count


@dataclass
class Pace:
    """How long ranks have been at places of a kind without a stall; what is slow is no stall."""

    late_s: float
    slowest: dict[Where, float] = field(default_factory=dict)

    def passed(self, where: Where, age_s: float) -> None:
        """A rank has been there for that long, and has gone on."""
        kind = _kind(where)
        self.slowest[kind] = max(age_s, self.slowest.get(kind, 0.0))

    def is_late(self, seen: Seen) -> bool:
        allowed = self.slowest.get(_kind(seen.where), 0.0)
        if seen.where.op is None:
            allowed = max(allowed, LONG_S.get(seen.where.phase, 0.0))
        if not seen.settled:
            allowed = max(allowed, FIRST_STEP_S)
        return seen.age_s > self.late_s + allowed


def _kind(where: Where) -> Where:
    return Where(where.phase, where.op, where.waits)


class Board:
    """Files in the run's directory by which the nodes see each other's ranks."""

    def __init__(self, spec: Spec) -> None:
        self.folder, self.spec = Path(spec.run_dir, "watch"), spec
        self.period_s = max(1.0, spec.watchdog_s / 5)
        self._mine = self._file(spec.node)
        self._next = 0.0

    def publish(self, seen: Mapping[int, Seen], now: float) -> None:
        """Show the ranks of this node, if it is time."""
        if len(self.spec.nodes) == 1 or now < self._next:
            return
        self._next = now + self.period_s
        told = {"token": self.spec.token, "time": time.time()}
        told["ranks"] = {rank: _pack(s) for rank, s in seen.items()}
        aside = self._mine.with_suffix(".new")
        with suppress(OSError):  # a disk that fails is no reason to end
            self.folder.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps(told), encoding="utf-8")
            aside.replace(self._mine)

    def others(self) -> tuple[dict[int, Seen], bool]:
        """The ranks of the other nodes, and whether it is for this node to report."""
        found: dict[int, Seen] = {}
        reports = True
        for node in self.spec.nodes:
            if node == self.spec.node:
                continue
            try:
                told = json.loads(self._file(node).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            if told.get("token") != self.spec.token:
                continue
            age = max(0.0, time.time() - float(told["time"]))
            silent = age > 3 * self.period_s
            reports &= silent or node > self.spec.node
            for rank, packed in told["ranks"].items():
                found[int(rank)] = _unpack(packed, age, silent)
        return found, reports

    def close(self) -> None:
        """Take the file of this node away, and the folder with the last."""
        with suppress(OSError):
            self._mine.unlink(missing_ok=True)
            self.folder.rmdir()

    def _file(self, node: int) -> Path:
        return self.folder / f"node_{node:05d}.json"


def _pack(seen: Seen) -> list[Any]:
    word = [int(seen.where.phase), seen.where.op and seen.where.op.value, seen.where.waits]
    word += [seen.where.stage, seen.where.microbatch]
    found = [seen.step, word, seen.count, seen.age_s, seen.state, seen.wchan, seen.stack]
    return [*found, seen.settled]


def _unpack(packed: list[Any], age_s: float, silent: bool) -> Seen:
    from megalite.schedule.action import Op

    step, (phase, op, *rest), count, age, state, wchan, stack, settled = packed
    where = Where(Phase(phase), Op(op) if op else None, *rest)
    state = UNSEEN if silent else state
    return Seen(step, where, count, age + age_s, state, wchan, stack, age_s, settled)


class Watchdog:
    """Looks at the ranks of its node, and through the board at all.

    Args:
        show: prints a report. write: adds an event.
    """

    def __init__(
        self,
        spec: Spec,
        show: Callable[[str], None],
        write: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        self.spec, self.job, self._show, self._write = spec, spec.job, show, write
        self.period_s = min(PERIOD_S, spec.watchdog_s / 10)
        # It takes up to three looks to be sure and to have the stacks.
        self._late_s = spec.watchdog_s - 3 * self.period_s
        self.ranks = {rank: Rank(*rest) for rank, *rest in spec.ranks}
        self.pace, self.board = Pace(self._late_s), Board(spec)
        self._floor = self._looked = time.monotonic()
        self._told: Stall | None = None
        self._reported = False
        self._suspect: tuple[Any, ...] | None = None

    def look(self) -> None:
        """Once, a ``period_s`` after the last time."""
        now = time.monotonic()
        if now - self._looked > 4 * self.period_s + 1.0:
            self._floor = now  # it was stopped itself, and all ranks may have been
        self._looked = now
        seen = {rank: self._seen(watched, now) for rank, watched in self.ranks.items()}
        self.board.publish(seen, now)
        stall, reports = None, True
        if any(s.age_s > self._late_s for s in seen.values()):
            others, reports = self.board.others()
            stall = find(self.job, {**others, **seen}, self.pace.is_late)
        self._judge(stall, reports)

    def close(self) -> None:
        """The ranks have come to their end, and so has a stall."""
        if self._told is not None:
            self._over(self._told)
        for rank in self.ranks.values():
            rank.close()

    def _seen(self, rank: Rank, now: float) -> Seen:
        before, reading = rank.reading, rank.look()
        if (reading.step, reading.count) != (before.step, before.count) and self._told is None:
            self.pace.passed(Where.of(before.word), rank.age_s)
        rank.age_s = max(0.0, now - max(reading.since, self._floor))
        late = rank.age_s > self._late_s / 2
        state, wchan = rank.state() if late else ("S", "")
        where, stack = Where.of(reading.word), rank.stack()
        settled, seen = reading.settled, (reading.step, where, reading.count, rank.age_s)
        return Seen(*seen, state, wchan, stack, settled=settled)

    def _judge(self, stall: Stall | None, reports: bool) -> None:
        """Report what stays from one look to the next, once; and when it is over."""
        key, told = stall.key if stall else None, self._told
        if stall is not None and key != self._suspect:
            for rank in self.ranks.values():
                rank.ask_stack()
        if stall is not None:
            if key == self._suspect and (told is None or told.key != key):
                self._told = stall
                if reports:
                    self._report(stall)
                    self._reported = True
            elif told is not None and told.key == key:
                self._told = stall
        elif told is not None and self._suspect is None:
            self._over(told)
        self._suspect = key

    def _report(self, stall: Stall) -> None:
        stack = "".join(f"\n    {line.strip()}" for line in stall.stack.splitlines()[:12])
        self._show(f"watchdog: {stall.text}" + (f"\n  its Python stack:{stack}" if stack else ""))
        self._write("stall", stall.fields)

    def _over(self, told: Stall) -> None:
        self._told = None
        if told.seen.state != "T":
            self.pace.passed(told.seen.where, told.seen.age_s)
        if self._reported:
            self._reported = False
            age = told.seen.age_s
            name = self.job.name(told.rank, told.seen.where)
            self._show(f"watchdog: the stall is over: {name} went on after {age:.0f} s")
            step = {"step": told.seen.step, "rank": told.rank}
            self._write("stall_over", {**step, "lasted_s": round(age, 1)})


def show(text: str) -> None:
    """On the job's standard error, in one piece."""
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


def event_writer(run_dir: str) -> Callable[[str, Mapping[str, Any]], None]:
    """Adds whole lines to ``events.jsonl``, to which others add too."""

    def write(name: str, fields: Mapping[str, Any]) -> None:
        line = json.dumps({"time": round(time.time(), 3), "event": name, **fields}) + "\n"
        try:
            file = os.open(
                Path(run_dir, "events.jsonl"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666
            )
            os.write(file, line.encode())
            os.close(file)
        except OSError as error:
            show(f"watchdog: event not written: {error}")

    return write


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [END])
    for number in _HUSH:
        signal.signal(number, signal.SIG_IGN)
    spec = Spec(**json.load(sys.stdin))
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != spec.parent:
        return
    watchdog = Watchdog(spec, show, event_writer(spec.run_dir))
    while not signal.sigtimedwait([END], watchdog.period_s):
        watchdog.look()
    watchdog.close()


if __name__ == "__main__":
    main()
