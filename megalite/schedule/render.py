"""A plan as text, to read, to compare and to write by hand: a grid, or CSV with a line a rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from megalite.errors import ScheduleError
from megalite.schedule.action import Action, Op, Plan

_ROW = re.compile(r"rank +([0-9]{1,9}):(.*)")
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
    rows: list[_Row] = []
    for number, line in _lines(text):
        match = _ROW.fullmatch(line.strip())
        if match is None or int(match[1]) != len(rows):
            shown = line if len(line) <= 80 else f"{line[:80]}..."
            raise ScheduleError(f"line {number}: expected 'rank {len(rows)}: ...', got {shown!r}")
        rows.append((number, match[2].split()))
    return _plan(rows, name)


def to_csv(plan: Plan) -> str:
    """A line a rank, a cell an action."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in plan.actions)


def from_csv(text: str, name: str = "csv") -> Plan:
    """The inverse of ``to_csv``; empty cells and lines, and lines with ``#``, are skipped.

    Raises:
        ScheduleError: for a cell that is no action, or stages that do not form a pipeline.
    """
    return _plan(
        [(n, [cell for cell in line.split(",") if cell.strip()]) for n, line in _lines(text)], name
    )


_Row = tuple[int, list[str]]  # number of the line in its file, and its actions


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            yield number, line


def _plan(rows: Sequence[_Row], name: str) -> Plan:
    actions = [
        tuple(_action(line, rank, step, text) for step, text in enumerate(cells))
        for rank, (line, cells) in enumerate(rows)
    ]
    rank_of: dict[int, int] = {}
    last, where = Action(Op.FORWARD, 0, -1), ""
    for rank, found in enumerate(actions):
        for step, a in enumerate(found):
            at = f"line {rows[rank][0]}: rank {rank}, step {step}: {a}"
            if rank_of.setdefault(a.stage, rank) != rank:
                raise ScheduleError(
                    f"{at} stands on rank {rank}, but rank {rank_of[a.stage]} has its stage"
                )
            if a.microbatch > last.microbatch:
                last, where = a, at
    if not rank_of or max(rank_of) >= len(rank_of):
        raise ScheduleError(f"stages must be numbered from 0 without a gap, got {sorted(rank_of)}")
    if last.microbatch >= sum(map(len, actions)):
        raise ScheduleError(f"{where} has a microbatch beyond the number of actions")
    return Plan(
        name, last.microbatch + 1, tuple(rank_of[s] for s in sorted(rank_of)), tuple(actions)
    )


def _action(line: int, rank: int, step: int, text: str) -> Action:
    try:
        return Action.parse(text)
    except ValueError as error:
        raise ScheduleError(f"line {line}: rank {rank}, step {step}: {error}") from error
