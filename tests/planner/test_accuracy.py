from __future__ import annotations

from itertools import combinations
from statistics import mean, median

import pytest

from megalite.planner.constants import load_constants
from megalite.planner.fit import measured_time
from megalite.planner.rows import predict
from tests.planner.tables import error, table
from tools.planning.fitting import is_steady

CORE = ("megatron21_table1", "korthikanti_table5", "mtnlg530b")


def core_errors() -> list[float]:
    rows = [row for name in CORE for row in table(name)]
    return [error(r) for r in (*rows, *filter(is_steady, table("vtrain_multi")))]


def test_step_times_of_tuned_stacks_are_within_their_goals() -> None:
    found = core_errors()
    assert mean(found) <= 0.035
    assert median(found) <= 0.027
    assert max(found) <= 0.20


def test_all_of_vtrains_clusters_rows_are_below_their_own_simulators_error() -> None:
    found = [error(r) for r in table("vtrain_multi")]
    assert mean(found) < 0.08
    assert max(found) > 0.4  # rows that double are among them


def test_megatron_core_on_h100_is_within_five_percent() -> None:
    assert mean(error(r) for r in table("megatron_h100_weak")) <= 0.05


def test_the_order_of_vtrains_layouts_is_found() -> None:
    rows = table("vtrain_multi")
    found = [(predict(r).iter_time_s, measured_time(r) or 0.0) for r in rows]
    assert tau(found) >= 0.7
    assert abs(tau([(b, -a) for a, b in found]) + tau(found)) < 1e-9  # a reversed order is told
    for size in ("3.6", "39.1"):
        pairs = sorted(p for p, r in zip(found, rows, strict=True) if r["params_b"] == size)
        fastest = min(measured for _, measured in pairs)
        assert min(measured for _, measured in pairs[:3]) <= 1.02 * fastest


def tau(pairs: list[tuple[float, float]]) -> float:
    """Kendall's: concordant less discordant pairs, of all."""
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in combinations(pairs, 2)]
    return (sum(s > 0 for s in signs) - sum(s < 0 for s in signs)) / len(signs)


@pytest.mark.parametrize("name", ["sustained", "stream"])
def test_a_wrong_constant_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from megalite.planner import rows

    constants = load_constants()
    wrong = replace(constants, **{name: 0.6 * getattr(constants, name)})
    monkeypatch.setattr(rows, "load_constants", lambda: wrong)
    assert mean(error(r) for r in table("megatron21_table1")) > 0.06
