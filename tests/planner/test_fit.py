from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from megalite.planner.constants import load_constants, load_stacks
from megalite.planner.fit import Measured, errors, fit, measured_time, scalars_of
from megalite.planner.rows import predict
from tests.planner.tables import table

TRUE = replace(load_constants(), sustained=0.85, stream=0.8)


def made_rows() -> list[Measured]:
    """Runs of one rank whose times the planner itself gives, with other constants."""
    base = {**table("korthikanti_table5")[0], "gpus": "8"}
    rows = []
    for hidden, mbs in (("1024", "8"), ("2048", "4"), ("4096", "2"), ("8192", "1"), ("8192", "4")):
        row = {**base, "hidden": hidden, "heads": str(int(hidden) // 128), "ffn": "", "mbs": mbs}
        row |= {"layers": "12", "gbs": mbs}
        rows.append(Measured(row, predict(row, TRUE).iter_time_s, 1.0))
    return rows


def test_constants_that_made_the_times_are_found_again() -> None:
    rows = made_rows()
    start = replace(load_constants(), sustained=0.95, stream=0.95)
    before = np.abs(errors(rows, start, load_stacks())).max()
    found = fit(rows, 6, ["sustained", "stream"], start).constants
    after = np.abs(errors(rows, found, replace(load_stacks(), scalars={}))).max()
    assert found.sustained == pytest.approx(TRUE.sustained, abs=0.03)
    assert found.stream == pytest.approx(TRUE.stream, abs=0.05)
    assert after < before / 3


def test_a_stacks_scalar_is_its_weighted_median() -> None:
    rows = [Measured({"framework": "a", "cluster": "b"}, 1.0, w) for w in (1.0, 1.0, 1.0)]
    assert scalars_of(rows, np.log([0.5, 0.8, 4.0])) == {("a", "b"): pytest.approx(1 / 0.8)}
    heavy = [*rows[:2], Measured(rows[0].row, 1.0, 100.0)]
    assert scalars_of(heavy, np.log([0.5, 0.8, 4.0]))["a", "b"] == pytest.approx(0.25, rel=0.01)


def test_a_row_known_to_be_wrong_has_no_time() -> None:
    row = table("megatron21_table1")[0]
    assert measured_time(row) == float(row["iter_time_derived_s"])
    assert measured_time({**row, "exclude": "a typing error"}) is None
    assert measured_time({**row, "iter_time_s": "2.5"}) == 2.5
    assert measured_time({**row, "iter_time_derived_s": ""}) is None


def test_errors_are_logarithms() -> None:
    row = table("korthikanti_table5")[0]
    free = replace(load_stacks(), scalars={})
    time = predict(row, stacks=free).iter_time_s
    found = errors([Measured(row, 2 * time, 1.0)], load_constants(), free)
    assert found[0] == pytest.approx(-math.log(2))
