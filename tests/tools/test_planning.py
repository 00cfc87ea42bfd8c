from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from megalite.planner.estimate import Machine
from megalite.planner.hardware import find_hardware
from tests.planner.tables import DATA
from tools.benches import planner as bench
from tools.planning import fitting, measure

FOUND = {
    "gemm": 9e10, "ramp_k": 2.0, "stream": 6e9, "flash": 0.4, "loss": 0.4, "gap": 3e-6,
    "memory_bytes": 16e9, "processors": 1.0,
}  # fmt: skip
LINKS = {"latency": 3e-4, "link": 3e9, "ranks": 2.0}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(measure.describe(FOUND, LINKS)))
    return Machine(find_hardware(str(path)), element_bytes=4)


def test_a_measured_machine_is_timed_by_what_was_measured(machine: Machine) -> None:
    k = machine.kernels
    assert k.gemm(1000, 1000, 998) == pytest.approx(2e9 / 9e10, rel=0.01)
    assert k.stream(6e9) == pytest.approx(1.0, rel=0.01)
    assert k.all_reduce(3e9, 2) == pytest.approx(1.0, rel=0.01)
    assert k.all_reduce(0.0, 2) == pytest.approx(3e-4)


def test_the_bench_predicts_a_step_of_every_trial(machine: Machine) -> None:
    steps = {name: bench.estimate(trial, machine).step_s for name, trial in bench.TRIALS.items()}
    assert len(steps) >= 12
    assert steps["tp 2, 4 x 2"] == pytest.approx(2 * steps["tp 2, 2 x 2"], rel=0.15)
    assert steps["zb_v, 4 x 2"] < steps["1f1b, 4 x 2"]
    assert steps["dp 2, 2 x 2, recompute"] > 1.15 * steps["dp 2, 2 x 2"]


def test_state_is_counted_as_tensors_that_live() -> None:
    before = bench.held_bytes()
    held = torch.zeros(1000, dtype=torch.float32)
    view = held[:10]
    assert bench.held_bytes() - before == 4000
    del held, view


def test_kernels_can_be_timed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_REPEATS", 1)
    monkeypatch.setattr(measure, "_LEAST_S", 1e-4)
    found = measure.time_kernels(torch.device("cpu"))
    assert set(found) == set(FOUND)
    assert 1e8 < found["gemm"] < 1e13
    assert 0 < found["gap"] < 1e-2


def test_the_figures_in_the_docs_are_those_of_the_report() -> None:
    tables = fitting.read_tables(DATA)
    docs = (DATA.parents[2] / "docs/planner.md").read_text(encoding="utf-8").splitlines()
    lines = fitting.report(tables).splitlines()
    for name in tables:
        said, found = (
            next(line.split("|") for line in text if line.startswith(f"| {name} "))
            for text in (docs, lines)
        )
        assert said[1:4] == found[1:4]  # name, rows, and the planner's errors
    tuned = next(line for line in lines if line.startswith("tuned software: "))
    assert tuned.removeprefix("tuned software: ") in "".join(docs)
    assert len(tables) == 5


def test_errors_are_reported_beside_simple_predictors() -> None:
    tables = {
        name: rows
        for name, rows in fitting.read_tables(DATA).items()
        if name in ("megatron21_table1", "mtnlg530b")
    }
    text = fitting.report(tables)
    assert "constant efficiency" in text and "6ND" in text
    row = next(line for line in text.splitlines() if "megatron21" in line)
    ours, constant, plain = (float(c.split("/")[0]) for c in row.split("|")[3:6])
    assert ours < constant < 20 and ours < plain < 20
