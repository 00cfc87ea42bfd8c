"""The curves of a run over its steps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megalite.report.chart import Chart, Frame, block_width, figure
from megalite.report.history import Column, History
from megalite.report.html import Html, tag


def curves(history: History) -> list[Html]:
    """The section, for a run of at least one step."""
    steps, x = history.steps, history.steps["step"]
    evals, (column, name, unit) = history.evals, held_out(history.evals)
    frame = Frame.around(
        np.concatenate([x, evals["step"]]), _restarts(history), x[history.bad].tolist()
    )
    loss, norm, lr, speed = (steps[k] for k in ("loss", "grad_norm", "lr", "tokens_per_s"))
    drawn = (
        ("wide loss", Chart("Training loss", "nats a token", x, loss, means=True)),
        ("bits", Chart(name, unit, evals["step"], evals[column], dots=True)),
        ("norm", Chart("Gradient norm", "before clipping, log scale", x, norm, "log", means=True)),
        ("lr", Chart("Learning rate", "", x, lr, "from zero")),
        ("speed", Chart("Tokens/s", "all ranks together", x, speed, "from zero", means=True)),
    )
    figures = [figure(chart, frame, class_) for class_, chart in drawn]
    return [
        tag("h2", "Curves ", tag("small", "over steps; each number is the newest value")),
        tag("div", *figures, class_="charts"),
        _legend(len(x), frame),
    ]


def held_out(evals: Mapping[str, Column]) -> tuple[str, str, str]:
    """Of the figures of an evaluation the column to show, its name and its unit."""
    if len(evals["step"]) and np.isnan(evals["bits_per_byte"]).all():
        return "val_loss", "Held-out loss", "nats a token"
    return "bits_per_byte", "Held-out", "bits/byte"


def _restarts(history: History) -> list[float]:
    """Steps after which the run was taken up again, or went on in another layout."""
    starts = {
        float(e["step"])
        for e in history.events
        if e.get("event") == "start" and isinstance(e.get("step"), int)
    }
    changes = {float(step - 1) for step, _ in history.layouts[1:]}
    return sorted((starts | changes) - {0.0})


def _legend(num_steps: int, frame: Frame) -> Html:
    width = block_width(num_steps)
    keys = [("mean", f"mean of every {width:,} steps"), ("each", "each step")] if width else []
    keys += [("restart", "taken up again, or in another layout")] if frame.restarts else []
    keys += [("bad", "bad step: skipped, or not finite")] if frame.bad else []
    return legend(keys)


def legend(keys: list[tuple[str, str]]) -> Html:
    """Swatches by class, each with its meaning; without a class a text alone."""
    found = [tag("span", tag("i", class_=f"k-{key}") if key else "", text) for key, text in keys]
    return tag("p", *found, class_="legend")
