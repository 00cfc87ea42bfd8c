"""What to do about a step whose loss or gradient is not finite, and which steps stand out."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from statistics import median

from megalite.optim.clip import Told
from megalite.optim.config import LARGEST_SCALE, SMALLEST_SCALE

MOST_IN_A_ROW = 10
"""Skipped steps after which the run ends: it would learn nothing any more."""
_HISTORY, _ENOUGH = 64, 16  # steps that a spike is measured by, and how many are enough
_SPIKE_NORM, _SPIKE_LOSS = 10.0, 8.0  # times the median norm; times the usual change of the loss


class Where(Enum):
    """Which sums say where it was: none, the step's own, or those of its first time."""

    NOWHERE = auto()
    STEP = auto()
    KEPT = auto()


@dataclass(frozen=True)
class Finding:
    """What is to be said of a step: ``event`` for the file, ``text`` for the log."""

    event: str
    text: str
    ends: bool = False
    where: Where = Where.NOWHERE


class BadSteps:
    """Judges steps in their order.

    Args:
        policy: stop, skip or replay (``train.bad_step``).
        scaled: fp16, where gradients that overflow only mean that the loss scale was too large.
    """

    def __init__(self, policy: str, scaled: bool) -> None:
        self.policy, self.scaled = policy, scaled
        self._row = 0
        self._losses: deque[float] = deque(maxlen=_HISTORY)
        self._norms: deque[float] = deque(maxlen=_HISTORY)

    def judge(self, step: int, told: Told, replays: int = 0) -> Finding | None:
        """What there is to say of a step; None if nothing is."""
        if told.finite:
            self._row = 0
            if replays:
                text = f"step {step} was not finite, and computed again it was: a transient fault"
                return Finding("transient", text, where=Where.KEPT)
            return self._spike(step, told)
        self._row += 1
        if self.scaled and not told.bad_losses:
            if (scale := min(told.scale / 2, LARGEST_SCALE)) >= SMALLEST_SCALE:
                text = f"step {step} skipped: an overflow, the loss scale is now {scale:g}"
                return Finding("overflow", text)
            text = f"step {step}: gradients overflow at a loss scale of {told.scale:g}"
            return Finding("bad_step", text, ends=True, where=Where.STEP)
        text = f"step {step}: loss {told.loss} and gradient norm {told.grad_norm} are not finite"
        if self.policy == "skip" and self._row < MOST_IN_A_ROW:
            return Finding("skip", f"{text}; skipped", where=Where.STEP)
        if self.policy == "skip":
            text += f", the {MOST_IN_A_ROW}th step in a row"
        if replays:
            text += ", and neither when computed again"
        return Finding("bad_step", text, ends=True, where=Where.STEP)

    def _spike(self, step: int, told: Told) -> Finding | None:
        """A finite step far from those before it, which does not count in what is usual."""
        losses, norms = self._losses, self._norms
        if len(losses) >= _ENOUGH:
            usual, norm = median(losses), median(norms)
            change = median(abs(a - b) for a, b in zip(losses, list(losses)[1:], strict=False))
            high = told.loss - usual > _SPIKE_LOSS * max(change, 1e-2 * abs(usual))
            if high or told.grad_norm > _SPIKE_NORM * norm > 0:
                self._norms.append(min(told.grad_norm, _SPIKE_NORM * norm))
                self._losses.append(min(told.loss, usual + 2 * change))
                text = f"step {step} stands out: loss {told.loss:.4g} (of late {usual:.4g}), "
                text += f"gradient norm {told.grad_norm:.4g} (of late {norm:.4g})"
                return Finding("spike", text)
        if math.isfinite(told.loss):
            losses.append(told.loss)
            norms.append(told.grad_norm)
        return None
