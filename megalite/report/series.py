"""Numbers for drawing: smoothed, thinned out to what can be seen, rounded for axes."""

from __future__ import annotations

import math

import numpy as np

from megalite.report.history import Column

_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def block_means(x: Column, y: Column, width: int) -> tuple[Column, Column]:
    """The mean of x and of the finite values of y over each ``width`` neighbours in turn; nan
    where there is none."""
    finite = np.isfinite(y)
    starts = np.arange(0, len(y), width)
    counts = np.add.reduceat(finite, starts, dtype=np.int64)
    sums = np.add.reduceat(np.where(finite, y, 0.0), starts)
    sizes = np.diff(starts, append=len(y))
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return np.add.reduceat(x, starts) / sizes, means


def thin(x: Column, y: Column, low: float, high: float, columns: int) -> tuple[Column, Column]:
    """The least and the greatest finite value of each of ``columns`` columns of [low, high].

    Args:
        x: never falls; y may hold what is not finite, which counts only in a column without
            finite values and gives nan there.
    Returns:
        Points in the order of x, at most two a column; all points where they are no more.
    """
    y = np.where(np.isfinite(y), y, np.nan)
    if len(x) <= 2 * columns:
        return x, y
    column = np.minimum((x - low) * (columns / (high - low)), columns - 1).astype(np.int64)
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    least, most = np.fmin.reduceat(y, starts), np.fmax.reduceat(y, starts)
    return np.repeat(x[starts], 2), np.stack([least, most], axis=1).reshape(-1)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """At most ``most`` round numbers in [low, high], low < high, at equal distances."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    distance = next(f * power for f in (1, 2, 5, 10, 20) if f * power > raw * (1 - 1e-9))
    first, last = math.ceil(low / distance - 1e-9), math.floor(high / distance + 1e-9)
    return [i * distance for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers in [low, high], 0 < low < high: powers of ten, or more where they are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = max(1, len(decades) // 5)
    for factors in ((1,), (1, 3), (1, 2, 5)):
        found = [f * 10.0**d for d in decades[::every] for f in factors]
        found = [tick for tick in found if low <= tick <= high]
        if len(found) >= 3:
            return found
    return ticks(low, high)


def tick_labels(values: list[float]) -> list[str]:
    """Short texts for equally distant values: one unit, and the decimals that tell them apart."""
    size = max((abs(v) for v in values), default=0.0)
    unit, letter = next(((u, k) for u, k in _UNITS if size >= max(u, 1e4)), (1.0, ""))
    if 0 < size < 1e-3:
        exponent = math.floor(math.log10(size))
        unit, letter = 10.0**exponent, f"e{exponent}"
    texts = [f"{v / unit:.4f}".rstrip("0") for v in values]
    decimals = max((len(text.partition(".")[2]) for text in texts), default=0)
    return [f"{v / unit:.{decimals}f}{letter}" if v else "0" for v in values]


def short(value: float) -> str:
    """A round number, in as few characters as it takes."""
    return compact(value) if value >= 1e4 else f"{value:g}".replace("e-0", "e-")


def compact(value: float) -> str:
    """Three digits and a letter from 10,000 on, whole numbers below; ``12.3k``, ``4.1M``."""
    if not math.isfinite(value):
        return str(value)
    for unit, letter in _UNITS:
        if abs(value) >= unit * (10 if letter == "k" else 0.9995):
            return f"{value / unit:.3g}{letter}" if abs(value) < 1e15 else f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """``5.2 s``, ``3 min 20 s``, ``4 h 05 min``, ``2 d 3 h``."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour} h"
    return f"{hours} h {minute:02d} min" if hours else f"{minutes} min {second:02d} s"
