"""``fit``: the constants and scalars from a folder of measured runs, and the errors that they have.

Errors are given twice: of the constants in use, and of rows that were left out while constants and
scalars were fitted (each fifth of a table in turn).
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median

import numpy as np
import yaml

from megalite.errors import ConfigError
from megalite.planner.constants import CONSTANTS, STACKS, load_constants, load_stacks
from megalite.planner.fit import (
    Fit,
    Measured,
    Row,
    errors,
    fit,
    measured_time,
    scalars_of,
    weighted,
)
from megalite.planner.hardware import find_hardware, read_yaml
from megalite.planner.rows import predict

WEIGHTS = {
    "megatron20_dgx_a100": 0.7,
    "megatron21_table1": 1.5,
    "korthikanti_table5": 1.5,
    "mtnlg530b": 0.1,
    "vtrain_multi": 1.7,
    "vtrain_single": 1.0,
    "bloom_a100_sweep": 0.6,
    "nemo_a100_scaling": 0.7,
    "megatron_h100_weak": 0.7,
    "nanotron_h100": 0.3,
}
"""What a table counts: tables of tuned software more, noisy sweeps and single rows less."""
_HEADS = {
    CONSTANTS: "# Fitted by `tools/plan.py fit` inside the bounds; errors: docs/planner.md\n",
    STACKS: "# What software stacks do; networks of clusters (bytes a second, one direction, a "
    "GPU);\n# how much slower than predicted each pair is (fitted; unknown = 1.0).\n",
}
FOLDS = 5
Tables = Mapping[str, Sequence[Row]]
Guess = Callable[[Row], float]


def read_tables(folder: Path) -> dict[str, list[Row]]:
    """The tables of ``WEIGHTS`` that the folder has.

    Raises:
        ConfigError: if it has none.
    """
    found: dict[str, list[Row]] = {}
    for name in WEIGHTS:
        path = folder / f"{name}.csv"
        if path.exists():
            with path.open(encoding="utf-8", newline="") as file:
                found[name] = list(csv.DictReader(file))
    if not found:
        raise ConfigError("--data", f"{folder} has none of {', '.join(WEIGHTS)}", "Name another")
    return found


def fit_tables(tables: Tables, rounds: int) -> Fit:
    return fit(weighted(tables, WEIGHTS), rounds)


def save(found: Fit) -> None:
    """Puts constants and scalars into their YAML files."""
    constants = read_yaml(CONSTANTS)
    for name, value in asdict(found.constants).items():
        constants[name]["value"] = float(f"{value:.4g}")
    stacks = read_yaml(STACKS)
    stacks["scalars"] = [
        {"framework": framework, "cluster": cluster, "value": float(f"{value:.4g}")}
        for (framework, cluster), value in sorted(found.scalars.items())
    ]
    for path, content in ((CONSTANTS, constants), (STACKS, stacks)):
        text = yaml.safe_dump(content, sort_keys=False, width=100, allow_unicode=True)
        path.write_text(_HEADS[path] + text, encoding="utf-8")


def left_out(tables: Tables, rounds: int) -> dict[str, list[float]]:
    """|predicted / measured - 1| of every row, by constants and scalars that never saw it."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for fold in range(FOLDS):
        seen = {
            name: [r for i, r in enumerate(rows) if len(rows) < FOLDS or i % FOLDS != fold]
            for name, rows in tables.items()
        }
        learned = fit_tables(seen, rounds)
        for name, rows in tables.items():
            if len(rows) >= FOLDS:
                rest = [r for i, r in enumerate(rows) if i % FOLDS == fold]
                found[name] += errors_of(rest, learned)
    return dict(found)


def errors_of(rows: Sequence[Row], found: Fit) -> list[float]:
    data = [Measured(r, t, 1.0) for r in rows if (t := measured_time(r)) is not None]
    logs = errors(data, found.constants, load_stacks())
    return [
        abs(math.exp(float(log)) * found.scalars.get(m.stack, 1.0) - 1)
        for m, log in zip(data, logs, strict=True)
    ]


def in_use() -> Fit:
    return Fit(load_constants(), dict(load_stacks().scalars))


# --- two simple predictors ----------------------------------------------------------------------


def constant_efficiency(row: Row) -> float:
    """Hardware FLOPs, recomputation included, at one rate of the peak."""
    again = {"full": 4 / 3, "selective": 1.05}.get(row["recompute"].rstrip("?"), 1.0)
    return _model_flops(row) * again / (float(row["gpus"]) * _peak(row))


