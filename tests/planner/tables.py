"""Published measurements that tests compare with: one row a run, its source in its columns."""

from __future__ import annotations

import csv
from pathlib import Path

from megalite.planner.fit import measured_time
from megalite.planner.rows import predict

DATA = Path(__file__).parent / "data"
JUMPS = {"vtrain_multi-014", "vtrain_multi-016", "vtrain_multi-021"}
"""Rows near out-of-memory, or that double between neighbouring micro-batch sizes."""


def table(name: str) -> list[dict[str, str]]:
    with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def steady(row: dict[str, str]) -> bool:
    """Whether a row of vTrain's is none of those whose neighbours differ by 20 to 40 %."""
    uneven = row["params_b"] == "39.1" and int(row["tp"]) < 8
    return not uneven and row["row_id"] not in JUMPS


def error(row: dict[str, str]) -> float:
    """|predicted / measured - 1|."""
    measured = measured_time(row)
    assert measured is not None
    return abs(predict(row).iter_time_s / measured - 1)
