"""Every schedule, with every kind of microbatch count, gives the gradients of one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from torch import Tensor

from launch.build import build
from launch.config import Config
from megalite.mesh import Mesh, Transport
from megalite.parallel_config import mesh_shape
from megalite.schedule.generators import SCHEDULES
from tests.parity.faults import swapped_microbatches
from tests.parity.harness import (
    GPT2,
    TRAIN,
    Fault,
    assemble,
    batch_of,
    config,
    parts,
    worst,
)
from tests.ranks import run_ranks

TOLERANCE = 1e-10
COUNTS = (1, 2, 3, 5, 7, 8)
CHUNKS = {"one": (1,), "two": (2,), "any": (1, 2)}
MODEL = replace(GPT2, num_layers=8, hidden_size=16, num_heads=2, ffn_hidden_size=32, vocab_size=33)

Case = tuple[str, int, int]  # schedule, stages a rank, microbatches
Outcome = tuple[float, list[Any]]  # loss, this rank's pieces of the gradients


def cases() -> Iterator[Case]:
    for name, schedule in SCHEDULES.items():
        for v in CHUNKS[schedule.chunks]:
            for m in COUNTS:
                yield name, v, m


def of(case: Case, pp: int, tied: bool) -> Config:
    name, v, m = case
    model = replace(MODEL, tied_embeddings=tied)
    train = replace(TRAIN, global_batch_size=m, micro_batch_size=1)
    return config(model, train=train, pp=pp, schedule=name, virtual_stages=v)


def gradients(cfg: Config, mesh: Mesh, fault: Fault | None = None) -> Outcome:
    training = build(cfg, mesh)
    if fault is not None:
        fault(training)
    totals = training.gradients(batch_of(cfg, 0, 0, 1))
    assert all(not stage.live_microbatches for stage in training.executor.stages.values())
    return float(totals.loss), parts(training.flat.grad_pieces())


def run_cases(
    transport: Transport, cfgs: list[Config], fault: Fault | None = None
) -> list[Outcome]:
    found = []
    for cfg in cfgs:
        mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
        found.append(gradients(cfg, mesh, fault))
        mesh.close()
    return found


@cache
def expected(m: int, tied: bool) -> tuple[float, dict[str, Tensor]]:
    loss, owned = gradients(of(("1f1b", 1, m), 1, tied), Mesh.single())
    return loss, assemble([owned])


def difference(ranks: list[Outcome], m: int, tied: bool) -> float:
    loss, grads = expected(m, tied)
    assert len({rank[0] for rank in ranks}) == 1
    size, _ = worst(assemble(rank[1] for rank in ranks), grads)
    return max(size, abs(ranks[0][0] - loss) / loss)


def compare(chosen: list[Case], pp: int, tied: bool) -> None:
    cfgs = [of(case, pp, tied) for case in chosen]
    ranks = run_ranks(pp, run_cases, cfgs, timeout_s=60 + 5 * len(cfgs))
    for n, case in enumerate(chosen):
        size = difference([rank[n] for rank in ranks], case[2], tied)
        assert size < TOLERANCE, f"{case} at pp {pp} differs by {size:.1e}"


@pytest.mark.full
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_gives_the_gradients_of_one_process(name: str, pp: int, tied: bool) -> None:
    compare([case for case in cases() if case[0] == name], pp, tied)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pp", [2, 4])
def test_every_schedule_gives_them_with_some_counts(pp: int, tied: bool) -> None:
    """One case in seven, so that counts go round from schedule to schedule."""
    turn = {2: 0, 4: 3}[pp] + 2 * tied
    compare(list(cases())[turn::7], pp, tied)


def test_the_wrong_targets_are_seen() -> None:
    case = ("zb_v", 2, 3)
    ranks = run_ranks(2, run_cases, [of(case, 2, True)], swapped_microbatches)
    assert difference([rank[0] for rank in ranks], 3, True) > 1e3 * TOLERANCE