def six_n_d(row: Row) -> float:
    """6 x parameters x tokens, at one MFU."""
    parameters = 12 * float(row["layers"]) * float(row["hidden"]) ** 2
    tokens = float(row["gbs"]) * float(row["seq"])
    return 6 * parameters * tokens / (float(row["gpus"]) * _peak(row))


def _model_flops(row: Row) -> float:
    h, layers, s = float(row["hidden"]), float(row["layers"]), float(row["seq"])
    head = float(row["vocab"]) / (12 * layers * h)
    return 72 * float(row["gbs"]) * s * layers * h * h * (1 + s / (6 * h) + head)


def _peak(row: Row) -> float:
    gpu = row["gpu"].lower()
    return find_hardware(f"{gpu}-{row['gpu_mem_gb']}" if gpu == "a100" else gpu).peak_flops


def simple_errors(tables: Tables, guess: Guess) -> dict[str, list[float]]:
    """Of a predictor with one scalar a stack, as the planner has."""
    data = weighted(tables, WEIGHTS)
    logs = np.array([math.log(guess(m.row) / m.time_s) for m in data])
    scalars = scalars_of(data, logs)
    found: defaultdict[str, list[float]] = defaultdict(list)
    for m, log in zip(data, logs, strict=True):
        error = abs(math.exp(float(log)) * scalars[m.stack] - 1)
        found[_table_of(tables, m.row)].append(error)
    return dict(found)


def _table_of(tables: Tables, row: Row) -> str:
    return next(name for name, rows in tables.items() if any(r is row for r in rows))


# --- the report -----------------------------------------------------------------------------------


def report(tables: Tables, unseen: Mapping[str, list[float]] | None = None) -> str:
    """A table of errors in percent: mean, median, most."""
    ours = {name: errors_of(rows, in_use()) for name, rows in tables.items()}
    columns: list[tuple[str, Mapping[str, list[float]]]] = [("planner", ours)]
    if unseen is not None:
        columns.append(("left out", unseen))
    columns += [
        ("constant efficiency", simple_errors(tables, constant_efficiency)),
        ("6ND", simple_errors(tables, six_n_d)),
    ]
    head = ["table", "rows", *(name for name, _ in columns)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name in tables:
        cells = [name, str(len(ours[name]))]
        cells += [_summary(values.get(name, ())) for _, values in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *_stacks(tables), *_memory(tables)])


STEADY = ("megatron21_table1", "korthikanti_table5", "mtnlg530b", "vtrain_multi")
"""The tables of tuned software, of which rows that jump are left out."""
JUMPS = {"vtrain_multi-014", "vtrain_multi-016", "vtrain_multi-021"}
"""Rows near out-of-memory, or that double between neighbouring micro-batch sizes."""


def is_steady(row: Row) -> bool:
    """Whether a row of vTrain's is none of those whose neighbours differ by 20 to 40 %."""
    uneven = row["params_b"] == "39.1" and int(row["tp"]) < 8
    return not uneven and row["row_id"] not in JUMPS


def _stacks(tables: Tables) -> list[str]:
    """Of the tables of tuned software together, and with BLOOM and NeMo."""
    found = [r for name in STEADY for r in tables.get(name, ())]
    core = [r for r in found if not r["row_id"].startswith("vtrain_multi") or is_steady(r)]
    if not core:
        return []
    lines = [f"tuned software: {_summary(errors_of(core, in_use()))}"]
    others = [r for n in ("bloom_a100_sweep", "nemo_a100_scaling") for r in tables.get(n, ())]
    if others:
        whole = errors_of([*core, *others], in_use())
        lines.append(f"with BLOOM and NeMo: {_summary(whole)}")
    return lines


def _memory(tables: Tables) -> list[str]:
    """Of the tables that have a measured memory."""
    lines = []
    for name, rows in tables.items():
        told = [r for r in rows if (r.get("mem_gb") or "").strip() and measured_time(r)]
        errors = [abs(predict(r).mem_gb / float(r["mem_gb"]) - 1) for r in told]
        if errors:
            lines.append(f"memory, {name}, {len(errors)} rows: {_summary(errors)}")
    return lines


def _summary(values: Iterable[float]) -> str:
    found = [100 * v for v in values]
    if not found:
        return "-"
    return f"{mean(found):.1f} / {median(found):.1f} / {max(found):.1f}"
