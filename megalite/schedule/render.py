"""A plan as text, to read, to compare and to write by hand: a grid, or CSV with a line a rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from megalite.errors import ScheduleError
from megalite.schedule.action import Action, Plan

_ROW = re.compile(r"rank +(\d+):(.*)")
_AROUND = 5  # actions and ranks shown on either side of a mark


def render_text(plan: Plan, mark: Mapping[int, int] | None = None) -> str:
    """A line a rank; a column is a position in the rank's list, not a time.

    Args:
        mark: rank -> position to put in brackets. With marks a large plan is cut down to the
            neighbourhood: ranks near the first mark, and in each its own mark's surroundings.
    """
    rows = range(plan.pp)
    if mark:
        rows = range(max(0, min(mark) - _AROUND), min(plan.pp, max(mark) + _AROUND + 1))
    shown = {rank: _cells(plan[rank], mark or {}, rank) for rank in rows}
    width = max((len(cell) for cells in shown.values() for cell in cells), default=0)
    digits = len(str(plan.pp - 1))
    lines = []
    for rank, cells in shown.items():
        lines.append(f"rank {rank:>{digits}}:" + "".join(f"    {cell:<{width}}" for cell in cells))
    return "\n".join(line.rstrip() for line in lines)


def _cells(actions: Sequence[Action], mark: Mapping[int, int], rank: int) -> list[str]:
    at = mark.get(rank)
    window = range(len(actions))
    if mark and len(actions) > 2 * _AROUND + 2:
        centre = next(iter(mark.values())) if at is None else at
        window = range(max(0, centre - _AROUND), min(len(actions), centre + _AROUND + 1))
    cells = [f"[{actions[i]}]" if i == at else f" {actions[i]} " for i in window]
    cut_left, cut_right = window.start > 0, window.stop < len(actions)
    return [" ... "] * cut_left + cells + [" ... "] * cut_right


def parse_text(text: str, name: str = "text") -> Plan:
    """The inverse of ``render_text`` without marks; lines that start with ``#`` are skipped.

    Raises:
        ScheduleError: naming the line, for anything else.
    """
    rows: list[list[str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _ROW.fullmatch(line.strip())
        if match is None or int(match[1]) != len(rows):
            raise ScheduleError(f"line {number}: expected 'rank {len(rows)}: ...', got {line!r}")
        rows.append(match[2].split())
    return _plan(rows, name)


def to_csv(plan: Plan) -> str:
    """A line a rank, a cell an action."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in plan.actions)


def from_csv(text: str, name: str = "csv") -> Plan:
    """The inverse of ``to_csv``; empty cells are skipped.

    Raises:
        ScheduleError: for a cell that is no action, or stages that do not form a pipeline.
    """
    lines = text.removesuffix("\n").split("\n")
    return _plan([[cell for cell in line.split(",") if cell.strip()] for line in lines], name)


def _plan(rows: Sequence[Sequence[str]], name: str) -> Plan:
    actions = [
        tuple(_action(rank, step, text) for step, text in enumerate(row))
        for rank, row in enumerate(rows)
    ]
    rank_of: dict[int, int] = {}
    for rank, found in enumerate(actions):
        for a in found:
            if rank_of.setdefault(a.stage, rank) != rank:
                other = rank_of[a.stage]
                raise ScheduleError(f"{a} stands on rank {rank}, but rank {other} has its stage")
    if not rank_of or sorted(rank_of) != list(range(len(rank_of))):
        raise ScheduleError(f"stages must be numbered from 0 without a gap, got {sorted(rank_of)}")
    microbatches = max(a.microbatch for found in actions for a in found) + 1
    return Plan(name, microbatches, tuple(rank_of[s] for s in sorted(rank_of)), tuple(actions))


def _action(rank: int, step: int, text: str) -> Action:
    try:
        return Action.parse(text)
    except ValueError as error:
        raise ScheduleError(f"rank {rank}, step {step}: {error}") from error
