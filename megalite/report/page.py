"""The page of a run: how it went, its curves, where it ran, what happened, how it was set up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from megalite.mesh_shape import MeshShape
from megalite.report.curves import curves, legend
from megalite.report.history import History
from megalite.report.html import Html, tag
from megalite.report.layout import layout_table, rank_list
from megalite.report.measured import Traced
from megalite.report.pipeline import cell_keys, timeline_figure
from megalite.report.series import duration
from megalite.report.step import measured_step
from megalite.report.style import stylesheet
from megalite.report.summary import summary
from megalite.schedule.action import Plan
from megalite.schedule.simulate import simulate

_FIRST_EVENTS, _LAST_EVENTS = 20, 180  # of many, those that are listed
_HEAD = """<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
"""


@dataclass(frozen=True)
class Layout:
    """How a step is shared out: ranks, the lowered plan, and the layers of each stage."""

    shape: MeshShape
    plan: Plan
    layers: Sequence[range]


@dataclass(frozen=True)
class Run:
    """What a page is made of.

    Attributes:
        about: what trains, in a line.
        num_steps: steps of the whole run, done or not.
        run_dir: as the events name it.
        config: the text of the configuration.
        layout: the newest; None if nothing has started.
        traced: the step of its trace that is shown, if there is one.
        untraced: why there is none, if one was asked for.
    """

    name: str
    about: str
    num_steps: int
    run_dir: str
    config: str
    history: History
    layout: Layout | None
    traced: Traced | None = None
    untraced: str = ""


def render(run: Run) -> str:
    """The whole page: it fetches nothing, runs nothing, and is the same for the same run."""
    num_ranks = run.layout.shape.world_size if run.layout else 1
    body = tag(
        "main",
        tag("h1", run.name),
        tag("p", run.about, class_="about"),
        *summary(run.history, run.num_steps, num_ranks),
        *(measured_step(run.traced) if run.traced else []),
        *(curves(run.history) if run.history.num_steps else []),
        *(_planned(run.layout.plan, run.untraced) if run.layout and not run.traced else []),
        *(_layout(run.layout) if run.layout else []),
        *_events(run.history.events, run.run_dir),
        tag("h2", "Configuration"),
        tag("details", tag("summary", "config.yaml"), tag("pre", run.config), class_="card"),
    )
    title, style = tag("title", f"{run.name} - megalite"), tag("style", Html(stylesheet()))
    return f'<!doctype html>\n<html lang="en">\n{_HEAD}{title}\n{style}\n{body}\n</html>\n'


def _layout(layout: Layout) -> list[Html]:
    shape = layout.shape
    ranks = f"{shape.world_size:,} rank{'s' * (shape.world_size > 1)}: {shape}"
    note = "A number in a cell is a rank; the ranks of a cell are tp 0, tp 1, … of that replica."
    return [
        tag("h2", "Layout ", tag("small", ranks)),
        tag(
            "div",
            layout_table(shape, layout.plan, layout.layers),
            tag("p", note, class_="note"),
            rank_list(shape),
            class_="card",
        ),
    ]


def _planned(plan: Plan, untraced: str) -> list[Html]:
    """The timeline of a step in which each stage's forward takes 1 and its backward 2."""
    one = [1.0] * plan.num_stages
    timeline = simulate(plan, one, one, one)
    text = (
        f"planned, not measured: {plan.name}, {plan.num_microbatches:,} microbatches, "
        f"{timeline.bubble_fraction:.0%} of the ranks' time idle, messages not counted"
    )
    text += f"; {untraced}" * bool(untraced)
    keys = [*cell_keys(plan), ("idle", "idle"), ("", "F, I and W take 1 unit of time, B takes 2")]
    figure = tag("div", timeline_figure(timeline), legend(keys), class_="card")
    return [tag("h2", "One step of the pipeline ", tag("small", text)), figure]


def _events(events: Sequence[Mapping[str, Any]], run_dir: str) -> list[Html]:
    if not events:
        return [tag("h2", "Events"), tag("p", "None.", class_="note")]
    shown: list[Mapping[str, Any] | None] = list(events)
    if len(shown) > _FIRST_EVENTS + _LAST_EVENTS:
        shown[_FIRST_EVENTS:-_LAST_EVENTS] = [None]
    start = _time(events[0])
    rows = [_event(event, start, run_dir, len(events)) for event in shown]
    head = [tag("th", name) for name in ("UTC", "after", "event", "step", "details")]
    table = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows), class_="events")
    return [
        tag("h2", "Events ", tag("small", f"{len(events):,}")),
        tag("div", tag("div", table, class_="scroll", tabindex=0), class_="card"),
    ]


def _event(event: Mapping[str, Any] | None, start: float | None, run_dir: str, number: int) -> Html:
    if event is None:
        left_out = f"… {number - _FIRST_EVENTS - _LAST_EVENTS:,} more …"
        return tag("tr", tag("td", left_out, colspan=5))
    time = _time(event)
    at = _utc(time)
    after = "" if time is None or start is None else duration(time - start)
    details = "; ".join(
        f"{key} {_text(value, run_dir)}"
        for key, value in event.items()
        if key not in ("time", "event", "step")
    )
    cells = (at, after, str(event.get("event", "")), _step(event.get("step")), details)
    return tag("tr", *(tag("td", cell) for cell in cells))


def _time(event: Mapping[str, Any]) -> float | None:
    value = event.get("time")
    return float(value) if isinstance(value, int | float) else None


def _utc(time: float | None) -> str:
    try:
        return "" if time is None else f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return str(time)


def _step(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)


def _text(value: object, run_dir: str) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.removeprefix(f"{run_dir.rstrip('/')}/")
