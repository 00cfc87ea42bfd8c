"""A simulated plan as a picture: one lane a rank, time to the right."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from math import floor, log10

from megalite.schedule.action import COMPUTE, Op
from megalite.schedule.simulate import Timeline

# Hue in degrees; the chunks of a rank differ in lightness.
_HUES = {Op.FORWARD: 212, Op.BACKWARD: 152, Op.INPUT_GRAD: 184, Op.WEIGHT_GRAD: 33}
_NAMES = {
    Op.FORWARD: "F forward",
    Op.BACKWARD: "B backward",
    Op.INPUT_GRAD: "I input gradient",
    Op.WEIGHT_GRAD: "W weight gradient",
    Op.REDUCE: "gradient reduction",
}
_LEFT, _TOP, _LANE, _GAP = 74, 74, 26, 6
_LEAST_WIDTH, _MOST_WIDTH = 900.0, 16000.0
_CELL = 20.0  # wide enough for a number
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.n{font-size:11px;text-anchor:middle}"
    ".t{font-size:15px;font-weight:600}.a{fill:#666}.k{fill:#fff}rect.c{stroke:#fff}"
)


def render_svg(timeline: Timeline, title: str, subtitle: str = "") -> str:
    """A self-contained SVG document.

    A cell is an action, its number the microbatch, its colour the op; of a rank's chunks the
    first is the darkest. Empty lane is idle time. A strip below a lane is a gradient reduction.
    """
    scale = _scale(timeline)
    width = _LEFT + timeline.makespan * scale + 24
    bottom = _TOP + timeline.plan.pp * (_LANE + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{bottom + 66}">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text class="t" x="12" y="26">{escape(title)}</text>',
        f'<text class="a" x="12" y="46">{escape(subtitle)}</text>',
        *_axis(timeline.makespan, scale, bottom),
        *(part for rank in range(timeline.plan.pp) for part in _lane(timeline, rank, scale)),
        *_legend(timeline, bottom + 46),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _scale(timeline: Timeline) -> float:
    """Pixels for a unit of time: the shortest cell holds its number, within limits."""
    shortest = min(
        (
            end[i] - start[i]
            for actions, start, end in zip(
                timeline.plan.actions, timeline.start, timeline.end, strict=True
            )
            for i, a in enumerate(actions)
            if a.op in COMPUTE and end[i] > start[i]
        ),
        default=1.0,
    )
    makespan = timeline.makespan or 1.0
    return min(max(_LEAST_WIDTH / makespan, _CELL / shortest), _MOST_WIDTH / makespan)


def _lightness(chunk: int, chunks: int) -> float:
    return 40 + 38 * chunk / (chunks - 1) if chunks > 1 else 46


def _colour(op: Op, chunk: int, chunks: int) -> str:
    return f"hsl({_HUES[op]} 62% {_lightness(chunk, chunks):.0f}%)"


def _lane(timeline: Timeline, rank: int, scale: float) -> Iterator[str]:
    y = _TOP + rank * (_LANE + _GAP)
    stages = timeline.plan.stages_of(rank)
    chunk_of = {stage: chunk for chunk, stage in enumerate(stages)}
    whole = timeline.makespan * scale
    yield f'<text x="12" y="{y + 17}">rank {rank}</text>'
    yield f'<rect x="{_LEFT}" y="{y}" width="{whole:.1f}" height="{_LANE}" fill="#f0f0f0"/>'
    rows = zip(timeline.plan[rank], timeline.start[rank], timeline.end[rank], strict=True)
    for a, start, end in rows:
        x, width = _LEFT + start * scale, (end - start) * scale
        if a.op is Op.REDUCE and width > 0:
            yield (
                f'<rect x="{x:.1f}" y="{y + _LANE + 1}" width="{width:.1f}" '
                f'height="{_GAP - 2}" fill="#8a4fbf"><title>{a}</title></rect>'
            )
        if a.op not in COMPUTE:
            continue
        colour = _colour(a.op, chunk_of[a.stage], len(stages))
        yield (
            f'<rect class="c" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_LANE}" '
            f'fill="{colour}"><title>{a}: {start:g} to {end:g}</title></rect>'
        )
        if width >= 7 * len(str(a.microbatch)) + 3:
            shade = "n k" if _lightness(chunk_of[a.stage], len(stages)) < 50 else "n"
            middle = x + width / 2
            yield f'<text class="{shade}" x="{middle:.1f}" y="{y + 17}">{a.microbatch}</text>'


def _axis(makespan: float, scale: float, bottom: int) -> Iterator[str]:
    """Ticks at 1, 2 or 5 times a power of ten, about 90 pixels apart."""
    if makespan <= 0:
        return
    wanted = 90 / scale
    power = 10 ** floor(log10(wanted))
    tick = next(power * k for k in (1, 2, 5, 10) if power * k >= wanted)
    for nth in range(floor(makespan / tick + 1e-9) + 1):
        x = _LEFT + nth * tick * scale
        yield (
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{bottom}" stroke="#ddd"/>'
            f'<text class="n a" x="{x:.1f}" y="{bottom + 14}">{nth * tick:g}</text>'
        )


def _legend(timeline: Timeline, y: int) -> Iterator[str]:
    plan = timeline.plan
    used = {
        a.op
        for actions, start, end in zip(plan.actions, timeline.start, timeline.end, strict=True)
        for i, a in enumerate(actions)
        if end[i] > start[i]
    }
    x = _LEFT
    chunks = max(len(plan.stages_of(rank)) for rank in range(plan.pp))
    for op, name in _NAMES.items():
        if op not in used:
            continue
        for chunk in range(1 if op is Op.REDUCE else chunks):
            colour = "#8a4fbf" if op is Op.REDUCE else _colour(op, chunk, chunks)
            yield f'<rect x="{x}" y="{y - 11}" width="14" height="14" fill="{colour}"/>'
            x += 15
        yield f'<text x="{x + 4}" y="{y}">{name}</text>'
        x += 24 + 7 * len(name)
    if chunks > 1:
        yield f'<text class="a" x="{x}" y="{y}">dark to light: chunk 0 to {chunks - 1}</text>'
