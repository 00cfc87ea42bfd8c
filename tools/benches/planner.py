"""The planner against this machine: measured, predicted, and trained in sixteen layouts of two
ranks; then the layouts of eight ranks that it ranks first, and others, with stages that sleep."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, count
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from launch.build import build
from megalite.mesh import Mesh, TorchTransport, local_device
from megalite.mesh_shape import MeshShape
from megalite.parallel_config import ParallelConfig
from megalite.pipeline.executor import Batch
from megalite.planner.estimate import Estimate, Estimator, Job, Machine
from megalite.planner.hardware import find_hardware
from tools.benches import asleep
from tools.benches.clock import Contestant, slowest, time_in_turn
from tools.benches.layouts import WIDE, Work
from tools.benches.ranks import run_ranks
from tools.benches.rows import Goal, Row, Sample
from tools.benches.settled import Settled
from tools.planning import measure
from tools.planning.models import shape_of
from tools.planning.timing import Rates

REPETITIONS = 8
SETTLE_S = 5e-3
LOOK_EVERY = 5  # steps: no multiple of the trials, so that none always comes after a look
TIME, MEMORY = Goal("within", 0.10), Goal("within", 0.05)
FIRST = 3
GLOBAL_BATCH = 8


@dataclass(frozen=True)
class Trial:
    """A layout of two ranks, and the size of its microbatches."""

    micro_batch_size: int
    parallel: dict[str, Any] = field(default_factory=dict)

    @property
    def mesh(self) -> MeshShape:
        tp, pp = self.parallel.get("tp", 1), self.parallel.get("pp", 1)
        return MeshShape(tp=tp, pp=pp, dp=2 // (tp * pp))

    @property
    def work(self) -> Work:
        num_microbatches = GLOBAL_BATCH // (self.micro_batch_size * self.mesh.dp)
        return Work(WIDE.model, num_microbatches, self.micro_batch_size)


def _pipeline(schedule: str, virtual_stages: int = 1, **more: Any) -> dict[str, Any]:
    return {"pp": 2, "schedule": schedule, "virtual_stages": virtual_stages, **more}


TRIALS = {
    "dp 2, 2 x 2": Trial(2),
    "dp 2, 4 x 1": Trial(1),
    "dp 2, 1 x 4": Trial(4),
    "dp 2, 2 x 2, zero1": Trial(2, {"zero1": True}),
    "dp 2, 2 x 2, recompute": Trial(2, {"recompute": "full"}),
    "tp 2, 4 x 2": Trial(2, {"tp": 2}),
    "tp 2, 8 x 1": Trial(1, {"tp": 2}),
    "tp 2, 4 x 2, sequence parallel": Trial(2, {"tp": 2, "sequence_parallel": True}),
    "tp 2, 2 x 4, recompute": Trial(4, {"tp": 2, "recompute": "full"}),
    "1f1b, 8 x 1": Trial(1, _pipeline("1f1b")),
    "1f1b, 4 x 2": Trial(2, _pipeline("1f1b")),
    "1f1b, 4 x 2, recompute": Trial(2, _pipeline("1f1b", recompute="full")),
    "gpipe, 4 x 2": Trial(2, _pipeline("gpipe")),
    "zb_h1, 4 x 2": Trial(2, _pipeline("zb_h1")),
    "interleaved_1f1b v 2, 4 x 2": Trial(2, _pipeline("interleaved_1f1b", 2)),
    "zb_v, 4 x 2": Trial(2, _pipeline("zb_v", 2)),
}


@dataclass
class Found:
    """Of one rank: seconds of a step by trial and repetition; bytes by trial, of state and at the
    peak of a step; and what the machine does."""

    seconds: dict[str, list[float]]
    state: dict[str, float]
    peak: dict[str, float]
    rates: Rates


def run() -> list[Row]:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler counts memory, and says so
    ranks = run_ranks(2, train, REPETITIONS)
    machine = measured_machine([r.rates for r in ranks])
    estimates = {name: estimate(trial, machine) for name, trial in TRIALS.items()}
    rows = time_rows(estimates, slowest([r.seconds for r in ranks]))
    rows += memory_rows(estimates, ranks)
    jobs = asleep.jobs(machine)
    return rows + [
        Row(f"8 ranks asleep: {r.what}", r.ours, r.peer, r.goal)
        for r in time_rows(jobs, asleep.race(jobs))
    ]


def measured_machine(ranks: Sequence[Rates]) -> Machine:
    """As ``tools/plan.py measure`` writes it, and ``rank`` reads it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.yaml"
        measure.write(measure.describe(measure.mean(ranks)), path)
        return Machine(find_hardware(str(path)), element_bytes=4)


