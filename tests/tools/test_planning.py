from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

from launch.build import build
from megalite.mesh import Mesh, Transport
from megalite.mesh_shape import MeshShape
from megalite.parallel_config import ParallelConfig
from megalite.pipeline.executor import Batch
from megalite.planner.estimate import Estimate, Estimator, Job, Machine
from megalite.planner.hardware import find_hardware
from model.config import GPTConfig
from tests.planner.tables import DATA
from tests.ranks import run_ranks
from tools.benches import asleep, settled
from tools.benches import planner as bench
from tools.benches.layouts import Work
from tools.benches.rows import Row, Sample
from tools.planning import bodies, fitting, measure, timing
from tools.planning.bodies import Sizes
from tools.planning.models import shape_of
from tools.planning.timing import Rates

FOUND = {
    "gemm": 9e10, "ramp_k": 2.0, "stream": 6e9, "flash": 0.4, "activation": 4e9, "loss": 0.4,
    "update": 2e10, "gap": 3e-6, "memory_bytes": 16e9, "processors": 1.0,
    "latency": 3e-4, "link": 3e9, "gather": 0.8, "overlap": 0.25, "ranks": 2.0,
}  # fmt: skip
SMALL = Sizes(rows=32, width=16, vocab=64, seq=16, head=8, update=640)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(measure.describe(FOUND)))
    return Machine(find_hardware(str(path)), element_bytes=4)


def test_a_measured_machine_is_timed_by_what_was_measured(machine: Machine) -> None:
    k = machine.kernels
    assert k.gemm(1000, 1000, 998) == pytest.approx(2e9 / 9e10, rel=0.01)
    assert k.stream(6e9) == pytest.approx(1.0, rel=0.01)
    assert k.stream(4e9, "activation") == pytest.approx(1.0, rel=0.01)
    assert k.stream(2e10, "update") == pytest.approx(1.0, rel=0.01)
    assert k.all_reduce(3e9, 2) == pytest.approx(1.0, rel=0.01)
    assert k.all_gather(3e9, 2) == pytest.approx(0.8, rel=0.01)
    assert k.all_reduce(0.0, 2) == pytest.approx(3e-4)


