"""Published measurements that tests compare with: one row a run, its source in its columns."""

from __future__ import annotations

import csv
from pathlib import Path

from megalite.planner.fit import measured_time
from megalite.planner.rows import predict

DATA = Path(__file__).parent / "data"


def table(name: str) -> list[dict[str, str]]:
    with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def error(row: dict[str, str]) -> float:
    """|predicted / measured - 1|."""
    measured = measured_time(row)
    assert measured is not None
    return abs(predict(row).iter_time_s / measured - 1)