def time_rows(predicted: Mapping[str, Estimate], measured: Mapping[str, Sample]) -> list[Row]:
    """Each step time, predicted beside measured, and the order of the layouts."""
    seconds = {name: found.step_s for name, found in predicted.items()}
    rows = [
        Row(f"{name}: step, s, predicted beside measured", Sample((s,)), measured[name], TIME)
        for name, s in seconds.items()
    ]
    places, pairs = float(in_place(seconds, measured)), in_order(seconds, measured)
    return [
        *rows,
        _count(f"fastest {FIRST}: predicted in their places", places, FIRST, Goal("at least", 1.0)),
        _count("pairs of layouts: predicted in their order", *pairs),
    ]


def _count(what: str, got: float, of: float, goal: Goal | None = None) -> Row:
    return Row(what, Sample((float(got),)), Sample((float(of),)), goal)


def in_place(predicted: Mapping[str, float], measured: Mapping[str, Sample]) -> int:
    """Of the layouts that are predicted to be fastest, how many stand where measurements have
    them; two whose ranges overlap may change places."""
    ours = sorted(predicted, key=predicted.__getitem__)[:FIRST]
    theirs = sorted(measured, key=lambda name: measured[name].median)
    return sum(measured[a].overlaps(measured[b]) for a, b in zip(ours, theirs, strict=False))


def in_order(predicted: Mapping[str, float], measured: Mapping[str, Sample]) -> tuple[int, int]:
    """Pairs whose ranges do not overlap: in the predicted order, and in all."""
    apart = [(a, b) for a, b in combinations(predicted, 2) if not measured[a].overlaps(measured[b])]
    right = [
        (predicted[a] < predicted[b]) == (measured[a].median < measured[b].median) for a, b in apart
    ]
    return sum(right), len(apart)


def memory_rows(predicted: Mapping[str, Estimate], ranks: Sequence[Found]) -> list[Row]:
    """The fullest rank, and apart from its state what a step needs for activations, buffers and
    the moment's work."""
    rows = []
    for name, found in predicted.items():
        both = [r.state[name] + r.peak[name] for r in ranks]
        whole, step = Sample((max(both) / 1e6,)), Sample((max(r.peak[name] for r in ranks) / 1e6,))
        ours = Sample((max(m.allocated for m in found.memory) / 1e6,))
        moment = max(m.activations + m.work + m.buffers for m in found.memory) / 1e6
        rows += [
            Row(f"{name}: memory, MB, predicted beside measured", ours, whole, MEMORY),
            Row(f"{name}: of it beside state, MB", Sample((moment,)), step, MEMORY),
        ]
    return rows


def estimate(trial: Trial, machine: Machine) -> Estimate:
    """What the planner says of a trial."""
    parallel = ParallelConfig(**trial.parallel)
    job = Job(shape_of(WIDE.model), parallel, 2, GLOBAL_BATCH, trial.micro_batch_size)
    return Estimator(job, machine).estimate()


def train(transport: TorchTransport, repetitions: int) -> Found:
    """Every trial on this rank: memory one after another, then times in turn, with looks at the
    machine all along. What else it does at some time then meets all of them, and the looks."""
    settled = Settled(transport)
    shapes = sorted({t.mesh for t in TRIALS.values()}, key=str)
    meshes = {shape: Mesh.create(shape, settled) for shape in shapes}
    pair = meshes[MeshShape(dp=2)]
    steps: dict[str, Contestant] = {}
    state, peak = {}, {}
    settled.pause_s = SETTLE_S
    for name, trial in TRIALS.items():
        before = held_bytes()
        steps[name] = step_of(trial, meshes[trial.mesh])
        state[name] = held_bytes() - before
        peak[name] = peak_bytes(steps[name])
    settled.pause_s = 0.0
    looks, turn = measure.open_bench(pair.dp, local_device(0)), count()

    def look() -> None:
        if next(turn) % LOOK_EVERY == 0:
            looks.round()

    seconds = time_in_turn(pair.world, steps, repetitions, look, warm=True)
    rates = measure.rates(looks, local_device(0))
    steps.clear()
    for mesh in meshes.values():
        mesh.close()
    return Found(seconds, state, peak, rates)


def step_of(trial: Trial, mesh: Mesh) -> Contestant:
    training = build(trial.work.config(trial.mesh.dp, **trial.parallel), mesh)
    return partial(training.step, Batch(*trial.work.batch()), 1e-4)


def peak_bytes(step: Callable[[], object]) -> float:
    """What a first step needs at most beside what lives before it; so buffers that it makes and
    leaves are counted."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    assert found.profiler is not None
    events: Any = found.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    held = peak = 0.0
    for _, change in sorted(changes):
        held += change
        peak = max(peak, held)
    return peak


def held_bytes() -> float:
    """Of every tensor that lives between steps, storage shared by several counted once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):  # asking a lazy one for its class would warn
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return float(sum(storages.values()))
