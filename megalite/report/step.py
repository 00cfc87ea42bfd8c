"""A measured step: what was found in words, what happened, what could be, lost time by cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from megalite.report.curves import legend
from megalite.report.html import Html, tag
from megalite.report.lost import CAUSES, Late, Measured
from megalite.report.measured import Part, Pipeline, Traced
from megalite.report.pipeline import Mark, Scale, cell_keys, timeline_figure
from megalite.schedule.action import COMPUTE, Op
from megalite.schedule.simulate import Timeline

_EVEN = 1.05  # times the mean: what a stage may take without being named
_MATTERS = 0.01  # of a step: what is worth a sentence
_MOST_ROWS, _NAMED = 64, 8
_LABEL = 0.0085  # of a bar: what a letter takes
_OWN, _TOGETHER = CAUSES[:2], CAUSES[2:]
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
    """The section; the pipeline that is drawn is the one that has the slowest stage, or, where
    none has the traces of all its ranks, the one that has most."""
    part = traced.slowest[0] if traced.pipelines else traced.part
    assert part is not None
    number = part.measured.plan.num_microbatches
    text = (
        f"measured: {traced.layout}, {number:,} microbatch{'es' * (number > 1)}; "
        f"step {traced.step:,}, the median of {traced.num_steps:,} traced"
    )
    whole = isinstance(part, Pipeline)
    said = sentences(traced) if traced.pipelines else [_of_part(part)]
    findings = [tag("li", sentence) for sentence in [*_missing(traced), *said]]
    return [
        tag("h2", "One step of the pipeline ", tag("small", text)),
        tag(
            "div",
            tag("ul", *findings, class_="findings"),
            *(_whole_bar(traced) if whole else []),
            *_timelines(part),
            *(_table(traced, part) if isinstance(part, Pipeline) else []),
            class_="card",
        ),
    ]


def _missing(traced: Traced) -> list[str]:
    """How many traces there are, if not all."""
    if not traced.missing:
        return []
    size, gone = traced.world_size, traced.missing
    names = ", ".join(map(str, gone[:_NAMED])) + ", …" * (len(gone) > _NAMED)
    return [
        f"{size - len(gone):,} of {size:,} ranks' traces found: none of rank{'s' * (len(gone) > 1)}"
        f" {names}. What follows is of the others."
    ]


def _of_part(part: Part) -> str:
    """What each rank that was found does, where no pipeline is whole."""
    m = part.measured
    busy = []
    for rank, actions, starts, ends in zip(
        part.ranks, m.plan.actions, m.started, m.ended, strict=True
    ):
        rows = zip(actions, starts, ends, strict=True)
        computing = sum(end - start for a, start, end in rows if a.op in COMPUTE)
        if rank >= 0:
            busy.append(f"rank {rank} {computing / (m.end - m.begin):.0%}")
    return (
        f"Of {_ms(m.end - m.begin)} is computing: {', '.join(busy[:_NAMED])}. Where the rest is "
        "lost can only be told with the traces of a whole pipeline."
    )


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


def _whole_bar(traced: Traced) -> list[Html]:
    """Where a step of all ranks goes, in one bar."""
    step = traced.pipelines[0].lost.step_s
    parts = [("busy", "computing", step - sum(_mean(traced, c) for c in CAUSES))]
    parts += [(f"c{i}", c, _mean(traced, c)) for i, c in enumerate(CAUSES)]
    bar = [
        tag(
            "i",
            f"{what} {s / step:.0%}" if s / step >= _LABEL * (len(what) + 4) else "",
            class_=key,
            style=f"width:{100 * s / step:.2f}%",
            title=f"{what}: {_ms(s)}, {s / step:.1%}",
        )
        for key, what, s in parts
        if s > 0
    ]
    small = [(k, f"{what} {s / step:.0%}") for k, what, s in parts]
    return [tag("div", *bar, class_="bar whole"), legend(small)]


def _timelines(part: Part) -> list[Html]:
    """The bound that the schedule sets; below it, to the same scale, what happened."""
    m, window = part.measured, part.measured.end - part.measured.begin
    real = Timeline(m.plan, _from(m.started, m.begin), _from(m.ended, m.begin))
    scale = Scale(window, _cell(m), 1e3, " ms")
    keys = [("c2", "waits for a message that is made")] * isinstance(part, Pipeline)
    keys += [("none", "no trace of this rank")] * (-1 in part.ranks)
    keys += [("c3", "sums of gradients"), ("c4", "data, optimizer"), ("idle", "idle")]
    where = ", ".join(f"{axis} {index}" for axis, index in part.where.items())
    found = []
    if isinstance(part, Pipeline):
        bound = Timeline(m.plan, *(tuple(map(tuple, times)) for times in part.lost.planned))
        remark = "if all stages were alike and messages took no time: no forecast"
        found += [
            tag("h3", f"The plan without losses: {_ms(bound.makespan)} ", tag("small", remark)),
            timeline_figure(bound, scale),
        ]
    return [
        *found,
        tag("h3", f"Measured: {_ms(window)} ", tag("small", f"the pipeline of {where}")),
        timeline_figure(real, scale, _marks(part)),
        legend([*cell_keys(m.plan)[:-1], *keys, cell_keys(m.plan)[-1]]),
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


def _marks(shown: Part) -> list[list[Mark]]:
    """Of each rank: waits for messages that are made, and what it does outside its plan."""
    m, plan = shown.measured, shown.measured.plan
    channels = shown.lost.late if isinstance(shown, Pipeline) else ()
    found: list[list[Mark]] = []
    for rank in range(plan.pp):
        if shown.ranks[rank] < 0:
            found.append([Mark("none", "no trace of this rank", 0.0, m.end - m.begin)])
            continue
        marks = [
            Mark(_REST[s.name][0], _REST[s.name][1], s.start - m.begin, s.end - m.begin)
            for s in shown.rest[rank]
            if s.name in _REST and s.row in ("step", "reduce")
        ]
        marks += [
            Mark("c2", f"waits for pp {late.sender}", start - m.begin, end - m.begin)
            for late in channels
            if late.receiver == rank
            for start, end in late.waits
        ]
        found.append(marks)
    return found


def _table(traced: Traced, shown: Pipeline) -> list[Html]:
    """A bar and the numbers of each rank of the pipeline shown, and the mean of all ranks.

    What a message or a sum costs is how much longer the step is for all ranks: it stands once.
    """
    lost, pp = shown.lost, range(len(shown.ranks))
    kept = [*pp[: _MOST_ROWS // 2], *pp[-_MOST_ROWS // 2 :]] if len(pp) > _MOST_ROWS else list(pp)
    waits = [sum(late.wait_s for late in lost.late if late.receiver == rank) for rank in pp]
    rows = [
        tag(
            "tr",
            tag("th", f"{shown.ranks[rank]} (pp {rank})"),
            _bar(lost.busy_s[rank], lost.causes[rank], lost.step_s),
            *_numbers(
                [lost.busy_s[rank], *(lost.causes[rank][c] for c in _OWN)]
                + [sum(lost.causes[rank].values()), waits[rank]],
                lost.step_s,
            ),
            *(_shared(lost.causes[rank], lost.step_s, len(kept)) if rank == kept[0] else []),
        )
        for rank in kept
    ]
    table = tag("table", _table_head(), tag("tbody", *rows, _mean_row(traced)), class_="lost")
    keys = [("busy", "computing")] + [(f"c{i}", f"{c}: {_ABOUT[c]}") for i, c in enumerate(CAUSES)]
    unit = "in ms; late messages: how long this rank waits for some that are made"
    if traced.uncertainty_s:
        unit += f"; clocks agree to {traced.uncertainty_s * 1e6:.0f} us"
    return [
        tag("h3", "Lost time by cause ", tag("small", unit)),
        tag("div", table, class_="scroll", tabindex=0),
        legend(keys),
    ]


def _table_head() -> Html:
    groups = [
        tag("th", "", colspan=2, class_="group"),
        tag("th", "this rank", colspan=5, class_="group"),
        tag("th", "the step is so much longer for all", colspan=3, class_="group shared"),
    ]
    names = [tag("th", "rank"), tag("th", "of the step", class_="wide")]
    own = ("busy", *_OWN, "idle in all", "late messages")
    names += [tag("th", name, class_="n") for name in own]
    names += [tag("th", name, class_="n shared") for name in _TOGETHER]
    return tag("thead", tag("tr", *groups), tag("tr", *names))


def _mean_row(traced: Traced) -> Html:
    pipelines = traced.pipelines
    step, number = pipelines[0].lost.step_s, sum(len(p.ranks) for p in pipelines)
    mean = {c: _mean(traced, c) for c in CAUSES}
    waits = sum(late.wait_s for p in pipelines for late in p.lost.late) / number
    busy = fmean(b for p in pipelines for b in p.lost.busy_s)
    return tag(
        "tr",
        tag("th", f"mean of all {number:,}"),
        _bar(busy, mean, step),
        *_numbers([busy, *(mean[c] for c in _OWN), sum(mean.values()), waits], step),
        *_shared(mean, step, 1),
    )


def _bar(busy: float, causes: Mapping[str, float], step: float) -> Html:
    parts = [("busy", "computing", busy)]
    parts += [(f"c{i}", c, causes[c]) for i, c in enumerate(CAUSES)]
    bar = [
        tag("i", class_=key, style=f"width:{100 * s / step:.2f}%", title=f"{what}: {_ms(s)}")
        for key, what, s in parts
        if s > 0
    ]
    return tag("td", tag("div", *bar, class_="bar"))


def _numbers(seconds: Sequence[float], step: float) -> list[Html]:
    return [
        tag("td", f"{s * 1e3:.1f}", class_="n" + " zero" * (s < _MATTERS * step)) for s in seconds
    ]


def _shared(causes: Mapping[str, float], step: float, rows: int) -> list[Html]:
    return [
        tag(
            "td",
            f"{causes[c] * 1e3:.1f}",
            rowspan=rows,
            class_="n shared" + " zero" * (causes[c] < _MATTERS * step),
        )
        for c in _TOGETHER
    ]


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.3g} ms"