def test_what_is_measured_of_a_machine_is_what_it_is() -> None:
    """The times of a machine whose rates are known give them back."""
    rows, width, stream, rate, ramp = SMALL.rows, SMALL.width, 2e10, 1e11, 20.0

    def layer(width: int) -> float:
        spent = 0.0
        for n, k in bodies.linears(width):
            spent += 2 * rows * n * (k + ramp) / rate  # F
            spent += 2 * rows * k * (n + ramp) / rate  # I
            spent += 2 * n * k * (rows + ramp) / rate + 8 * n * k / stream  # W, added to the sum
        return spent

    hidden, logits = 4 * rows * width, rows * SMALL.vocab
    seconds = {
        "products": layer(width),
        "short": layer(width // 2),
        "attention": 3.5 * 2 * rows * SMALL.seq * width / (0.3 * rate),
        "activation": 5 * 4 * hidden / 3e9,
        "stream": 10 * hidden / stream,
        "head": 2 * logits * (width + ramp) / rate + 0.5 * logits * 52 / stream,
        "update": SMALL.update * 38 / 1e10,
        "block": 26 * 3e-5,
    }
    expected = {
        "gemm": rate, "ramp_k": ramp, "stream": stream, "flash": 0.3, "activation": 3e9,
        "loss": 0.5, "update": 1e10, "gap": 3e-5,
    }  # fmt: skip
    assert measure.kernels(seconds, SMALL, 4) == pytest.approx(expected)


def test_a_pause_in_the_timing_of_sums_leaves_products_a_rate() -> None:
    seconds = {"products": 1e-3, "short": 3e-4}
    calm, _ = measure._products(seconds, SMALL, 1e-12)
    paused, ramp = measure._products(seconds, SMALL, 1.0)
    assert calm <= paused <= 2.5 * calm and 0 <= ramp <= 512


def test_a_collective_hides_what_it_does_not_add_to_the_products_beside_it() -> None:
    size = timing.LARGE_BYTES
    seconds = {
        "reduce small": 1e-3, "beside reduce small": 0.0, "gather small": 1e-3,
        "reduce large": 1e-3 + size / 1e9, "beside reduce large": 0.75e-3 + 0.75 * size / 1e9,
        "gather large": 1e-3 + size / 1e9,
    }  # fmt: skip
    found = measure.links(seconds)
    assert found["latency"] == 1e-3 and found["link"] == pytest.approx(1e9)
    assert found["gather"] == pytest.approx(1.0)
    assert 0.25 < found["overlap"] < 0.4


def timed(transport: Transport) -> tuple[Rates, int]:
    """This process is the test's own: what is patched here stays here."""
    bodies.ON_CPU = timing.ON_CPU = SMALL  # type: ignore[misc]
    timing.LEAST_S = timing._BETWEEN_S = 1e-4
    mesh = Mesh.create(MeshShape(dp=2), transport)
    looks = measure.open_bench(mesh.dp, torch.device("cpu"))
    looks.round()
    looks.round()
    found = measure.rates(looks, torch.device("cpu"))
    mesh.close()
    return found, len(looks.rounds)


def test_two_ranks_time_their_kernels_at_once() -> None:
    for found, rounds in run_ranks(2, timed):
        assert set(found) == set(FOUND) and rounds == 2
        assert 1e6 < found["gemm"] < 1e13 and 0 < found["gap"] < 1e-2
        assert 0 <= found["overlap"] <= 1
    both = measure.mean([{"gap": 1.0, "link": 2.0}, {"link": 4.0}])
    assert both == {"gap": 1.0, "link": 3.0}, "a rank without a device has timed links only"


def test_the_bench_predicts_a_step_of_every_trial(machine: Machine) -> None:
    steps = {name: bench.estimate(trial, machine).step_s for name, trial in bench.TRIALS.items()}
    assert len(steps) >= 12
    assert steps["tp 2, 4 x 2"] == pytest.approx(steps["tp 2, 8 x 1"], rel=0.15)
    assert steps["zb_v, 4 x 2"] < steps["1f1b, 4 x 2"]
    assert steps["dp 2, 2 x 2, recompute"] > 1.15 * steps["dp 2, 2 x 2"]


def test_what_does_not_overlap_costs_time(machine: Machine) -> None:
    free = replace(machine, hw=replace(machine.hw, overlap=1.0))
    for name in ("tp 2, 4 x 2", "dp 2, 2 x 2", "1f1b, 4 x 2", "dp 2, 2 x 2, zero1"):
        trial = bench.TRIALS[name]
        assert bench.estimate(trial, machine).step_s > bench.estimate(trial, free).step_s


# --- the rows ------------------------------------------------------------------------------------


def test_a_prediction_may_be_off_to_neither_side() -> None:
    measured = Sample((1.0,))
    verdicts = [
        Row("x", Sample((s,)), measured, bench.TIME).verdict for s in (0.89, 0.91, 1.09, 1.11)
    ]
    assert verdicts == ["missed", "met", "met", "missed"]
    assert str(bench.TIME) == "0.9-1.1" and str(bench.MEMORY) == "0.95-1.05"


def test_the_first_three_must_stand_in_their_places_or_be_tied() -> None:
    measured = {
        "a": Sample((1.0, 1.1)),
        "b": Sample((1.2, 1.3)),
        "c": Sample((1.25, 1.4)),
        "d": Sample((2.0,)),
    }

    def places(*order: str) -> int:
        return bench.in_place({name: float(n) for n, name in enumerate(order)}, measured)

    assert places("a", "b", "c", "d") == 3
    assert places("a", "c", "b", "d") == 3, "their ranges overlap"
    assert places("b", "a", "c", "d") == 1
    assert places("d", "a", "b", "c") == 1, "c and b are tied"
    assert bench.in_order({"a": 2.0, "b": 1.0, "c": 3.0, "d": 4.0}, measured) == (4, 5)


# --- memory --------------------------------------------------------------------------------------

TALL = GPTConfig(num_layers=3, hidden_size=64, num_heads=4, seq_length=64, vocab_size=1024)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_steps_memory_is_as_predicted(machine: Machine, recompute: str) -> None:
    work = Work(TALL, 3, 4)
    before = bench.held_bytes()
    training = build(work.config(recompute=recompute), Mesh.single())
    state = bench.held_bytes() - before
    data = Batch(*work.batch())
    peak = bench.peak_bytes(lambda: training.step(data, 1e-4))
    parallel = ParallelConfig(recompute=recompute)  # type: ignore[arg-type]
    (found,) = Estimator(Job(shape_of(TALL), parallel, 1, 12, 4), machine).memory()
    assert found.weights + found.gradients + found.optimizer == pytest.approx(state, rel=0.02)
    assert found.activations + found.work + found.buffers == pytest.approx(peak, rel=0.05)
    # A layer's activations more or less, or another copy of the logits, would be seen.
    assert min(found.activations / 4, 4 * 256 * 1024) > 0.05 * peak


def test_memory_is_counted_at_its_peak() -> None:
    def step() -> None:
        first = torch.zeros(1000)
        del first
        second = torch.zeros(3000)
        third = second + 1
        del second, third

    assert bench.peak_bytes(step) == pytest.approx(24000, abs=200)


def test_state_is_counted_as_tensors_that_live() -> None:
    before = bench.held_bytes()
    held = torch.zeros(1000, dtype=torch.float32)
    view = held[:10]
    assert bench.held_bytes() - before == 4000
    del held, view


def test_a_message_is_let_go_before_a_rank_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Inner:
        rank, world_size, device = 0, 2, torch.device("cpu")
        waited: list[str] = []

        def new_group(self, ranks: Sequence[int]) -> Inner:
            return self

        def all_reduce(self, tensor: Tensor, op: str) -> Inner:
            self.waited.append(op)
            return self

        def wait(self) -> None:
            self.waited.append("wait")

    naps: list[float] = []
    monkeypatch.setattr(settled.time, "sleep", naps.append)
    inner = Inner()
    transport = settled.Settled(inner)  # type: ignore[arg-type]
    group = transport.new_group([0, 1])
    assert group is not None
    for pause in (0.0, 2e-3):
        transport.pause_s = pause
        work = group.all_reduce(torch.zeros(1), "max")
        work.wait()
        work.wait()
    assert inner.waited == ["max", "wait"] * 2
    assert naps == [2e-3, 2e-3]


# --- eight ranks that sleep ----------------------------------------------------------------------


def test_layouts_that_need_more_ranks_than_cores_are_of_every_kind(machine: Machine) -> None:
    jobs = asleep.jobs(machine)
    first = list(jobs.values())[: asleep.RANKED]
    assert [e.step_s for e in first] == sorted(e.step_s for e in first)
    assert first[0].step_s == min(e.step_s for e in jobs.values()), "rank found none better"
    layouts = [e.job.parallel for e in jobs.values()]
    assert len(layouts) >= asleep.RANKED + 6
    assert {p.pp for p in layouts} >= {1, 2, 4, 8} and {p.tp for p in layouts} >= {1, 2}
    assert len({p.schedule for p in layouts}) >= 5
    assert any(p.virtual_stages > 1 for p in layouts)
    assert any(p.recompute == "full" for p in layouts) and any(p.zero1 for p in layouts)


def sleeps(transport: Transport, planned: Estimate) -> tuple[Counter[float], float]:
    """The naps of a step on this rank, and what the planner says of them."""
    mesh = Mesh.create(planned.job.mesh, transport)
    estimator = Estimator(planned.job, planned.machine)
    naps: list[float] = []
    time.sleep = naps.append  # type: ignore[assignment]  # this process ends with the body
    asleep._step(mesh, estimator)()
    mesh.close()
    return Counter(round(n, 9) for n in naps), float(mesh.pp.index)


def test_ranks_sleep_for_each_pass_and_for_what_follows(machine: Machine) -> None:
    parallel = ParallelConfig(tp=2, pp=2, schedule="1f1b")
    job = Job(shape_of(asleep.MODEL), parallel, 4, 3, 1)
    planned = Estimator(job, machine)
    costs = planned.costs
    for naps, index in run_ranks(4, sleeps, planned.estimate()):
        stage = int(index)
        for seconds in (
            costs.forward[stage],
            costs.input_grad[stage],
            costs.weight_grad[stage],
        ):
            assert naps[round(seconds, 9)] == 3, "once a microbatch"
        assert naps[round(planned.fixed_s, 9)] == 1


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
