"""A measured step: what was found in words, the plan above what happened, lost time by cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from megalite.report.curves import legend
from megalite.report.html import Html, tag
from megalite.report.lost import CAUSES, Late, Measured
from megalite.report.measured import Pipeline, Traced
from megalite.report.pipeline import Mark, Scale, timeline_figure
from megalite.schedule.action import Op
from megalite.schedule.simulate import Timeline

_EVEN = 1.05  # times the mean: what a stage may take without being named
_MATTERS = 0.01  # of a step: what is worth a sentence
_MOST_ROWS = 64
_ABOUT = {
    "warm-up and drain": "the schedule's own, with stages that are all alike",
    "imbalance": "computations that take longer than others of their kind",
    "communication": "messages that are not there when their producer is done; posting them",
    "data parallel": "gradient sums after a rank's last action, slower replicas",
    "other": "data, optimizer, totals of the step, the host",
}
# What a rank does outside its plan: its cause's colour, and how the timeline names it.
_REST = {
    "data": ("c4", "data"),
    "optimizer": ("c4", "optimizer"),
    "tp": ("c3", "sum over tp"),
    "tie": ("c3", "sum of tied gradients"),
    "dp": ("c3", "sum over dp"),
    "gather": ("c3", "gather of weights"),
}


def measured_step(traced: Traced) -> list[Html]:
    """The section; the pipeline that is drawn is the one that has the slowest stage."""
    shown, _, _ = traced.slowest
    plan = shown.measured.plan
    text = (
        f"planned and measured: {traced.layout}, {plan.num_microbatches:,} "
        f"microbatch{'es' * (plan.num_microbatches > 1)}; step {traced.step:,}, the median of "
        f"{traced.num_steps:,} traced"
    )
    findings = [tag("li", sentence) for sentence in sentences(traced)]
    return [
        tag("h2", "One step of the pipeline ", tag("small", text)),
        tag(
            "div",
            tag("ul", *findings, class_="findings"),
            *_timelines(shown),
            *_table(traced, shown),
            class_="card",
        ),
    ]


def sentences(traced: Traced) -> list[str]:
    """What a reader should know first."""
    step = traced.pipelines[0].lost.step_s
    idle = {c: _mean(traced, c) for c in CAUSES}
    worst = max(idle, key=lambda c: idle[c])
    total = sum(idle.values())
    name = _ABOUT[worst] if worst == CAUSES[-1] else worst
    found = [
        f"Of {_ms(step)} a rank computes {1 - total / step:.0%} on average; the largest loss, "
        f"{idle[worst] / step:.0%}, is {name}."
    ]
    pipeline, stage, times = traced.slowest
    rank = pipeline.ranks[pipeline.measured.plan.rank_of[stage]]
    if times >= _EVEN:
        found.append(f"Stage {stage} on rank {rank} takes {times:.2f} x the mean of all stages.")
    else:
        found.append(f"The stages are even: none takes more than {times:.2f} x their mean.")
    late = _latest(traced)
    if late is not None:
        p, channel = late
        what = "gradients" if channel.gradient else "activations"
        found.append(
            f"Rank {p.ranks[channel.receiver]} waits {_ms(channel.wait_s)} for {what} of rank "
            f"{p.ranks[channel.sender]} that are made but have not arrived "
            f"({_ms(channel.wait_s / len(channel.waits))} for each of {len(channel.waits)})."
        )
    return found


def _latest(traced: Traced) -> tuple[Pipeline, Late] | None:
    """The channel on which most time is waited, if that is worth a word."""
    found = [(p, late) for p in traced.pipelines for late in p.lost.late[:1]]
    best = max(found, key=lambda pair: pair[1].wait_s, default=None)
    step = traced.pipelines[0].lost.step_s
    return best if best and best[1].wait_s >= _MATTERS * step else None


def _mean(traced: Traced, cause: str) -> float:
    """Seconds lost to a cause by a rank, over all ranks."""
    return fmean(causes[cause] for p in traced.pipelines for causes in p.lost.causes)


def _timelines(shown: Pipeline) -> list[Html]:
    m, lost = shown.measured, shown.lost
    planned = Timeline(m.plan, *(tuple(map(tuple, times)) for times in lost.planned))
    real = Timeline(m.plan, _from(m.started, m.begin), _from(m.ended, m.begin))
    scale = Scale(max(lost.step_s, planned.makespan), _cell(m), 1e3, " ms")
    ops = {a.op for actions in m.plan.actions for a in actions}
    keys = [("f", "forward")]
    keys += [("b", "backward")] if Op.BACKWARD in ops else []
    keys += [("i", "input gradient"), ("w", "weight gradient")] * (Op.INPUT_GRAD in ops)
    keys += [("c2", "waits for a message that is made"), ("c3", "sums of gradients")]
    keys += [("c4", "data, optimizer")]
    keys += [("idle", "idle"), ("", "number and colour: microbatch (hover for details)")]
    where = ", ".join(f"{axis} {index}" for axis, index in shown.where.items())
    return [
        tag(
            "h3",
            f"Planned: {_ms(planned.makespan)} ",
            tag("small", "every stage takes the mean of all, messages take no time"),
        ),
        timeline_figure(planned, scale),
        tag("h3", f"Measured: {_ms(lost.step_s)} ", tag("small", f"the pipeline of {where}")),
        timeline_figure(real, scale, _marks(shown)),
        legend(keys),
    ]


def _from(times: Sequence[Sequence[float]], begin: float) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(t - begin for t in row) for row in times)


def _cell(m: Measured) -> float:
    """Seconds of a common forward."""
    found = sorted(
        end - start
        for rank, actions in enumerate(m.plan.actions)
        for a, start, end in zip(actions, m.started[rank], m.ended[rank], strict=True)
        if a.op is Op.FORWARD
    )
    return max(found[len(found) // 2], 1e-9)


def _marks(shown: Pipeline) -> list[list[Mark]]:
    """Of each rank: waits for messages that are made, and what it does outside its plan."""
    m, plan = shown.measured, shown.measured.plan
    found: list[list[Mark]] = []
    for rank in range(plan.pp):
        marks = [
            Mark(_REST[s.name][0], _REST[s.name][1], s.start - m.begin, s.end - m.begin)
            for s in shown.rest[rank]
            if s.name in _REST and s.row in ("step", "reduce")
        ]
        marks += [
            Mark("c2", f"waits for pp {late.sender}", start - m.begin, end - m.begin)
            for late in shown.lost.late
            if late.receiver == rank
            for start, end in late.waits
        ]
        found.append(marks)
    return found


def _table(traced: Traced, shown: Pipeline) -> list[Html]:
    """A bar and the numbers of each rank of the pipeline shown, and the mean of all ranks."""
    step = shown.lost.step_s
    head = [tag("th", "rank"), tag("th", "of the step", class_="wide")]
    head += [tag("th", name, class_="n") for name in ("busy", *CAUSES, "idle in all")]
    rows = [
        _row(f"{rank} (pp {pp})", busy, causes, step)
        for pp, (rank, busy, causes) in enumerate(
            zip(shown.ranks, shown.lost.busy_s, shown.lost.causes, strict=True)
        )
    ]
    if len(rows) > _MOST_ROWS:
        rows = [*rows[: _MOST_ROWS // 2], *rows[-_MOST_ROWS // 2 :]]
    number = sum(len(p.ranks) for p in traced.pipelines)
    busy = fmean(b for p in traced.pipelines for b in p.lost.busy_s)
    mean = {c: _mean(traced, c) for c in CAUSES}
    rows.append(_row(f"mean of all {number:,}", busy, mean, step))
    keys = [("busy", "computing")] + [(f"c{i}", f"{c}: {_ABOUT[c]}") for i, c in enumerate(CAUSES)]
    unit = "in ms; the causes of a rank are its idle time"
    if traced.uncertainty_s:
        unit += f"; clocks agree to {traced.uncertainty_s * 1e6:.0f} us"
    table = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows), class_="lost")
    return [
        tag("h3", "Lost time by cause ", tag("small", unit)),
        tag("div", table, class_="scroll", tabindex=0),
        legend(keys),
    ]


def _row(name: str, busy: float, causes: Mapping[str, float], step: float) -> Html:
    parts = [("busy", "computing", busy)]
    parts += [(f"c{i}", c, causes[c]) for i, c in enumerate(CAUSES)]
    bar = [
        tag("i", class_=key, style=f"width:{100 * s / step:.2f}%", title=f"{what}: {_ms(s)}")
        for key, what, s in parts
        if s > 0
    ]
    numbers = [s for _, _, s in parts] + [sum(causes.values())]
    cells = [
        tag("td", f"{s * 1e3:.1f}", class_="n" + " zero" * (s < _MATTERS * step)) for s in numbers
    ]
    return tag("tr", tag("th", name), tag("td", tag("div", *bar, class_="bar")), *cells)


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.3g} ms"
