"""Two models in one job: no part uses a group that was not given to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from launch.build import Training, build, make_plan
from launch.config import Config
from megalite.mesh import Mesh, Transport
from megalite.mesh_shape import MeshShape
from megalite.parallel_config import mesh_shape
from megalite.pipeline.p2p import Channels
from tests.parity.harness import (
    GPT2,
    LLAMA,
    TRAIN,
    Part,
    assemble,
    batch_of,
    config,
    parts,
    worst,
)
from tests.ranks import run_ranks

PIPED = config(GPT2, pp=2)
CUT = config(LLAMA, train=replace(TRAIN, seed=99), tp=2, sequence_parallel=True)
Result = tuple[list[float], list[Part]]


def outcome(training: Training, steps: range) -> Result:
    cfg, dp = training.cfg, training.mesh.dp
    losses = [
        float(training.step(batch_of(cfg, s, dp.index, dp.size), cfg.optim.lr).loss) for s in steps
    ]
    owned = parts([*training.flat.weight_pieces(), *grads_of(training)])
    return losses, owned if dp.index == 0 else []


def grads_of(training: Training) -> Iterable[Any]:
    return [replace(p, name=f"grad of {p.name}") for p in training.flat.grad_pieces()]


def apart(transport: Transport) -> Result:
    """PIPED on ranks 0 and 1, CUT on ranks 2 and 3."""
    first = Mesh.create(MeshShape(pp=2), transport)
    second = Mesh.create(MeshShape(tp=2), transport, first_rank=2)
    if transport.rank < 2:
        result = outcome(build(PIPED, first), range(3))
    else:
        Channels(first, make_plan(PIPED, 1))  # its groups are made by all ranks of the job
        result = outcome(build(CUT, second), range(3))
    for mesh in (first, second):
        mesh.close()
    return result


def only(transport: Transport, cfg: Config) -> Result:
    mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
    result = outcome(build(cfg, mesh), range(3))
    mesh.close()
    return result


def same(a: Result, b: Result) -> bool:
    return a[0] == b[0] and all(
        x[:3] == y[:3] and torch.equal(x[3], y[3]) for x, y in zip(a[1], b[1], strict=True)
    )


def test_two_models_on_ranks_of_their_own_train_as_if_alone() -> None:
    together = run_ranks(4, apart)
    piped, cut = run_ranks(2, only, PIPED), run_ranks(2, only, CUT)
    for got, expected in zip(together, [*piped, *cut], strict=True):
        assert len(got[1]) > 20
        assert same(got, expected)
    assert not same((together[0][0], []), (together[2][0], []))


def in_turn(transport: Transport) -> dict[str, list[Result]]:
    """Two layouts over the same ranks, a step of one and then of the other."""
    cfgs = {
        "a": config(GPT2, tp=2, pp=2),
        "b": replace(CUT, parallel=replace(CUT.parallel, rank_order="pp,tp,dp")),
    }
    meshes = {n: Mesh.create(mesh_shape(c.parallel, 4), transport) for n, c in cfgs.items()}
    trainings = {n: build(c, meshes[n]) for n, c in cfgs.items()}
    found: dict[str, list[Result]] = {n: [] for n in cfgs}
    for step in range(3):
        for name, training in trainings.items():
            found[name].append(outcome(training, range(step, step + 1)))
    for mesh in meshes.values():
        mesh.close()
    return found


def test_two_models_on_the_same_ranks_do_not_meet() -> None:
    ranks = run_ranks(4, in_turn)
    for name, cfg in (("a", config(GPT2)), ("b", replace(CUT, parallel=config().parallel))):
        losses, owned = outcome(build(cfg, Mesh.single()), range(3))
        got = assemble(rank[name][-1][1] for rank in ranks)
        size, where = worst(got, assemble([owned]))
        assert size < 1e-10, f"{where} differs by {size:.1e}"
        for rank in ranks:
            steps = [loss for result in rank[name] for loss in result[0]]
            assert steps == pytest.approx(losses, rel=1e-12)
