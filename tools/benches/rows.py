"""What a bench reports: medians side by side, their ranges, and whether a goal is met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal


@dataclass(frozen=True)
class Sample:
    """One figure's repetitions, in any unit."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def range(self) -> tuple[float, float]:
        return min(self.values), max(self.values)

    def overlaps(self, other: Sample) -> bool:
        return self.range[0] <= other.range[1] and other.range[0] <= self.range[1]

    def scaled(self, factor: float) -> Sample:
        return Sample(tuple(v * factor for v in self.values))

    def rate(self, amount: float) -> Sample:
        """Times to ``amount`` per time."""
        return Sample(tuple(amount / v for v in self.values))


@dataclass(frozen=True)
class Goal:
    """A limit of a row's ratio.

    ``at most``, and ``at least`` with a limit of 1 or less, are met by the medians alone: a tie is
    enough. ``at least`` with a higher one claims to be ahead, which overlapping ranges do not show.
    ``within`` is for predictions: the ratio is off 1 by the limit at most, either way.
    """

    bound: Literal["at most", "at least", "within"]
    limit: float

    def __str__(self) -> str:
        if self.bound == "within":
            return f"{1 - self.limit:g}-{1 + self.limit:g}"
        return f"{'<=' if self.bound == 'at most' else '>='} {self.limit:g}"


@dataclass(frozen=True)
class Row:
    """``ours`` beside ``peer``, in the unit that ``what`` names.

    The ratio is ours / peer, or, where ``inverse`` (times, and the goal is to be faster),
    peer / ours. Without a goal the row is there to be read.
    """

    what: str
    ours: Sample
    peer: Sample
    goal: Goal | None = None
    inverse: bool = False

    @property
    def ratio(self) -> float:
        ratio = self.ours.median / self.peer.median
        return 1 / ratio if self.inverse else ratio

    @property
    def verdict(self) -> str:
        """``met``, ``missed``, or ``tie`` where ranges overlap and the goal is to be ahead."""
        if self.goal is None:
            return ""
        if self.goal.bound == "within":
            return "met" if abs(self.ratio - 1) <= self.goal.limit else "missed"
        if self.goal.bound == "at most":
            return "met" if self.ratio <= self.goal.limit else "missed"
        if self.ratio < self.goal.limit:
            return "missed"
        ahead = self.goal.limit <= 1 or not self.ours.overlaps(self.peer)
        return "met" if ahead else "tie"

    @property
    def ok(self) -> bool:
        return self.verdict in ("", "met")

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "ours": self.ours.median,
            "peer": self.peer.median,
            "ratio": self.ratio,
            "goal": str(self.goal) if self.goal else None,
            "range": {"ours": list(self.ours.range), "peer": list(self.peer.range)},
        }


def to_json(rows: Sequence[Row]) -> dict[str, Any]:
    """``{"ok": all goals met, "rows": [...]}``."""
    return {"ok": all(row.ok for row in rows), "rows": [row.to_json() for row in rows]}


def to_text(rows: Sequence[Row]) -> str:
    """An aligned table, one line a row."""
    head = ("what", "ours", "range", "peer", "range", "ratio", "goal", "")
    cells = [head, *map(_cells, rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    lines = [
        "  ".join(
            c.ljust(w) if i in (0, len(head) - 1) else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.what,
        _number(row.ours.median),
        _span(row.ours),
        _number(row.peer.median),
        _span(row.peer),
        f"{row.ratio:.3f}",
        str(row.goal) if row.goal else "",
        row.verdict,
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _span(sample: Sample) -> str:
    low, high = sample.range
    return f"{_number(low)}-{_number(high)}"
