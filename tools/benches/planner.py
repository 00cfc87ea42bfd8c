"""The planner against this machine: measured, predicted, and trained in fifteen layouts."""

from __future__ import annotations

import gc
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from launch.build import build
from megalite.mesh import Mesh, TorchTransport
from megalite.mesh_shape import MeshShape
from megalite.parallel_config import ParallelConfig
from megalite.pipeline.executor import Batch
from megalite.planner.estimate import Estimate, Estimator, Job, Machine
from megalite.planner.hardware import find_hardware
from tools.benches.clock import slowest, time_in_turn
from tools.benches.layouts import WIDE, Work
from tools.benches.ranks import run_ranks
from tools.benches.rows import Goal, Row, Sample
from tools.planning.measure import measure
from tools.planning.models import shape_of

REPETITIONS = 3
NEAR = 1.10
STATE_NEAR = 1.05


@dataclass(frozen=True)
class Trial:
    """A layout of two ranks, and its microbatches."""

    num_microbatches: int
    micro_batch_size: int
    parallel: dict[str, Any] = field(default_factory=dict)

    @property
    def mesh(self) -> MeshShape:
        tp, pp = self.parallel.get("tp", 1), self.parallel.get("pp", 1)
        return MeshShape(tp=tp, pp=pp, dp=2 // (tp * pp))

    @property
    def work(self) -> Work:
        return Work(WIDE.model, self.num_microbatches, self.micro_batch_size)


def _pipeline(schedule: str, virtual_stages: int = 1) -> dict[str, Any]:
    return {"pp": 2, "schedule": schedule, "virtual_stages": virtual_stages}


TRIALS = {
    "dp 2, 2 x 2": Trial(2, 2),
    "dp 2, 4 x 1": Trial(4, 1),
    "dp 2, 1 x 4": Trial(1, 4),
    "dp 2, 2 x 2, zero1": Trial(2, 2, {"zero1": True}),
    "dp 2, 2 x 2, recompute": Trial(2, 2, {"recompute": "full"}),
    "tp 2, 2 x 2": Trial(2, 2, {"tp": 2}),
    "tp 2, 4 x 2": Trial(4, 2, {"tp": 2}),
    "tp 2, 2 x 2, sequence parallel": Trial(2, 2, {"tp": 2, "sequence_parallel": True}),
    "tp 2, 1 x 4, recompute": Trial(1, 4, {"tp": 2, "recompute": "full"}),
    "1f1b, 8 x 1": Trial(8, 1, _pipeline("1f1b")),
    "1f1b, 4 x 2": Trial(4, 2, _pipeline("1f1b")),
    "gpipe, 4 x 2": Trial(4, 2, _pipeline("gpipe")),
    "zb_h1, 4 x 2": Trial(4, 2, _pipeline("zb_h1")),
    "interleaved_1f1b v 2, 4 x 2": Trial(4, 2, _pipeline("interleaved_1f1b", 2)),
    "zb_v, 4 x 2": Trial(4, 2, _pipeline("zb_v", 2)),
}


def run() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.yaml"
        measure(path)
        machine = Machine(find_hardware(str(path)), element_bytes=4)
    ranks = run_ranks(2, train, REPETITIONS)
    times = slowest([{name: r[name][0] for name in TRIALS} for r in ranks])
    rows = []
    for name, trial in TRIALS.items():
        found = estimate(trial, machine)
        rows.append(_row(f"{name}: step, s", found.step_s, times[name], NEAR))
        state = max(m.weights + m.gradients + m.optimizer for m in found.memory) / 1e6
        held = Sample((max(r[name][1] for r in ranks) / 1e6,))
        rows.append(_row(f"{name}: state, MB", state, held, STATE_NEAR))
    return rows


def _row(what: str, predicted: float, measured: Sample, near: float) -> Row:
    """The larger of the two beside the smaller: a goal for both sides."""
    ours = Sample((predicted,))
    if predicted >= measured.median:
        return Row(f"{what}, predicted beside measured", ours, measured, Goal("at most", near))
    return Row(f"{what}, measured beside predicted", measured, ours, Goal("at most", near))


def estimate(trial: Trial, machine: Machine) -> Estimate:
    """What the planner says of a trial."""
    batch = trial.num_microbatches * trial.micro_batch_size * trial.mesh.dp
    parallel = ParallelConfig(**trial.parallel)
    job = Job(shape_of(WIDE.model), parallel, 2, batch, trial.micro_batch_size)
    return Estimator(job, machine).estimate()


def train(transport: TorchTransport, repetitions: int) -> dict[str, tuple[list[float], float]]:
    """Seconds of a step of every trial on this rank, and the bytes of state that it holds."""
    found = {}
    for name, trial in TRIALS.items():
        mesh = Mesh.create(trial.mesh, transport)
        before = held_bytes()
        training = build(trial.work.config(trial.mesh.dp, **trial.parallel), mesh)
        data = Batch(*trial.work.batch())
        step = partial(training.step, data, 1e-4)
        times = time_in_turn(mesh.world, {name: step}, repetitions)
        state = held_bytes() - before
        found[name] = (times[name], state)
        del training, step
        mesh.close()
    return found


def held_bytes() -> float:
    """Of every tensor that lives between steps, storage shared by several counted once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):  # asking a lazy one for its class would warn
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return float(sum(storages.values()))
