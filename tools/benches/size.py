"""How long the large cases take that no cluster is needed for: 128 ranks, a 530B model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from launch.build import hold, make_plan
from launch.config import Config, TrainConfig
from megalite.mesh import Mesh
from megalite.mesh_shape import MeshShape
from megalite.parallel_config import ParallelConfig
from megalite.schedule.costs import Costs
from megalite.schedule.generators import build_schedule
from megalite.schedule.lower import lower
from megalite.schedule.simulate import simulate_step
from megalite.schedule.validate import validate
from model.config import PRESETS, GPTConfig
from tools.benches.rows import Goal, Row, Sample

T = TypeVar("T")
REPETITIONS = 5
PLAN = (128, 512, 3)
"""pp, microbatches and stages a rank."""
SCHEDULE = "interleaved_1f1b"
LARGE = Config(
    model=GPTConfig(**PRESETS["gpt-530b"]),  # type: ignore[arg-type]
    parallel=ParallelConfig(
        tp=8, pp=35, virtual_stages=3, schedule=SCHEDULE, sequence_parallel=True
    ),
    train=TrainConfig(global_batch_size=35, micro_batch_size=1, dtype="bf16"),
)


def run() -> list[Row]:
    found = [plan_seconds(*PLAN) for _ in range(REPETITIONS)]
    pp, m, v = PLAN
    what = f"{SCHEDULE} pp {pp} x {m} x {v}, s: "
    checks, wholes = zip(*found, strict=True)
    return [
        limited(f"{what}checked", checks, 10.0),
        limited(f"{what}generated, lowered, checked, simulated", wholes, 15.0),
        limited("a rank of gpt-530b, tp 8 x pp 35 x v 3, on meta, s", build_seconds(LARGE), 2.0),
    ]


def limited(what: str, seconds: Sequence[float], limit: float) -> Row:
    """Seconds beside the most that they may be."""
    return Row(what, Sample(tuple(seconds)), Sample((limit,)), Goal("at most", 1.0))


def plan_seconds(pp: int, num_microbatches: int, chunks: int) -> tuple[float, float]:
    """Seconds to check a lowered plan, and all that there is to do before it runs."""
    start = time.perf_counter()
    plan = lower(build_schedule(SCHEDULE, pp, num_microbatches, chunks))
    _, checked = timed(lambda: validate(plan))
    simulate_step(plan, Costs.equal(pp, chunks))
    return checked, time.perf_counter() - start


def build_seconds(cfg: Config) -> list[float]:
    """Seconds to build the stages, buckets and optimizer of each rank, without their memory."""
    shape = MeshShape(tp=cfg.parallel.tp, pp=cfg.parallel.pp)
    plan, meta = make_plan(cfg, shape.dp), torch.device("meta")

    def build(rank: int) -> float:
        return timed(lambda: hold(cfg, Mesh.at(shape, rank, meta), plan))[1]

    build(0)  # the first optimizer imports what the others find
    return [build(rank) for rank in range(shape.world_size)]


def timed(work: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    found = work()
    return found, time.perf_counter() - start
