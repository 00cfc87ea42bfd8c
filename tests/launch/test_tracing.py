"""A traced run of the command, from its flag to the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launch.build import build
from launch.page import read_run
from launch.tracing import TraceFiles
from megalite.mesh import Mesh, Transport
from megalite.parallel_config import mesh_shape
from megalite.report.measured import read_traces
from megalite.trace import file_of, read_trace
from tests.launch.command import train
from tests.parity.harness import GPT2, batch_of, config
from tests.ranks import run_ranks
from tests.tools.test_report import report

FLAGS = ["--parallel.pp", "2", "--train.steps", "12", "--train.global_batch_size", "8"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pp 2 x dp 2, traced, with a directory that holds traces of a larger job."""
    out = tmp_path_factory.mktemp("traced")
    (out / "trace").mkdir()
    (out / "trace" / "rank_00007.json").write_text("{}")
    done = train(4, out, *FLAGS, "--run.trace", "True")
    assert done.code == 0, done.output
    return out


def test_each_rank_leaves_one_file_with_every_step(run_dir: Path) -> None:
    names = [path.name for path in sorted((run_dir / "trace").iterdir())]
    assert names == [f"rank_{rank:05d}.json" for rank in range(4)]
    for rank in range(4):
        trace = read_trace(file_of(run_dir / "trace", rank))
        assert (trace.origin.rank, trace.origin.world_size) == (rank, 4)
        assert list(trace.steps) == list(range(1, 13))
        for spans in trace.steps.values():
            parts = {s.name for s in spans if s.row == "step"}
            assert parts >= {"data", "totals", "optimizer", "record"}
            assert sum(s.row == "reduce" and s.name == "dp" for s in spans) >= 1


def test_a_reduction_starts_before_the_last_backward_ends(run_dir: Path) -> None:
    events = json.loads(file_of(run_dir / "trace", 1).read_text())["traceEvents"]
    step = [e for e in events if e["ph"] in "Xb" and e["args"]["step"] == 5]
    last = max(e["ts"] + e["dur"] for e in step if e["ph"] == "X" and e["cat"] == "compute")
    assert any(e["ph"] == "b" and e["name"] == "dp" and e["ts"] < last for e in step)


def test_the_page_shows_the_measured_step_and_all_of_its_idle_time(run_dir: Path) -> None:
    traced = read_traces(run_dir / "trace")
    assert traced is not None and traced.num_steps == 11 and len(traced.pipelines) == 2
    assert traced.uncertainty_s == 0.0
    for pipeline in traced.pipelines:
        for busy, causes in zip(pipeline.lost.busy_s, pipeline.lost.causes, strict=True):
            assert min(causes.values()) >= 0
            assert busy + sum(causes.values()) == pytest.approx(pipeline.lost.step_s)
    page = report(run_dir)
    assert any(h.startswith("Planned: ") for h in page.texts("h3"))
    assert any(h.startswith("Measured: ") for h in page.texts("h3"))
    (table,) = [a for a in page.attributes("table", "class") if a == "lost"]
    assert "mean of all 4" in page.text and table
    assert read_run(run_dir).traced == traced


def losses(transport: Transport, trace: bool) -> list[float]:
    cfg = config(GPT2, pp=2)
    cfg = replace(cfg, run=replace(cfg.run, trace=trace))
    mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
    training, found = build(cfg, mesh), []
    for step in range(3):
        with training.trace.step(step):
            totals = training.step(batch_of(cfg, step, 0, 1), 1e-2)
        training.losses(batch_of(cfg, step, 0, 1))  # an evaluation is not recorded
        found += [totals.loss.item(), totals.grad_norm.item()]
    training.trace.finish()
    assert list(training.trace.steps) == ([0, 1, 2] if trace else [])
    num_actions = len(training.plan[mesh.pp.index])
    for spans in training.trace.steps.values():
        assert len({s.name for s in spans if s.op and "wait" not in s.name}) == num_actions
    mesh.close()
    return found


def test_tracing_changes_no_number() -> None:
    assert run_ranks(2, losses, True) == run_ranks(2, losses, False)


def test_a_run_that_fails_leaves_what_it_has_and_asks_nobody(tmp_path: Path) -> None:
    cfg = config(GPT2)
    cfg = replace(cfg, run=replace(cfg.run, trace=True, dir=str(tmp_path)))
    training = build(cfg, Mesh.single())
    with pytest.raises(FloatingPointError), TraceFiles(training):
        with training.trace.step(1):
            training.step(batch_of(cfg, 0, 0, 1), 1e-2)
        # Any collective from here on would fail.
        object.__setattr__(training.mesh.world, "all_reduce", None)
        raise FloatingPointError
    whole = json.loads(file_of(tmp_path / "trace", 0).read_text())
    assert whole["otherData"]["clock"]["drift_s"] is None
    traced = read_traces(tmp_path / "trace")
    assert traced is not None and traced.step == 1
