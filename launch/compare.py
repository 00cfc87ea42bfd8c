"""Two run directories compared: what their configurations differ in, then what they computed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launch.config import CONFIG, DATA, Config
from megalite.comparison.compare import Comparison, compare
from megalite.comparison.record import Records
from megalite.comparison.text import describe
from megalite.config import Value, differences, load
from megalite.errors import ConfigError

_FREE_SECTIONS = ("parallel", "checkpoint", "run")
_FREE = (
    "model.preset",
    "train.micro_batch_size",
    "train.eval_every",
    "train.eval_batches",
    "train.deterministic",
    "train.bad_step",
)


@dataclass(frozen=True)
class RunsCompared:
    """``fields`` are those that change the numbers: (name, in a, in b)."""

    fields: tuple[tuple[str, Value, Value], ...]
    layouts: tuple[str, str]
    found: Comparison

    def text(self) -> str:
        """For a terminal."""
        lines = [f"{run}: {layout}" for run, layout in zip("AB", self.layouts, strict=True)]
        if self.fields:
            lines.append("The runs are not to compute the same; they differ in")
            lines += [f"  {name}: {a} in A, {b} in B" for name, a, b in self.fields]
        return "\n".join([*lines, describe(self.found)])

    def json(self) -> str:
        """For a program; what is infinite is null."""
        agree = {"agree": self.found.agrees, "drifts": self.found.drifts}
        values = {**agree, **asdict(self.found)}
        whole = {**values, "fields": self.fields, "layouts": self.layouts}
        return json.dumps(_plain(whole), allow_nan=False)


def compare_runs(
    run_a: Path, run_b: Path, tolerance: float | None = None, *, exact: bool = False
) -> RunsCompared:
    """Compare two runs that were recorded.

    Raises:
        ConfigError: if one is no run, was not recorded, or they have nothing in common.
    """
    fields = _fields(run_a, run_b)
    a, b = Records(run_a), Records(run_b)
    found = compare(a, b, tolerance, exact=exact)
    step = found.steps[-1] if found.first is None else found.first.step
    return RunsCompared(fields, (a.layout(step), b.layout(step)), found)


def _fields(run_a: Path, run_b: Path) -> tuple[tuple[str, Value, Value], ...]:
    a, b = _config(run_a), _config(run_b)
    if a.optim.lr_schedule == b.optim.lr_schedule == "constant":
        b = replace(b, train=replace(b.train, steps=a.train.steps))
    same_data = _read(run_a / DATA) == _read(run_b / DATA) != ""
    if same_data:  # wherever it lies
        b = replace(b, data=replace(b.data, path=a.data.path, tokenizer=a.data.tokenizer))
    return tuple(
        (name, ours, theirs)
        for name, ours, theirs in differences(a, b)
        if name.split(".")[0] not in _FREE_SECTIONS and name not in _FREE
    )


def _config(run_dir: Path) -> Config:
    path = run_dir / CONFIG
    if not path.exists():
        raise ConfigError("RUN_DIR", f"there is no file {path}", "Name what --run.dir was")
    return load(Config, path, [])


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
