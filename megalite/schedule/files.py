"""Schedules from a file: the text grid of ``render_text``, or CSV with a line a rank."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

from megalite.errors import ConfigError, ScheduleError
from megalite.schedule.action import Plan
from megalite.schedule.render import from_csv, parse_text
from megalite.schedule.validate import check_order, validate

_FIELD = "parallel.schedule"


def load_plan(path: str, pp: int, num_microbatches: int, virtual_stages: int) -> Plan:
    """A schedule file, cut down to the first ``num_microbatches``; nothing else depends on others.

    The whole file is checked as it is written, before it is cut. It has computations alone, to
    which ``lower`` adds the rest, or else every message and REDUCE, and is then run as it is:
    where messages are posted is part of a schedule. Stages may lie on any rank.

    Raises:
        ConfigError: if the file cannot be read or is for other numbers.
        ScheduleError: if it is no schedule, or one that cannot be trained with.
    """
    text = _read(path)
    try:
        plan = _parse(text, path)
        _check(plan)
        _check_sizes(plan, path, pp, num_microbatches, virtual_stages)
        cut = replace(
            plan.replace(
                (a for a in actions if a.microbatch < num_microbatches) for actions in plan.actions
            ),
            num_microbatches=num_microbatches,
            file_microbatches=plan.num_microbatches,
        )
        if plan.is_lowered and cut.actions != plan.actions:
            _check(cut)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error
    return cut


def _check(plan: Plan) -> None:
    if not plan.is_lowered:
        check_order(plan)
        return
    try:
        validate(plan, trains=True)
    except ScheduleError as error:
        problem, *grid = str(error).split("\n", 1)
        advice = "a file has all messages and REDUCE, or none: then they are added"
        raise ScheduleError("\n".join([f"{problem} ({advice})", *grid])) from error


def _read(path: str) -> str:
    fix = "Name a text or CSV file, as file:PATH"
    if not path:
        raise ConfigError(_FIELD, "file: has no path", fix)
    try:
        if not stat.S_ISREG(mode := Path(path).stat().st_mode) and not stat.S_ISDIR(mode):
            raise ConfigError(_FIELD, f"cannot read {path}: it is no regular file", fix)
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(_FIELD, f"cannot read {path}: {reason}", fix) from error


def _parse(text: str, path: str) -> Plan:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not lines:
        raise ScheduleError("the file is empty")
    return (parse_text if lines[0].lstrip().startswith("rank") else from_csv)(text, path)


def _check_sizes(
    plan: Plan, path: str, pp: int, num_microbatches: int, virtual_stages: int
) -> None:
    if plan.pp != pp:
        raise ConfigError(
            "parallel.pp", f"{path} has {plan.pp} ranks, pp={pp}", f"Use pp={plan.pp}"
        )
    if plan.num_stages != pp * virtual_stages or len(set(plan.rank_of)) != pp:
        per_rank = [len(plan.stages_of(rank)) for rank in range(pp)]
        each, more = divmod(plan.num_stages, pp)
        raise ConfigError(
            "parallel.virtual_stages",
            f"{path} has {per_rank} stages on its ranks, virtual_stages={virtual_stages}",
            "Use another file" if more or 0 in per_rank else f"Use virtual_stages={each}",
        )
    if plan.num_microbatches < num_microbatches:
        raise ConfigError(
            _FIELD,
            f"{path} has {plan.num_microbatches} microbatches, the step has {num_microbatches}",
            "Use a larger micro_batch_size, or a longer file",
        )
