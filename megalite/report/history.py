"""What a run has written about itself, as columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.errors import ConfigError
from megalite.metrics import read_lines

Column = npt.NDArray[np.float64]
_STEP = ("step", "loss", "grad_norm", "lr", "tokens", "step_time_s", "tokens_per_s", "skipped")
_EVAL = ("step", "val_loss", "bits_per_byte")


@dataclass(frozen=True)
class History:
    """A run's files.

    Attributes:
        steps: columns of ``metrics.jsonl`` by name, one number a step; ``skipped`` is 0 or 1.
        evals: the same of ``eval.jsonl``; nan where bits a byte are not known.
        events: the lines of ``events.jsonl``.
        layouts: the first step of each layout that ran, and its text.
    """

    steps: Mapping[str, Column]
    evals: Mapping[str, Column]
    events: tuple[Mapping[str, Any], ...]
    layouts: tuple[tuple[int, str], ...]

    @property
    def num_steps(self) -> int:
        return len(self.steps["step"])

    @property
    def bad(self) -> npt.NDArray[np.bool_]:
        """For each step, whether it was skipped or its loss or gradient is not finite."""
        loss, norm, skipped = (self.steps[k] for k in ("loss", "grad_norm", "skipped"))
        bad: npt.NDArray[np.bool_] = (skipped != 0) | ~np.isfinite(loss) | ~np.isfinite(norm)
        return bad

    @property
    def layout(self) -> str:
        """The newest; empty if nothing has started."""
        started = [str(e["layout"]) for e in self.events if "layout" in e]
        return started[-1] if started else self.layouts[-1][1] if self.layouts else ""


def read_history(run_dir: Path) -> History:
    """The history of a run, at rest or running.

    Raises:
        ConfigError: if ``metrics.jsonl`` is missing, or a file is not what a run writes.
    """
    if not (run_dir / "metrics.jsonl").is_file():
        raise ConfigError(
            "RUN_DIR",
            f"there is no file {run_dir / 'metrics.jsonl'}",
            "Name the directory of a run, its --run.dir",
        )
    with _readable(run_dir / "metrics.jsonl") as rows:
        steps, layouts = _step_columns(rows)
        _check_rise(steps["step"])
    with _readable(run_dir / "eval.jsonl") as rows:
        evals = _columns(rows, _EVAL)
        _check_rise(evals["step"])
    with _readable(run_dir / "events.jsonl") as rows:
        events = tuple(rows)
    return History(steps, evals, events, layouts)


@contextmanager
def _readable(path: Path) -> Iterator[Iterable[dict[str, Any]]]:
    try:
        yield read_lines(path)
    except KeyError as error:
        problem = f"{path} has a line without {error}"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        problem = f"{path} cannot be read: {' '.join(str(error).split())}"
    else:
        return
    raise ConfigError("RUN_DIR", problem, "Restore the file, or name another run")


def _columns(rows: Iterable[Mapping[str, Any]], names: tuple[str, ...]) -> dict[str, Column]:
    numbers = (_number(row[name]) for row in rows for name in names)
    table = np.fromiter(numbers, dtype=np.float64).reshape(-1, len(names))
    return {name: np.ascontiguousarray(table[:, i]) for i, name in enumerate(names)}


def _step_columns(
    rows: Iterable[Mapping[str, Any]],
) -> tuple[dict[str, Column], tuple[tuple[int, str], ...]]:
    layouts: list[tuple[int, str]] = []

    def watched() -> Iterator[Mapping[str, Any]]:
        for row in rows:
            if not layouts or layouts[-1][1] != row["layout"]:
                layouts.append((int(row["step"]), str(row["layout"])))
            yield row

    return _columns(watched(), _STEP), tuple(layouts)


def _check_rise(steps: Column) -> None:
    if not (np.isfinite(steps).all() and (np.diff(steps) > 0).all()):
        raise ValueError("its steps do not rise from line to line")


def _number(value: object) -> float:
    if value is None:
        return np.nan
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return float(value)
