"""fp32, bf16 and fp16: what rounding leaves of parity, beside what plain data parallelism needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import pytest
from torch import Tensor

from launch.build import build
from launch.config import Config
from megalite.mesh import Mesh, Transport
from megalite.parallel_config import ParallelConfig, mesh_shape
from tests.parity.faults import maximum_of_a_part, no_norm_grad_sum
from tests.parity.groups import Job, outcomes, run_all
from tests.parity.harness import (
    EOD,
    Fault,
    Outcome,
    apart,
    batch_of,
    join,
    one_process,
    worst,
)
from tests.parity.matrix import TURNS, Case, grouped, part, todays_turn
from tests.ranks import run_ranks

# --- fp32 --------------------------------------------------------------------------------------

FP32 = 1e-5


def by_turn(most: int) -> list[Any]:
    """The first layouts of few ranks of each part of the matrix; the day's is always run."""
    found = []
    for turn in range(TURNS):
        marks = [] if turn == todays_turn() else [pytest.mark.full]
        small = tuple(c for c in part(turn) if c.ranks <= 4)[-most:]
        found.append(pytest.param(small, marks=marks, id=f"turn{turn}"))
    return found


def not_zero(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without those that are zero in exact arithmetic: a bias of keys moves all scores alike."""
    return {name: t for name, t in grads.items() if not name.endswith("attention.k.bias")}


def fp32_differences(got: Outcome, expected: Outcome) -> dict[str, tuple[float, str]]:
    return {
        "losses": apart(got.losses, expected.losses),
        "norms": apart(got.norms, expected.norms),
        "gradients": worst(not_zero(got.grads), not_zero(expected.grads), floor=0.0),
    }


@pytest.mark.parametrize("cases", by_turn(6))
def test_fp32_differs_by_rounding_only(cases: tuple[Case, ...]) -> None:
    found = []
    for group in grouped(cases):
        for case, got, expected in outcomes(group, "fp32"):
            for what, (size, where) in fp32_differences(got, expected).items():
                if not size <= FP32:
                    found.append(f"{case}: {what} differ by {size:.1e} at {where}")
    assert not found, "\n".join(found)


def test_a_missing_sum_is_seen_in_fp32() -> None:
    case = Case(tp=2, sequence_parallel=True)
    job: Job = (str(case), case.cfg(dtype="fp32"), no_norm_grad_sum)
    (run,) = run_all(2, [job])
    seen = fp32_differences(join(run, agreed=False), one_process(job[1]))
    assert seen["gradients"][0] > 1e3 * FP32


# --- bf16 and fp16 -----------------------------------------------------------------------------

STEPS, ROWS = 20, 6
Half = Literal["bf16", "fp16"]
# Losses of 20 steps, of about 4 nats. The rows of one microbatch in one process are cut into
# several by data parallelism alone, and products of fewer rows are rounded elsewhere: see
# test_plain_data_parallelism_needs_the_bound, which prints what that comes to.
BOUND: dict[Half, float] = {"bf16": 1e-3, "fp16": 2e-4}


@dataclass
class Curve:
    """The steps of a run: losses and loss scales."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)


def half(case: Case, dtype: Half, rows_at_once: int) -> Config:
    cfg = replace(case, batch="even").cfg(STEPS, dtype)
    train = replace(
        cfg.train,
        global_batch_size=ROWS,
        micro_batch_size=rows_at_once,
        loss_scale=2.0**14,
        loss_scale_interval=6,
    )
    return replace(cfg, train=train, optim=replace(cfg.optim, lr=1e-3))


def curve(cfg: Config, mesh: Mesh, fault: Fault | None = None) -> Curve:
    training, found = build(cfg, mesh, eod=EOD), Curve()
    if fault is not None:
        fault(training)
    for step in range(cfg.train.steps):
        batch = batch_of(cfg, step, mesh.dp.index, mesh.dp.size)
        totals = training.step(batch, cfg.optim.lr)
        found.losses.append(float(totals.loss))
        found.scales.append(float(totals.scale))
    return found


def curves(transport: Transport, cfgs: Sequence[Config], fault: Fault | None = None) -> list[Curve]:
    found = []
    for cfg in cfgs:
        mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
        found.append(curve(cfg, mesh, fault))
        mesh.close()
    return found


@cache
def alone(cfg: Config) -> Curve:
    """One process that takes all rows at once."""
    return curve(replace(cfg, parallel=ParallelConfig()), Mesh.single())


def deviations(
    cases: Sequence[Case], dtype: Half, fault: Fault | None = None
) -> list[tuple[float, Case]]:
    """The largest difference of a step's loss of each layout, all of equally many ranks; loss
    scales must be equal."""
    pieces = {1: 3, 2: 3, 3: 2, 4: 1}
    cfgs = [half(case, dtype, pieces[case.dp]) for case in cases]
    runs = run_ranks(cases[0].ranks, curves, cfgs, fault, timeout_s=60.0 + 20 * len(cfgs))
    found = []
    for n, case in enumerate(cases):
        expected = alone(replace(half(case, dtype, ROWS), parallel=ParallelConfig()))
        assert all(rank[n] == runs[0][n] for rank in runs), f"{case}: ranks disagree"
        got: Curve = runs[0][n]
        assert got.scales == expected.scales, f"{case}: the loss scale takes another way"
        both = zip(got.losses, expected.losses, strict=True)
        found.append((max(abs(a - b) for a, b in both), case))
    return found


@cache
def plain(dtype: Half) -> float:
    """What data parallelism alone makes of it."""
    models = ({}, {"family": "llama", "tied": False, "kv_heads": 2}, {"dropout": 0.1})
    return max(size for size, _ in deviations([Case(dp=2, **m) for m in models], dtype))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_plain_data_parallelism_needs_the_bound(dtype: Half) -> None:
    print(f"{dtype}: plain data parallelism is off by {plain(dtype):.1e}, bound {BOUND[dtype]}")
    assert BOUND[dtype] / 10 < plain(dtype) <= BOUND[dtype]


def halves_by_turn(most: int) -> list[Any]:
    """Both dtypes for each part of the matrix; of the day's, one is always run."""
    return [
        pytest.param(
            *param.values,
            dtype,
            marks=param.marks if (turn + nth) % 2 else [pytest.mark.full],
            id=f"{param.id}-{dtype}",
        )
        for turn, param in enumerate(by_turn(most))
        for nth, dtype in enumerate(BOUND)
    ]


@pytest.mark.parametrize(("cases", "dtype"), halves_by_turn(2))
def test_half_precision_stays_within_the_bound(cases: tuple[Case, ...], dtype: Half) -> None:
    found = [pair for group in grouped(cases) for pair in deviations(group, dtype)]
    for size, case in found:
        print(f"{dtype}: off by {size:.1e}, plain data parallelism {plain(dtype):.1e}: {case}")
    assert not [f"{case}: off by {size:.1e}" for size, case in found if not size <= BOUND[dtype]]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_fault_exceeds_the_bound(dtype: Half) -> None:
    ((size, _),) = deviations([Case(tp=2)], dtype, maximum_of_a_part)
    assert size > 3 * BOUND[dtype]


@pytest.mark.parametrize("dtype", ["fp16"])
def test_the_loss_scale_grows_in_these_steps(dtype: Half) -> None:
    scales = alone(half(Case(), dtype, ROWS)).scales
    assert scales[0] == 2.0**14 and scales[-1] > scales[0]
