"""What a run writes down: a line a step, a line an evaluation, a line an event.

All files are JSON lines, valid JSON throughout. Finite floats are written with the digits that read
back to the same value; what JSON has no number for stands as the string "nan", "inf" or "-inf".
Only one process of a job writes them, and ``RunLock`` keeps a second job out.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import mmap
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megalite.errors import ConfigError

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class StepRecord:
    """One line of ``metrics.jsonl``, the same for all ranks.

    ``loss`` is the mean over the global batch's non-ignored tokens, in nats; ``grad_norm`` is
    taken before clipping; ``tokens`` and ``samples`` count from the start of the run, and
    ``tokens_per_s`` is the whole job's, for this step alone.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    samples: int
    step_time_s: float
    tokens_per_s: float
    skipped: bool
    layout: str


@dataclass(frozen=True)
class EvalRecord:
    """One line of ``eval.jsonl``: a mean over held-out tokens, after ``step`` steps.

    ``tokens`` counts the training tokens seen so far; ``bits_per_byte`` is None where the length
    of a token in bytes is not known.
    """

    step: int
    val_loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int

    @classmethod
    def of(
        cls, step: int, val_loss: float, bytes_per_token: float | None, tokens: int
    ) -> EvalRecord:
        """Derive the other figures from a loss in nats a token."""
        try:
            perplexity = math.exp(val_loss)
        except OverflowError:
            perplexity = math.inf
        bits = val_loss / (math.log(2) * bytes_per_token) if bytes_per_token else None
        return cls(step, val_loss, perplexity, bits, tokens)


class RunLock:
    """The right of one process to write in a run directory; ends with the process at the latest.

    Raises:
        ConfigError: if another process holds it for longer than ``wait_s``.
    """

    def __init__(self, run_dir: str | Path, wait_s: float = 5.0) -> None:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        self._file = open(Path(run_dir) / "lock", "a+b")
        give_up = time.monotonic() + wait_s
        while not self._try():
            if time.monotonic() >= give_up:
                self._file.seek(0)
                owner = self._file.read(200).decode(errors="replace").strip() or "another process"
                self._file.close()
                raise ConfigError(
                    "run.dir", f"{run_dir} is written by {owner}", "End that job, or name another"
                )
            time.sleep(0.05)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._file.flush()

    def _try(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            # Some network file systems know no locks; a run there goes without.
            if error.errno not in _NO_LOCKS:
                raise
        return True

    def close(self) -> None:
        self._file.close()


def is_locked(run_dir: str | Path) -> bool:
    """Whether a process has the ``RunLock`` of a directory now."""
    try:
        with open(Path(run_dir) / "lock", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return True  # where nobody can tell, the job itself is asked
    return False


class MetricsLog:
    """``metrics.jsonl`` and ``eval.jsonl`` of a run: continuous over restarts."""

    def __init__(self, run_dir: Path, lock: RunLock) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._steps = Lines(self._path)
        self._evals = Lines(run_dir / "eval.jsonl")
        self._lock = lock

    @classmethod
    def open(cls, run_dir: str | Path, last_step: int, lock: RunLock | None = None) -> MetricsLog:
        """Create the files, or cut them back to lines of steps up to ``last_step``.

        Args:
            run_dir: made if missing.
            last_step: the step of the restored checkpoint; 0: keep nothing.
            lock: of ``run_dir``, if the caller holds it already; it is closed with the log.
        Raises:
            ConfigError: if another job writes in ``run_dir``.
        """
        lock = lock or RunLock(run_dir)
        for name in ("metrics.jsonl", "eval.jsonl"):
            cut_back(Path(run_dir) / name, last_step)
        return cls(Path(run_dir), lock)

    def write(self, record: StepRecord) -> None:
        self._steps.add(asdict(record))

    def write_eval(self, record: EvalRecord) -> None:
        self._evals.add(asdict(record))

    def gap(self, last_step: int) -> str:
        """What is wrong with ``metrics.jsonl`` if it should have a line for each step, from any up
        to ``last_step``; empty: nothing."""
        data = self._path.read_bytes()
        lines = data.splitlines()
        if not lines:
            return f"{self._path} has no line up to step {last_step}"
        first, last, num = _step_of(lines[0]), _step_of(lines[-1]), len(lines)
        if last == last_step and num == last - first + 1 == data.count(b'{"step": '):
            return ""
        return (
            f"{self._path} was damaged: {num} lines from step {first} to {last}, not to {last_step}"
        )

    def sync(self) -> None:
        """Wait until the lines are on disk; called before a checkpoint of their step counts."""
        self._steps.sync()
        self._evals.sync()

    def close(self) -> None:
        self._steps.close()
        self._evals.close()
        self._lock.close()


class EventLog:
    """``events.jsonl``: what happened besides steps; only ever added to.

    A line is ``{"time": seconds since 1970, "event": name, ...}``. Several processes may add.
    """

    def __init__(self, run_dir: str | Path) -> None:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        path = Path(run_dir) / "events.jsonl"
        cut_back(path, None)
        self._lines = Lines(path)

    def write(self, event: str, **fields: Any) -> None:
        self._lines.add({"time": round(time.time(), 3), "event": event, **fields})

    def close(self) -> None:
        self._lines.close()


class Lines:
    """A file that grows by whole lines: each is one write at the end of the file."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)

    def add(self, values: Mapping[str, Any]) -> None:
        rest = (json.dumps(_plain(values), allow_nan=False) + "\n").encode()
        while rest:
            rest = rest[self._file.write(rest) :]

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def cut_back(path: Path, last_step: int | None) -> None:
    """Drop the end of a file of JSON lines: a line without its end, then steps after ``last_step``.

    Steps grow from line to line, so the search starts at the end and costs no more than what is
    dropped; one truncation does it, and a kill leaves the file either as it was or cut. With None
    only an incomplete line goes. A missing file is made.
    """
    with open(path, "a+b") as file:
        size = file.seek(0, os.SEEK_END)
        if not size:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            end = view.rfind(b"\n") + 1
            while end and last_step is not None:
                start = view.rfind(b"\n", 0, end - 1) + 1
                if _step_of(view[start:end]) <= last_step:
                    break
                end = start
        if end < size:
            file.truncate(end)


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """The complete lines of a file that this module wrote, non-finite numbers as floats again."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    complete = text[: text.rfind("\n") + 1].splitlines()
    names = ("nan", "inf", "-inf")
    return [
        {key: float(v) if v in names else v for key, v in json.loads(line).items()}
        for line in complete
    ]


def _step_of(line: bytes) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
