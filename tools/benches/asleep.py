"""Eight ranks on two cores: stages, tp collectives, reductions and updates sleep for as long as
the planner says; schedule, messages, waiting and order are real."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megalite.grads import GradSink
from megalite.mesh import Axis, Mesh, Transport
from megalite.parallel_config import ParallelConfig
from megalite.pipeline.executor import Batch, Executor
from megalite.pipeline.p2p import Channels
from megalite.pipeline.stage import Stage
from megalite.planner.candidates import Request
from megalite.planner.estimate import Estimate, Estimator, Job, Machine
from megalite.planner.pipeline import lowered
from megalite.planner.search import rank
from model.config import GPTConfig
from tools.benches.clock import Contestant, slowest, time_in_turn
from tools.benches.ranks import run_ranks
from tools.benches.rows import Sample
from tools.benches.sleep import SleepStage, Times
from tools.planning.models import shape_of

RANKS, GLOBAL_BATCH, REPETITIONS, RANKED = 8, 8, 3, 3
MODEL = GPTConfig(num_layers=8, hidden_size=512, num_heads=8, seq_length=256, vocab_size=8192)
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {"pp": 8, "schedule": "1f1b"}),
    (1, {"pp": 8, "schedule": "zb_h1"}),
    (2, {"pp": 8, "schedule": "gpipe"}),
    (1, {"pp": 4, "schedule": "1f1b", "zero1": True}),
    (1, {"pp": 4, "schedule": "zb_v", "virtual_stages": 2}),
    (1, {"pp": 4, "tp": 2, "schedule": "1f1b", "recompute": "full"}),
    (
        2,
        {
            "pp": 4,
            "tp": 2,
            "schedule": "interleaved_1f1b",
            "virtual_stages": 2,
            "sequence_parallel": True,
        },
    ),
    (1, {"pp": 2, "tp": 2, "schedule": "zb_h1"}),
]
"""Micro-batch and layout; dp is what is left."""


def jobs(machine: Machine) -> dict[str, Estimate]:
    """What is raced, by name: ``LAYOUTS``, and what ``rank`` finds fastest of all layouts."""
    shape = shape_of(MODEL)
    known = [Job(shape, ParallelConfig(**p), RANKS, GLOBAL_BATCH, b) for b, p in LAYOUTS]
    found = [Estimator(job, machine).estimate() for job in known]
    ranking = rank(Request(shape, machine, RANKS, GLOBAL_BATCH, best=RANKED))
    return {describe(e.job): e for e in [*ranking.best[:RANKED], *found]}


def describe(job: Job) -> str:
    p = job.parallel
    sizes = [
        f"{name} {n}" for name, n in (("tp", p.tp), ("pp", p.pp), ("dp", job.mesh.dp)) if n > 1
    ]
    more = [
        p.schedule if p.pp > 1 else "",
        f"v {p.virtual_stages}" if p.virtual_stages > 1 else "",
        "sequence parallel" if job.split.sequence_parallel else "",
        "zero1" if p.zero1 else "",
        "" if p.recompute == "none" else f"recompute {p.recompute}",
        "" if p.partition == "uniform" else "balanced",
    ]
    batch = f"{job.microbatches} x {job.micro_batch}"
    return ", ".join([" x ".join(sizes), *(m for m in more if m), batch])


def race(planned: Mapping[str, Estimate]) -> dict[str, Sample]:
    """Measured seconds of a step."""
    return slowest(run_ranks(RANKS, _race, planned, real_time=True))


def _race(transport: Transport, planned: Mapping[str, Estimate]) -> dict[str, list[float]]:
    meshes: dict[Any, Mesh] = {}
    contestants: dict[str, Contestant] = {}
    for name, estimate in planned.items():
        shape = estimate.job.mesh
        if shape not in meshes:
            meshes[shape] = Mesh.create(shape, transport)
        contestants[name] = _step(meshes[shape], Estimator(estimate.job, estimate.machine))
    found = time_in_turn(next(iter(meshes.values())).world, contestants, REPETITIONS)
    contestants.clear()
    for mesh in meshes.values():
        mesh.close()
    return found


class _Stage(SleepStage):
    """Its tp ranks come together after each pass, as a layer's collectives make them."""

    def __init__(self, times: Times, sink: GradSink, sums: bool, tp: Axis) -> None:
        super().__init__(times, sink, sums)
        self.tp = tp

    def forward(self, x: Tensor, targets: Tensor | None = None, rows: Any = None) -> Tensor:
        out = super().forward(x, targets, rows)
        self.tp.all_reduce(torch.zeros(1)).wait()
        return out


@dataclass
class _Reducer:
    """Reductions go on beside computation, one after another."""

    seconds: tuple[float, ...]
    end: float = 0.0
    asked: list[int] = field(default_factory=list)

    def started(self, stage: int) -> None:
        self.end = max(self.end, time.monotonic()) + self.seconds[stage]
        self.asked.append(stage)

    def wait(self) -> None:
        time.sleep(max(0.0, self.end - time.monotonic()))


def _step(mesh: Mesh, estimator: Estimator) -> Contestant:
    """A step on this rank: the plan in the real executor, then reductions, norm and update."""
    job, costs = estimator.job, estimator.costs
    p, mine = job.parallel, mesh.pp.index
    plan = lowered(p.schedule, p.pp, job.microbatches, p.virtual_stages)
    stages = {}
    for s in plan.stages_of(mine):
        sink = GradSink()
        times = Times(costs.forward[s], costs.input_grad[s], costs.weight_grad[s])
        module = _Stage(times, sink, s == plan.num_stages - 1, mesh.tp)
        stages[s] = Stage(module, s, plan.num_stages, sink, torch.float32, mesh.device)
    executor = Executor(mine, stages, Channels(mesh, plan))
    elements = job.shape.seq * job.shape.hidden // job.split.cut
    batch = Batch(torch.zeros(plan.num_microbatches, job.micro_batch, elements), None)

    def step() -> None:
        reducer = _Reducer(costs.reduce)
        executor.run(plan, batch, reducer)
        reducer.wait()
        assert set(reducer.asked) == set(stages), "a stage's gradients were not reduced"
        mesh.world.all_reduce(torch.zeros(8)).wait()
        time.sleep(estimator.fixed_s)

    return step
