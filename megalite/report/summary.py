"""How a run went, in a sentence and six figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megalite.report.curves import held_out
from megalite.report.history import Column, History
from megalite.report.html import Html, tag
from megalite.report.series import compact, duration


def summary(history: History, num_steps: int, num_ranks: int) -> list[Html]:
    """The verdict on a run that is to have ``num_steps``, and its figures if it has any."""
    kind, text = verdict(history, num_steps)
    found = [tag("p", text, class_=f"verdict {kind}")]
    if history.num_steps:
        figures = [
            tag("div", tag("dt", name), tag("dd", big, class_="big"), tag("dd", small))
            for name, big, small in _figures(history, num_steps, num_ranks)
        ]
        found.append(tag("dl", *figures, class_="tiles"))
    return found


def verdict(history: History, num_steps: int) -> tuple[str, str]:
    """good, part or bad, and a sentence."""
    steps, bad = history.steps, history.bad
    if not history.num_steps:
        return "part", f"No step of {num_steps:,} is done"
    done = int(steps["step"][-1])
    if bad[-1]:
        what = f"loss {steps['loss'][-1]:.4g}, gradient norm {steps['grad_norm'][-1]:.4g}"
        return "bad", f"Step {done:,} of {num_steps:,} is bad: {what}"
    number = int(bad.sum())
    remark = f"; {number:,} bad step{'s' * (number > 1)} among them" if number else ""
    if done >= num_steps:
        return (
            "part" if number else "good",
            f"Complete: {done:,} of {num_steps:,} steps are done{remark}",
        )
    return "part", f"Not complete: {done:,} of {num_steps:,} steps are done{remark}"


def _figures(history: History, num_steps: int, num_ranks: int) -> list[tuple[str, str, str]]:
    """Name, value and remark of each."""
    steps = history.steps
    spent = float(np.sum(steps["step_time_s"]))
    tokens = float(np.sum(steps["tokens_per_s"] * steps["step_time_s"]))
    speed = tokens / spent if spent else math.nan
    share = f"{compact(speed / num_ranks)} a rank, {num_ranks:,} ranks"
    return [
        ("steps", f"{steps['step'][-1]:,.0f}", f"of {num_steps:,}"),
        (
            "training loss",
            f"{steps['loss'][-1]:.4g}",
            f"nats a token; {steps['loss'][0]:.4g} at step {steps['step'][0]:,.0f}",
        ),
        _held_out(history.evals),
        ("tokens seen", compact(steps["tokens"][-1]), f"{steps['tokens'][-1]:,.0f}"),
        ("time in steps", duration(spent), _wall(history.events)),
        ("tokens/s", compact(speed), share if num_ranks > 1 else "mean over all steps"),
    ]


def _held_out(evals: Mapping[str, Column]) -> tuple[str, str, str]:
    column, name, unit = held_out(evals)
    values = evals[column]
    if not len(values):
        return "held-out", "-", "no evaluation"
    finite = np.flatnonzero(np.isfinite(values))
    if not len(finite):
        return name.lower(), f"{values[-1]:.4g}", unit
    best = finite[np.argmin(values[finite])]
    where = f"best {values[best]:.4g} at step {evals['step'][best]:,.0f}"
    return name.lower(), f"{values[-1]:.4g}", f"{unit}; {where}"


def _wall(events: Sequence[Mapping[str, Any]]) -> str:
    times = [float(e["time"]) for e in events if isinstance(e.get("time"), int | float)]
    return f"{duration(times[-1] - times[0])} from first to last event" if len(times) > 1 else ""
