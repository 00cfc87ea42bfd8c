"""A run's traces: which step stands for it, and that step as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.errors import ConfigError
from megalite.report.lost import Lost, Measured, lost_time
from megalite.schedule.action import Action, Plan
from megalite.trace import RankTrace, Span, file_of, read_trace


@dataclass(frozen=True)
class Pipeline:
    """The ranks of one replica (dp) and one tp index in the step that is shown.

    Attributes:
        where: their coordinates on the other axes. ranks: by pipeline rank.
        rest: of each, the spans outside the plan's actions.
    """

    where: Mapping[str, int]
    ranks: Sequence[int]
    measured: Measured
    lost: Lost
    rest: Sequence[Sequence[Span]]


@dataclass(frozen=True)
class Traced:
    """What traces say about one step of a run.

    Attributes:
        step: its number. num_steps: how many it was chosen from.
        pipelines: all of the job.
        uncertainty_s: of the clocks, the largest of any rank.
    """

    step: int
    num_steps: int
    layout: str
    pipelines: Sequence[Pipeline]
    uncertainty_s: float

    @property
    def slowest(self) -> tuple[Pipeline, int, float]:
        """The stage with the largest time of a microbatch: where, which, times the mean of all."""
        mean = sum(t for p in self.pipelines for t in p.lost.stage_s)
        mean /= sum(len(p.lost.stage_s) for p in self.pipelines)
        time, _, pipeline, stage = max(
            (t, -n, p, s)
            for n, p in enumerate(self.pipelines)
            for s, t in enumerate(p.lost.stage_s)
        )
        return pipeline, stage, time / mean if mean else 1.0


def read_traces(folder: Path) -> Traced | None:
    """The traces of the newest traced run of a directory; None if there are none.

    Raises:
        ConfigError: if files are missing, or are not what a run writes.
    """
    first = file_of(folder, 0)
    if not first.exists():
        return None
    try:
        size = read_trace(first, row="step").origin.world_size
        files = [file_of(folder, rank) for rank in range(size)]
        # Twice, so that never more than one step of all ranks is in memory.
        steps = choose_step([read_trace(path, row="step").steps for path in files])
        return traced([read_trace(path, steps[0]) for path in files], *steps) if steps else None
    except FileNotFoundError as error:
        problem = f"there is no file {error.filename}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{folder} holds no complete trace: {' '.join(str(error).split())}"
    raise ConfigError("RUN_DIR", problem, "Trace again, or remove the folder")


def choose_step(ranks: Sequence[Mapping[int, Sequence[Span]]]) -> tuple[int, int] | None:
    """The median by duration of the steps that all ranks have recorded, and how many those are.

    The first is left out if there are others: it sets things up.
    """
    common = sorted(set.intersection(*(set(steps) for steps in ranks)))
    chosen = common[1:] or common
    if not chosen:
        return None
    windows = {n: _window([steps[n] for steps in ranks]) for n in chosen}
    by_length = sorted(chosen, key=lambda n: windows[n][1] - windows[n][0])
    return by_length[(len(chosen) - 1) // 2], len(chosen)


def traced(traces: Sequence[RankTrace], step: int, num_steps: int = 1) -> Traced:
    """What the traces of all ranks say of a step.

    Raises:
        ValueError: if its actions are not those of the plan, each once.
    """
    window = _window([t.steps[step] for t in traces])
    return Traced(
        step,
        num_steps,
        traces[0].origin.layout,
        [_pipeline(column, step, window) for column in _columns(traces)],
        max(float(t.clock["uncertainty_s"]) for t in traces),
    )


def _window(ranks: Sequence[Sequence[Span]]) -> tuple[float, float]:
    spans = [span for rank in ranks for span in rank]
    return min(s.start for s in spans), max(s.end for s in spans)


def _columns(traces: Sequence[RankTrace]) -> list[list[RankTrace]]:
    """The ranks of each pipeline, by pipeline rank."""
    columns: dict[tuple[tuple[str, int], ...], list[RankTrace]] = {}
    for trace in traces:
        where = tuple(sorted((a, i) for a, i in trace.origin.coordinates.items() if a != "pp"))
        columns.setdefault(where, []).append(trace)
    return [sorted(c, key=lambda t: t.origin.coordinates["pp"]) for c in columns.values()]


def plan_of(column: Sequence[RankTrace]) -> Plan:
    """The plan that the ranks of a pipeline have run."""
    kept = column[0].origin.plan
    actions = tuple(tuple(map(Action.parse, trace.origin.actions)) for trace in column)
    return Plan(kept["name"], kept["num_microbatches"], tuple(kept["rank_of"]), actions)


def _pipeline(column: Sequence[RankTrace], step: int, window: tuple[float, float]) -> Pipeline:
    plan = plan_of(column)
    times = [
        _times(plan[rank], trace.steps[step], f"rank {trace.origin.rank}, step {step}")
        for rank, trace in enumerate(column)
    ]
    reductions = [
        [(s.name, s.start, s.end) for s in t.steps[step] if s.row == "reduce" and not s.op]
        for t in column
    ]
    reached, started, ended = zip(*times, strict=True)
    measured = Measured(plan, *window, reached, started, ended, reductions)
    return Pipeline(
        {a: i for a, i in column[0].origin.coordinates.items() if a != "pp"},
        [t.origin.rank for t in column],
        measured,
        lost_time(measured),
        [[s for s in t.steps[step] if not s.op] for t in column],
    )


def _times(
    actions: Sequence[Action], spans: Sequence[Span], where: str
) -> tuple[list[float], list[float], list[float]]:
    """When each action was reached, started and ended."""
    done: dict[str, Span] = {}
    reached: dict[str, float] = {}
    for span in spans:
        if not span.op:
            continue
        action = str(Action.parse(_text(span)))
        if span.name != action:
            reached[action] = span.start
        elif action in done:
            raise ValueError(f"{where}: {action} stands twice")
        else:
            done[action] = span
    names = [str(a) for a in actions]
    if set(names) != set(done):
        odd = ", ".join(sorted(set(names) ^ set(done)))
        raise ValueError(f"{where} and the plan differ in {odd}")
    start = [done[name].start for name in names]
    come = [reached.get(name, done[name].start) for name in names]
    return come, start, [done[name].end for name in names]


def _text(span: Span) -> str:
    return f"{span.stage}{span.op}{'' if span.microbatch < 0 else span.microbatch}"


def busy_by_stage(spans: Sequence[Span]) -> tuple[float, dict[int, float]]:
    """Of a step on one rank: how long it took, and how long it computed in each stage, seconds."""
    busy: dict[int, float] = {}
    for span in spans:
        if span.row == "compute":
            busy[span.stage] = busy.get(span.stage, 0.0) + span.end - span.start
    window = next((s.end - s.start for s in spans if s.name.startswith("step ")), 0.0)
    return window, busy
