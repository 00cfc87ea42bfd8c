"""The page of a ranking: the layouts, the chosen plan's timeline, time against memory of all."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from megalite.parallel_config import ParallelConfig
from megalite.planner.advice import advice, bubble_warning, sensitivity
from megalite.planner.estimate import Estimate
from megalite.planner.search import Point, Ranking
from megalite.report.chart import HEIGHT, WIDTH
from megalite.report.curves import legend
from megalite.report.html import Html, tag
from megalite.report.pipeline import Scale, cell_keys, timeline_figure
from megalite.report.series import tick_labels, ticks
from megalite.report.style import stylesheet
from megalite.schedule.action import COMPUTE
from megalite.schedule.simulate import Timeline
from tools.planning.words import GB, memory_words, size_of

_HEAD = """<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
"""
_STYLE = """
.plot .fits{stroke:var(--loss);stroke-width:7}
.plot .bound{stroke:var(--soft);stroke-width:4;opacity:.45}
.plot .big{stroke:var(--bad);stroke-width:5;opacity:.6}
.plot .front{stroke:var(--good);stroke-width:2}
.card td:not(:first-child),.card th{white-space:nowrap}
.card .refused td{white-space:normal}
.plot .cap{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:5 4}
"""


_FARTHEST = 2.0
"""Layouts that need more than so many times the memory are not drawn."""


def pareto(points: Sequence[Point]) -> list[Point]:
    """The layouts of known time that no other one beats in both time and memory, by memory."""
    found: list[Point] = []
    known = (p for p in points if p.simulated or p.timed)
    for p in sorted(known, key=lambda p: (p.peak_bytes, p.step_s)):
        if not found or p.step_s < found[-1].step_s:
            found.append(p)
    return found


def render(r: Ranking, timeline: Timeline, command: str) -> str:
    """A page that fetches nothing and runs nothing."""
    hw, shape = r.request.machine.hw, r.request.shape
    title = f"{size_of(shape.num_parameters())} parameters on {r.request.gpus:,} x {hw.name}"
    about = (
        f"{r.request.global_batch:,} sequences of {shape.seq:,} tokens a step; "
        f"{r.num_layouts:,} layouts bounded, {r.num_simulated:,} simulated"
    )
    said = [*filter(None, [bubble_warning(r.best[0])]), *advice(r), *sensitivity(r)]
    body = tag(
        "main",
        tag("h1", title),
        tag("p", about, class_="about"),
        tag("p", memory_words(r), class_="about"),
        tag("h2", "Layouts"),
        tag("div", _table(r), tag("ul", *(tag("li", x) for x in said)), class_="card"),
        *_timeline(timeline, r.best[0]),
        tag("h2", "Time against memory ", tag("small", "every layout that was looked at closely")),
        _chart(r),
        tag("h2", "Refused"),
        tag("div", _refused(r), class_="card"),
        tag("h2", "Start it"),
        tag("pre", command, class_="card"),
    )
    head = tag("title", f"{title} - megalite"), tag("style", Html(stylesheet() + _STYLE))
    return f'<!doctype html>\n<html lang="en">\n{_HEAD}{head[0]}\n{head[1]}\n{body}\n</html>\n'


def _table(r: Ranking) -> Html:
    names = ("layout", "step", "MFU", "bubble", "memory", "free")
    rows = [
        tag(
            "tr",
            tag("td", _words(e.job.parallel, e.job.mesh.dp, e.job.micro_batch)),
            tag("td", f"{e.step_s:.4g} s"),
            tag("td", f"{e.mfu:.1%}"),
            tag("td", f"{e.bubble_fraction:.1%}"),
            tag("td", f"{e.peak_bytes / GB:.1f} GB"),
            tag("td", f"{(r.request.memory - e.peak_bytes) / GB:.1f} GB"),
        )
        for e in r.best
    ]
    head = tag("thead", tag("tr", *(tag("th", name) for name in names)))
    return tag("table", head, tag("tbody", *rows))


def _words(p: ParallelConfig, dp: int, micro_batch: int) -> str:
    words = [f"tp {p.tp}, pp {p.pp} x {p.virtual_stages}, dp {dp}", p.schedule]
    words += [f"micro-batch {micro_batch}", f"recompute {p.recompute}"]
    words += ["sequence parallel"] * p.sequence_parallel + ["zero1"] * p.zero1
    return ", ".join([*words, str(p.partition)])


def _refused(r: Ranking) -> Html:
    rows = [
        tag("tr", tag("td", f"{x.count:,}"), tag("td", x.reason), tag("td", x.example))
        for x in r.refused
    ]
    return (
        tag("table", tag("tbody", *rows), class_="refused")
        if rows
        else tag("p", "None.", class_="note")
    )


def _timeline(timeline: Timeline, best: Estimate) -> list[Html]:
    plan, whole = timeline.plan, best.job.microbatches
    several, idle = "es" * (whole > 1), f"{timeline.bubble_fraction:.1%} idle"
    text = f"{plan.name}, {whole:,} microbatch{several}, {idle}; seconds"
    if plan.num_microbatches < whole:
        first = f"the first {plan.num_microbatches:,} of {whole:,} microbatches"
        text = (
            f"{plan.name}, {first}: {idle}, of the whole step {best.bubble_fraction:.1%}; seconds"
        )
    keys = [*cell_keys(plan), ("idle", "idle")]
    figure = tag("div", timeline_figure(timeline, _scale(timeline)), legend(keys), class_="card")
    return [tag("h2", "One step of the pipeline ", tag("small", text)), figure]


def _scale(timeline: Timeline) -> Scale:
    """As wide as the page; a long step is cut where its computations would be too thin."""
    computed = [
        end - start
        for actions, starts, ends in zip(
            timeline.plan.actions, timeline.start, timeline.end, strict=True
        )
        for action, start, end in zip(actions, starts, ends, strict=True)
        if action.op in COMPUTE and end > start
    ]
    return Scale(timeline.makespan, min(median(computed), timeline.makespan / 40), 1.0, " s")


def _chart(r: Ranking) -> Html:
    """Memory to the right, time upwards; the front joins what nothing beats in both. The times
    are near to one another: their axis does not begin at 0."""
    cap = r.request.cap
    points = [p for p in r.points if p.peak_bytes <= _FARTHEST * cap]
    far = len(r.points) - len(points)
    most = 1.06 * max(max(p.peak_bytes for p in points), min(cap, 4e12))
    times = [p.step_s for p in points]
    low, high = min(times), max(times)
    edge = 0.08 * (high - low) or 0.02 * high
    low, high = low - edge, high + edge

    def height(seconds: float) -> int:
        return round((high - seconds) / (high - low) * HEIGHT)

    def at(p: Point) -> str:
        return f"{round(p.peak_bytes / most * WIDTH)} {height(p.step_s)}"

    dots = [tag("path", tag("title", _name(p)), d=f"M{at(p)}h0", class_=_kind(p)) for p in points]
    front = "L".join(at(p) for p in pareto(points))
    right, up = ticks(0, most / GB), ticks(low, high)
    grid = "".join(f"M0 {height(v)}h{WIDTH}" for v in up)
    drawing = tag(
        "svg",
        tag("path", d=grid, class_="grid"),
        tag("path", d=f"M{round(cap / most * WIDTH)} 0v{HEIGHT}", class_="cap"),
        *dots,
        tag("path", d=f"M{front}", class_="front"),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label="time against memory",
    )
    labels = [
        tag("span", text, class_="y", style=f"top:{100 * height(v) / HEIGHT:.2f}%")
        for v, text in zip(up, tick_labels(up), strict=True)
    ] + [
        tag("span", text, class_="x", style=f"left:{100 * v * GB / most:.2f}%")
        for v, text in zip(right, tick_labels(right), strict=True)
    ]
    note = (
        "GB a GPU to the right, seconds a step upwards. Blue: simulated; green: the Pareto front; "
        "grey: not simulated, at the bound of its time; red: does not fit (dashed: the memory less "
        f"what stays free){f'; {far:,} that need still more are not drawn' if far else ''}."
    )
    return tag(
        "figure",
        tag("div", drawing, *labels, class_="plot"),
        tag("p", note, class_="note"),
        class_="chart wide",
    )


def _kind(p: Point) -> str:
    return "fits" if p.simulated else "bound" if p.fits else "big"


def _name(p: Point) -> str:
    bound = "" if p.simulated else "at least "
    return f"{p.label}: {bound}{p.step_s:.4g} s, {p.peak_bytes / GB:.1f} GB"
