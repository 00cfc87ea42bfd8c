"""A run's traces: which step stands for it, and that step as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.errors import ConfigError
from megalite.report.lost import Lost, Measured, lost_time
from megalite.schedule.action import Action, Plan
from megalite.trace import FAILED, RankTrace, Span, read_trace

FILES = "rank_*.json"


@dataclass(frozen=True)
class Part:
    """What was found of the ranks of one replica (dp) and one tp index in the step that is shown.

    Attributes:
        where: their coordinates on the other axes. ranks: by pipeline rank; -1: no trace.
        measured: without actions on ranks whose traces are missing.
        rest: of each, the spans outside the plan's actions.
    """

    where: Mapping[str, int]
    ranks: Sequence[int]
    measured: Measured
    rest: Sequence[Sequence[Span]]


@dataclass(frozen=True)
class Pipeline(Part):
    """One with the traces of all of its ranks, so that its lost time is known."""

    lost: Lost


@dataclass(frozen=True)
class Traced:
    """What traces say about one step of a run.

    Attributes:
        step: its number. num_steps: how many it was chosen from.
        pipelines: those with all of their ranks' traces.
        uncertainty_s: of the clocks, the largest of any rank.
        world_size: ranks of the job. missing: those without a trace of this start of the run.
        part: if there is no whole pipeline, what there is of the one with most traces.
    """

    step: int
    num_steps: int
    layout: str
    pipelines: Sequence[Pipeline]
    uncertainty_s: float
    world_size: int
    missing: Sequence[int] = ()
    part: Part | None = None

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
    """The traces of the newest traced start of a run; None if there are none.

    Raises:
        ConfigError: if a file is not what a run writes.
    """
    try:
        # Twice, so that never more than one step of all ranks is in memory.
        files = _newest({path: read_trace(path, row="step") for path in folder.glob(FILES)})
        steps = choose_step([trace.steps for trace in files.values()]) if files else None
        return traced([read_trace(path, steps[0]) for path in files], *steps) if steps else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{folder} holds no complete trace: {' '.join(str(error).split())}"
    raise ConfigError("RUN_DIR", problem, "Trace again, or remove the folder")


def _newest(traces: Mapping[Path, RankTrace]) -> dict[Path, RankTrace]:
    """Those of the last start, by rank: after a crash some may be of an earlier one."""
    last = max((t.origin.run for t in traces.values()), default=0)
    kept = {path: t for path, t in traces.items() if t.origin.run == last}
    return dict(sorted(kept.items(), key=lambda item: item[1].origin.rank))


def choose_step(ranks: Sequence[Mapping[int, Sequence[Span]]]) -> tuple[int, int] | None:
    """The median by duration of the steps that all ranks have recorded to their ends, and how many
    those are.

    The first is left out if there are others: it sets things up.
    """
    common = sorted(set.intersection(*({n for n in r if _whole(r[n])} for r in ranks)))
    chosen = common[1:] or common
    if not chosen:
        return None
    windows = {n: _window([steps[n] for steps in ranks]) for n in chosen}
    by_length = sorted(chosen, key=lambda n: windows[n][1] - windows[n][0])
    return by_length[(len(chosen) - 1) // 2], len(chosen)


def _whole(spans: Sequence[Span]) -> bool:
    return not any(span.name.endswith(FAILED) for span in spans)


def traced(traces: Sequence[RankTrace], step: int, num_steps: int = 1) -> Traced:
    """What the traces of all ranks, or of some, say of a step.

    Raises:
        ValueError: if its actions are not those of the plan, each once.
    """
    window = _window([t.steps[step] for t in traces])
    origin = traces[0].origin
    parts = [_part(column, step, window) for column in _columns(traces)]
    whole = [Pipeline(**vars(p), lost=lost_time(p.measured)) for p in parts if -1 not in p.ranks]
    return Traced(
        step,
        num_steps,
        origin.layout,
        whole,
        max(float(t.clock["uncertainty_s"]) for t in traces),
        origin.world_size,
        sorted(set(range(origin.world_size)) - {t.origin.rank for t in traces}),
        None if whole else min(parts, key=lambda p: p.ranks.count(-1)),
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
    """The plan that the ranks of a pipeline have run; nothing for those that are missing."""
    kept = column[0].origin.plan
    by_rank = {trace.origin.coordinates["pp"]: trace.origin.actions for trace in column}
    ranks = range(max(kept["rank_of"]) + 1)
    actions = tuple(tuple(map(Action.parse, by_rank.get(rank, ()))) for rank in ranks)
    return Plan(kept["name"], kept["num_microbatches"], tuple(kept["rank_of"]), actions)


def _part(column: Sequence[RankTrace], step: int, window: tuple[float, float]) -> Part:
    plan = plan_of(column)
    found = {trace.origin.coordinates["pp"]: trace for trace in column}
    spans = [found[rank].steps[step] if rank in found else [] for rank in range(plan.pp)]
    ranks = [found[rank].origin.rank if rank in found else -1 for rank in range(plan.pp)]
    times = [
        _times(actions, mine, f"rank {rank}, step {step}")
        for actions, mine, rank in zip(plan.actions, spans, ranks, strict=True)
    ]
    reductions = [
        [(s.name, s.start, s.end) for s in mine if s.row == "reduce" and not s.op] for mine in spans
    ]
    reached, started, ended = zip(*times, strict=True)
    return Part(
        {a: i for a, i in column[0].origin.coordinates.items() if a != "pp"},
        ranks,
        Measured(plan, *window, reached, started, ended, reductions),
        [[s for s in mine if not s.op] for mine in spans],
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
