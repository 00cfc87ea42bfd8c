"""One line about the newest step: redrawn in place on a terminal, else printed now and then."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import IO, TYPE_CHECKING

from megalite.metrics import EvalRecord, StepRecord

if TYPE_CHECKING:
    from rich.console import Console

REDRAW_S = 0.1
PRINT_S = 2.0
# The time left follows the mean of so many steps.
WINDOW = 50


class Progress:
    """What world rank 0 shows of a run of ``num_steps``; every other rank shows nothing.

    A terminal is redrawn at most ten times a second, without a thread and without hiding its
    cursor: a process that is killed leaves nothing to restore. Elsewhere (a file, a pipe, torchrun)
    plain lines are printed: the first step, the last, and between them at most one in 2 s, growing
    to one a minute in a long run. A console that is gone mutes the rest; it never stops a run.
    """

    def __init__(
        self,
        num_steps: int,
        rank: int = 0,
        stream: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_steps, self._clock = num_steps, clock
        self._stream = stream or sys.stdout
        self._open = rank == 0
        self._console = _terminal(self._stream) if self._open else None
        self._began, self._shown_at = clock(), float("-inf")
        self._times: deque[float] = deque(maxlen=WINDOW)
        self._bits: float | None = None
        self._drawn = False

    def step(self, record: StepRecord) -> None:
        """Take one finished step; shown if it is time."""
        self._times.append(record.step_time_s)
        now = self._clock()
        if record.step < self._num_steps and now - self._shown_at < self._interval(now):
            return
        self._shown_at = now
        parts = self._parts(record)
        if self._console is None:
            self._print("  ".join(filter(None, parts)))
        else:
            self._draw(parts)

    def evaluation(self, record: EvalRecord) -> None:
        """Show one evaluation, and keep its bits a byte on the line."""
        self._bits = record.bits_per_byte
        text = f"step {record.step}: held-out loss {record.val_loss:.4f}"
        if self._bits is not None:
            text += f", {self._bits:.4f} bits/byte"
        self.note(text)

    def note(self, text: str) -> None:
        """A line of its own, above the moving one."""
        if self._drawn:
            self._erase()
        self._print(text)

    def close(self) -> None:
        """Leave the last state standing and go to a line of its own; may be called twice."""
        if self._drawn:
            self._print("")
        self._drawn = self._open = False

    def _interval(self, now: float) -> float:
        if self._console is not None:
            return REDRAW_S
        return min(60.0, max(PRINT_S, (now - self._began) / 30))

    def _parts(self, record: StepRecord) -> tuple[str, str, str, str, str, str]:
        width = len(str(self._num_steps))
        left = (self._num_steps - record.step) * sum(self._times) / len(self._times)
        return (
            f"step {record.step:{width}d}/{self._num_steps}",
            f"loss {record.loss:.4f}",
            f"{record.tokens_per_s:,.0f} tokens/s",
            f"{duration(left)} left",
            "" if self._bits is None else f"val {self._bits:.3f} bits/byte",
            "skipped" if record.skipped else "",
        )

    def _print(self, text: str) -> None:
        if not self._open:
            return
        try:
            print(text, file=self._stream, flush=True)
        except (OSError, ValueError):
            self._open = False

    def _draw(self, parts: tuple[str, ...]) -> None:
        from rich.text import Text

        assert self._console is not None
        if not self._open:
            return
        styles = ("bold", "cyan", "green", "", "magenta", "bold red")
        shown = [(part, style) for part, style in zip(parts, styles, strict=True) if part]
        line = Text("  ").join([Text(part, style) for part, style in shown])
        # One column less than the terminal has: a full line would wrap and could not be erased.
        line.truncate(max(1, self._console.width - 1))
        self._erase()
        with suppress(OSError, ValueError):
            self._console.print(line, end="", soft_wrap=True)
            self._stream.flush()
            self._drawn = True

    def _erase(self) -> None:
        from rich.control import Control
        from rich.segment import ControlType

        assert self._console is not None
        with suppress(OSError, ValueError):
            clear = (ControlType.ERASE_IN_LINE, 2)
            self._console.control(Control(ControlType.CARRIAGE_RETURN, clear))
        self._drawn = False


def _terminal(stream: IO[str]) -> Console | None:
    """A console that can be redrawn, or None: the stream alone decides, not the environment."""
    if not stream.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return None
    from rich.console import Console

    return Console(file=stream, force_terminal=True, highlight=False)


def duration(seconds: float) -> str:
    """``1:02:03``, with days in front where there are any: ``2d 1:02:03``."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hour}:{minute:02d}:{second:02d}"
