"""The timeline of a plan: a row a pipeline rank, a cell a computation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megalite.report.html import Html, join, tag
from megalite.report.series import tick_labels, ticks
from megalite.schedule.action import COMPUTE, Action, Op, Plan
from megalite.schedule.simulate import Timeline

_CLASS = {Op.FORWARD: "f", Op.BACKWARD: "b", Op.INPUT_GRAD: "i", Op.WEIGHT_GRAD: "w"}
_WORDS = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.INPUT_GRAD: "input gradient",
    Op.WEIGHT_GRAD: "weight gradient",
}
_ROW, _GAP, _STRIP, _LETTER, _MARGIN = 24, 5, 8, 6.6, 4  # pixels
_WIDTH, _NARROWEST, _WIDEST = 1000, 5.0, 30.0  # of the drawing, and of one unit of time
_MOST_ROWS = 32


@dataclass(frozen=True)
class _Window:
    """The part of the time from ``begin`` to ``end``, drawn from ``left`` on."""

    begin: float
    end: float
    left: float
    unit: float  # pixels

    @property
    def right(self) -> float:
        return self.left + (self.end - self.begin) * self.unit


@dataclass(frozen=True)
class Scale:
    """How times are drawn: figures of the same scale can be laid one above the other.

    Attributes:
        span: the time shown. cell: the time of a common computation, which has to be seen.
        per_unit: of the unit in which times are written, for one of ``span``'s.
    """

    span: float
    cell: float = 1.0
    per_unit: float = 1.0
    unit: str = ""

    def text(self, time: float) -> str:
        return f"{time * self.per_unit:.4g}{self.unit}"


@dataclass(frozen=True)
class Mark:
    """Something beside the computations of a rank, drawn as a strip of the class ``class_``."""

    class_: str
    text: str
    start: float
    end: float


def timeline_figure(
    timeline: Timeline, scale: Scale | None = None, marks: Sequence[Sequence[Mark]] = ()
) -> Html:
    """A long step is shown by its beginning and its end; many ranks by the first and the last.

    Args:
        scale: else units of the timeline's own.
        marks: of each rank.
    """
    scale = scale or Scale(timeline.makespan)
    windows = _windows(scale)
    rows, left_out = _rows(timeline.plan.pp)
    pitch = _ROW + _GAP
    height = len(rows) * pitch + 16
    drawn = [
        part
        for at, rank in enumerate(rows)
        for window in windows
        for part in _row(timeline, rank, at * pitch, window, scale, marks)
    ]
    names = [tag("span", f"pp {rank}", style=f"top:{at * pitch}px") for at, rank in enumerate(rows)]
    width = windows[-1].right + 1
    drawing = tag(
        "svg",
        *drawn,
        *(part for window in windows for part in _axis(window, height, scale)),
        width=f"{width:.0f}",
        height=height,
        viewBox=f"0 0 {width:.0f} {height}",
        role="img",
        aria_label=f"timeline of {timeline.plan.pp} pipeline ranks",
        class_="fine" if windows[0].unit * scale.cell < 2 * _NARROWEST else "",
    )
    notes = []
    if len(windows) > 1:
        skipped = windows[1].begin - windows[0].end
        what = f"{skipped * scale.per_unit:,.0f}{scale.unit or ' units'}"
        notes.append(f"The {what} in the middle are left out.")
    if left_out:
        notes.append(f"{left_out} ranks in the middle are left out.")
    return join(
        [
            tag(
                "div",
                tag("div", *names, class_="names", style=f"height:{height}px"),
                tag("div", drawing, class_="scroll", tabindex=0),
                class_="timeline",
            ),
            tag("p", " ".join(notes), class_="note") if notes else Html(""),
        ]
    )


def cell_keys(plan: Plan) -> list[tuple[str, str]]:
    """The legend of a figure's cells."""
    ops = {a.op for actions in plan.actions for a in actions}
    keys = [(_CLASS[op], _WORDS[op]) for op in _CLASS if op in ops]
    if plan.num_stages > plan.pp:
        keys.append(("", "darker: every second stage of a rank"))
    return [*keys, ("", "number: microbatch, where it fits (hover for all)")]


def _windows(scale: Scale) -> list[_Window]:
    span, cell = scale.span, scale.cell
    unit = min(_WIDEST / cell, _WIDTH / max(span, cell))
    if unit * cell >= _NARROWEST:
        return [_Window(0.0, span, 0.0, unit)]
    narrow = _NARROWEST / cell
    half = (_WIDTH - 40) / 2 / narrow
    first = _Window(0.0, half, 0.0, narrow)
    return [first, _Window(span - half, span, first.right + 40, narrow)]


def _rows(pp: int) -> tuple[list[int], int]:
    if pp <= _MOST_ROWS:
        return list(range(pp)), 0
    half = _MOST_ROWS // 2
    return [*range(half), *range(pp - half, pp)], pp - _MOST_ROWS


def _row(
    timeline: Timeline,
    rank: int,
    top: float,
    window: _Window,
    scale: Scale,
    marks: Sequence[Sequence[Mark]],
) -> Iterator[Html]:
    yield _rect(window.left, top, window.right, class_="idle")
    for mark in marks[rank] if marks else ():
        begin, stop = max(mark.start, window.begin), min(mark.end, window.end)
        if begin < stop:
            left, right = (window.left + (t - window.begin) * window.unit for t in (begin, stop))
            when = f"{mark.text}, {scale.text(mark.end - mark.start)}"
            strip = _rect(left, top + (_ROW - _STRIP) / 2, right, height=_STRIP)
            yield tag("g", tag("title", when), strip, class_=mark.class_)
    for action, start, end in zip(
        timeline.plan[rank], timeline.start[rank], timeline.end[rank], strict=True
    ):
        begin, stop = max(start, window.begin), min(end, window.end)
        if action.op in COMPUTE and begin < stop:
            left, right = (window.left + (t - window.begin) * window.unit for t in (begin, stop))
            when = f"{scale.text(start)} to {scale.text(end)}"
            later = timeline.plan.stages_of(rank).index(action.stage) % 2
            yield _cell(action, left, right, top, when, " later" * later)


def _cell(action: Action, left: float, right: float, top: float, when: str, more: str) -> Html:
    number = str(action.microbatch)
    what = f"{_WORDS[action.op]} of microbatch {number}, stage {action.stage}, from {when}"
    parts = [tag("title", what), _rect(left, top, right)]
    if len(number) * _LETTER + _MARGIN <= right - left:
        middle = f"{(left + right) / 2:.1f}"
        parts.append(tag("text", number, x=middle, y=f"{top + _ROW / 2 + 4:g}"))
    return tag("g", *parts, class_=f"{_CLASS[action.op]}{more}")


def _rect(left: float, top: float, right: float, height: int = _ROW, **more: str) -> Html:
    return tag(
        "rect", x=f"{left:.1f}", y=f"{top:g}", width=f"{right - left:.1f}", height=height, **more
    )


def _axis(window: _Window, height: int, scale: Scale) -> Iterator[Html]:
    marks = ticks(window.begin * scale.per_unit, window.end * scale.per_unit, 10)
    for mark, text in zip(marks, tick_labels(marks), strict=True):
        at = window.left + (mark / scale.per_unit - window.begin) * window.unit
        edge = "start" if mark == 0 else "end" if at > window.right - 10 else "middle"
        yield tag("text", text, x=f"{at:.1f}", y=height - 3, class_=f"axis {edge}")
