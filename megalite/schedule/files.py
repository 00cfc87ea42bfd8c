"""Schedules from a file: the text grid of ``render_text``, or CSV with a line a rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megalite.errors import ConfigError, ScheduleError
from megalite.schedule.action import Plan
from megalite.schedule.render import from_csv, parse_text
from megalite.schedule.validate import check_compute

_FIELD = "parallel.schedule"


def load_plan(path: str, pp: int, num_microbatches: int, virtual_stages: int) -> Plan:
    """The computations of a schedule file.

    Messages and reductions in it are left out, ``lower`` adds its own; and so are microbatches
    beyond ``num_microbatches``, which nothing else depends on. Stages may lie on any rank.

    Raises:
        ConfigError: if the file cannot be read or is for other numbers.
        ScheduleError: if it is no schedule, or one that cannot be trained with.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(
            _FIELD, f"cannot read {path}: {reason}", "Name a text or CSV file, as file:PATH"
        ) from error
    try:
        plan = _parse(text, path).compute_only()
        if plan.forward_only:
            raise ScheduleError("it has no B, and no I and W: nothing would be learned")
        _check_sizes(plan, path, pp, num_microbatches, virtual_stages)
        plan = replace(plan, num_microbatches=num_microbatches).replace(
            (a for a in actions if a.microbatch < num_microbatches) for actions in plan.actions
        )
        check_compute(plan)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error
    return plan


def _parse(text: str, path: str) -> Plan:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not lines:
        raise ScheduleError("the file is empty")
    if lines[0].lstrip().startswith("rank"):
        return parse_text(text, path)
    return from_csv("\n".join(lines), path)


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
