"""A curve over steps: lines stretch with the page, texts do not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megalite.report.history import Column
from megalite.report.html import Html, join, tag
from megalite.report.series import block_means, compact, log_ticks, short, thin, tick_labels, ticks

WIDTH, HEIGHT = 2000, 1000  # of the drawing, in its own units
_COLUMNS = 1000
_MOST_DOTS = 60
_BLOCKS = 80
_MOST = 1e100  # what is greater has no place on any axis; what is less than 1 / _MOST is 0


@dataclass(frozen=True)
class Chart:
    """One quantity.

    Attributes:
        x, y: steps and values; what is not finite is left out.
        axis: "log" draws the logarithm and leaves out what is not positive.
        means: draw the means of blocks of steps on top (of logarithms where these are drawn).
        dots: mark each value, where there are few.
    """

    title: str
    unit: str
    x: Column
    y: Column
    axis: Literal["fitted", "from zero", "log"] = "fitted"
    means: bool = False
    dots: bool = False

    @property
    def log(self) -> bool:
        return self.axis == "log"

    @property
    def newest(self) -> str:
        if not len(self.y):
            return ""
        value = float(self.y[-1])
        return compact(value) if abs(value) >= 1000 else f"{value:.4g}"


@dataclass(frozen=True)
class Frame:
    """What all curves of a page share: the range of steps, restarts and bad steps."""

    low: float
    high: float
    restarts: Sequence[float] = ()
    bad: Sequence[float] = ()

    @classmethod
    def around(cls, steps: Column, restarts: Sequence[float], bad: Sequence[float]) -> Frame:
        """From the first to the last of ``steps``, of which there is at least one."""
        low, high = float(steps.min()), float(steps.max())
        if low == high:
            low, high = low - 0.5, high + 0.5
        return cls(low, high, [r for r in restarts if low <= r <= high], bad)

    def across(self, step: float) -> float:
        return (step - self.low) / (self.high - self.low)


def figure(chart: Chart, frame: Frame, class_: str = "") -> Html:
    """A chart with its title, newest value and axes."""
    title = join([tag("b", chart.title), " ", tag("span", chart.unit, class_="unit")])
    caption = tag("figcaption", tag("span", title), tag("span", chart.newest, class_="newest"))
    return tag(
        "figure", caption, *_plot(chart, frame), class_=f"chart {class_}".strip(), role="group"
    )


def block_width(num_steps: int) -> int:
    """Steps of a block of which the mean is drawn; 0: too few steps for that."""
    width = max(5, math.ceil(num_steps / _BLOCKS))
    return width if num_steps >= 20 * width else 0


@dataclass(frozen=True)
class _Axis:
    """The range of values, or of their logarithms to base 10."""

    low: float
    high: float
    log: bool

    @classmethod
    def around(cls, y: Column, chart: Chart) -> _Axis:
        low, high = float(np.nanmin(y)), float(np.nanmax(y))
        if chart.axis == "from zero" and low >= 0:
            return cls(0.0, 1.06 * high or 1.0, False)
        room = 0.06 * (high - low) or (0.2 if chart.log else 0.1 * abs(high) or 1.0)
        return cls(low - room, high + room, chart.log)

    def marks(self) -> list[tuple[float, str]]:
        """Heights from 0 to 1 and their texts."""
        if self.log:
            values = log_ticks(10**self.low, 10**self.high)
            return [(self.up(math.log10(v)), short(v)) for v in values]
        values = ticks(self.low, self.high)
        return list(zip(map(self.up, values), tick_labels(values), strict=True))

    def up(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def _plot(chart: Chart, frame: Frame) -> list[Html]:
    y = _drawable(chart)
    if np.isnan(y).all():
        return [tag("p", "No value to draw", class_="empty")]
    axis = _Axis.around(y, chart)
    steps = [t for t in ticks(frame.low, frame.high) if t == round(t)]
    marks = axis.marks()
    drawing = tag(
        "svg",
        tag("path", d="".join(f"M0 {_down(up)}h{WIDTH}" for up, _ in marks), class_="grid"),
        _bars("restart", frame.restarts, HEIGHT, frame),
        *_lines(chart, y, axis, frame),
        _bars("bad", frame.bad, HEIGHT // 14, frame),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{chart.title}, {chart.unit}: {chart.newest}",
    )
    labels = [
        tag("span", text, class_="y", style=f"top:{100 * (1 - up):.2f}%") for up, text in marks
    ] + [
        tag("span", text, class_="x", style=f"left:{100 * frame.across(step):.2f}%")
        for step, text in zip(steps, tick_labels(steps), strict=True)
    ]
    return [tag("div", drawing, *labels, class_="plot")]


def _drawable(chart: Chart) -> Column:
    """The values, or their logarithms; nan for what has no place on the axis."""
    size = np.abs(chart.y)
    y = np.where(size < _MOST, np.where(size > 1 / _MOST, chart.y, 0.0), np.nan)
    if not chart.log:
        return y
    return np.log10(y, out=np.full_like(y, np.nan), where=y > 0)


def _lines(chart: Chart, y: Column, axis: _Axis, frame: Frame) -> list[Html]:
    width = block_width(len(y)) if chart.means else 0
    found = [_line(chart.x, y, axis, frame, "raw" if width else "line")]
    if width:
        found.append(_line(*block_means(chart.x, y, width), axis, frame, "line"))
    if len(y) <= (_MOST_DOTS if chart.dots else 1):
        for i, value in enumerate(chart.y.tolist()):
            name = tag("title", f"step {chart.x[i]:,.0f}: {value:.4g}")
            found.append(_line(chart.x[i : i + 1], y[i : i + 1], axis, frame, "dot", name))
    return found


def _line(x: Column, y: Column, axis: _Axis, frame: Frame, class_: str, *children: Html) -> Html:
    x, y = thin(x, y, frame.low, frame.high, _COLUMNS)
    points = [
        None if math.isnan(value) else (_along(step, frame), _down(axis.up(value)))
        for step, value in zip(x.tolist(), y.tolist(), strict=True)
    ]
    return tag("path", *children, d=_path(points), class_=class_)


def _along(step: float, frame: Frame) -> int:
    return round(frame.across(step) * WIDTH)


def _down(up: float) -> int:
    return round((1 - up) * HEIGHT)


def _path(points: Sequence[tuple[int, int] | None]) -> str:
    """Lines through the points; a point between two gaps becomes a dot."""
    parts: list[str] = []
    run: list[str] = []
    for point in (*points, None):
        if point is not None:
            run.append(f"{point[0]} {point[1]}")
        elif run:
            parts.append(f"M{run[0]}h0" if len(run) == 1 else f"M{run[0]}L{' '.join(run[1:])}")
            run = []
    return "".join(parts)


def _bars(class_: str, steps: Sequence[float], height: int, frame: Frame) -> Html:
    places = sorted({_along(step, frame) for step in steps})
    return tag("path", d="".join(f"M{at} {HEIGHT}v-{height}" for at in places), class_=class_)
