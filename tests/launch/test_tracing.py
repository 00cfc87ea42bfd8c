"""A traced run of the command, from its flag to the page."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from launch.build import build
from launch.page import read_run
from launch.tracing import PERIOD_S, SHARE, TraceFiles, next_pause
from megalite.mesh import Mesh, Transport
from megalite.parallel_config import mesh_shape
from megalite.report.measured import read_traces
from megalite.trace import file_of, read_trace
from tests.launch.command import ROOT, SMALL, TINY, TRAIN, launcher, train
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
    assert any(h.startswith("The plan without losses: ") for h in page.texts("h3"))
    assert any(h.startswith("Measured: ") for h in page.texts("h3"))
    (table,) = [a for a in page.attributes("table", "class") if a == "lost"]
    assert "mean of all 4" in page.text and table
    # Of a traced run the pipeline comes before the curves.
    heads = [h.split(" ")[0] for h in page.texts("h2")]
    assert heads.index("One") < heads.index("Curves") < heads.index("Layout")
    assert read_run(run_dir).traced == traced


def kill_all(run_dir: Path, ranks: int, when: Callable[[], bool], *flags: str) -> None:
    """Start a run and kill -9 all of its processes as soon as ``when``."""
    command = [*launcher(ranks), TRAIN, *TINY, *SMALL, "--run.dir", str(run_dir), *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with open(run_dir.parent / "log", "w") as log:
        job = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
        try:
            for _ in range(1200):
                if when() or job.poll() is not None:
                    break
                time.sleep(0.05)
            assert job.poll() is None, (run_dir.parent / "log").read_text()
        finally:
            # Each rank has a process group of its own: there is none to kill them all by.
            listed = ["ps", "-o", "pid=", "--ppid", str(job.pid)]
            found = subprocess.run(listed, capture_output=True, text=True).stdout
            for pid in (job.pid, *map(int, found.split())):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            job.wait()


def steps_done(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


LONG = ["--parallel.pp", "2", "--train.steps", "100000", "--run.trace", "True"]


def test_a_run_that_is_killed_leaves_the_traces_of_a_moment_ago(tmp_path: Path) -> None:
    out = tmp_path / "run"
    kill_all(out, 2, lambda: steps_done(out) >= 20, *LONG)
    names = sorted(path.name for path in (out / "trace").glob("rank_*.json"))
    assert names == ["rank_00000.json", "rank_00001.json"]
    for rank in range(2):
        events = json.loads(file_of(out / "trace", rank).read_text())["traceEvents"]
        assert max(e["args"]["step"] for e in events if e["ph"] == "X") >= 8
    assert any(h.startswith("Measured: ") for h in report(out).texts("h3"))
    # A restart that does not come far leaves them; of one rank alone the page shows what it has.
    file_of(out / "trace", 0).unlink()
    page = report(out)
    assert page.texts("li")[0].startswith("1 of 2 ranks' traces found: none of rank 0.")
    assert any(h.startswith("Measured: ") for h in page.texts("h3"))
    assert "planned, not measured" not in page.text


def test_files_of_an_earlier_start_stay_until_there_are_new_ones_and_are_not_mixed(
    tmp_path: Path,
) -> None:
    cfg = config(GPT2)
    cfg = replace(cfg, run=replace(cfg.run, trace=True, dir=str(tmp_path)))
    folder = tmp_path / "trace"
    for start in range(2):
        training = build(cfg, Mesh.single())
        with TraceFiles(training) as files:
            for step in range(1, 4):
                with training.trace.step(step):
                    training.step(batch_of(cfg, step, 0, 1), 1e-2)
                before = {path: path.stat().st_mtime_ns for path in folder.glob("*")}
                files.after_step()
                after = {path: path.stat().st_mtime_ns for path in folder.glob("*")}
                assert len(after) == (1 if start or step >= 2 else 0)
                assert (before != after) == (step == 2)
    # Rank 0's of this start, rank 1's of the one before.
    old, new = folder / "rank_00001.json", file_of(folder, 0)
    whole = json.loads(new.read_text())
    whole["otherData"]["origin"] |= {"world_size": 2, "rank": 1}
    whole["otherData"]["origin"]["run"] -= 1
    old.write_text(json.dumps(whole))
    traced = read_traces(folder)
    assert traced is not None and len(traced.pipelines) == 1 and not traced.missing
    whole["otherData"]["origin"]["run"] += 2
    old.write_text(json.dumps(whole))
    traced = read_traces(folder)
    assert traced is not None and list(traced.missing) == [0]


def test_writing_takes_little_of_a_run_and_is_never_long_ago() -> None:
    assert next_pause(2, 0.0, 0.001) == 4  # at first as often as it doubles
    pause, at, writings, step_s = 2, 0, 0, 0.05
    while at < 100_000:
        at, writings = at + pause, writings + 1
        pause = next_pause(pause, 0.1, step_s)
    assert pause == PERIOD_S / step_s and writings * 0.1 < SHARE * at * step_s
    assert next_pause(1000, 3.0, 1.0) == 150  # 3 s are 2 % of 150
    assert next_pause(1000, 0.0, 60.0) == 1


def test_a_disk_that_is_full_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config(GPT2)
    cfg = replace(cfg, run=replace(cfg.run, trace=True, dir=str(tmp_path)))
    (tmp_path / "trace").write_text("not a folder")
    training = build(cfg, Mesh.single())
    with pytest.raises(FileExistsError), TraceFiles(training) as files:
        for step in range(1, 4):
            with training.trace.step(step):
                training.step(batch_of(cfg, step, 0, 1), 1e-2)
            files.after_step()
        assert "rank 0: trace not written" in capsys.readouterr().err


def test_a_step_that_an_error_ended_is_not_the_one_that_is_shown(tmp_path: Path) -> None:
    cfg = config(GPT2)
    cfg = replace(cfg, run=replace(cfg.run, trace=True, dir=str(tmp_path)))
    training = build(cfg, Mesh.single())
    with pytest.raises(FloatingPointError), TraceFiles(training):
        for step in range(1, 4):
            with training.trace.step(step):
                if step == 2:
                    raise FloatingPointError
                training.step(batch_of(cfg, step, 0, 1), 1e-2)
    traced = read_traces(tmp_path / "trace")
    assert traced is not None and (traced.step, traced.num_steps) == (1, 1)


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
