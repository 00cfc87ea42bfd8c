"""What is not finite is named by rank, stage, layer and microbatch, whatever the layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from launch.build import build
from launch.config import Config
from launch.job import share_text
from megalite.mesh import Mesh, Transport
from megalite.optim.clip import Told
from megalite.parallel_config import mesh_shape
from tests.parity.harness import GPT2, LLAMA, TRAIN, batch_of, config
from tests.ranks import run_ranks
from tests.resilience.plant import plant

V2 = {"schedule": "interleaved_1f1b", "virtual_stages": 2}
# ranks, layout, the rank that is hit, layer, microbatch, way, and what is said
CASES: list[tuple[int, dict[str, Any], int, str, int, str, str]] = [
    (1, {}, 0, "layers.2", 1, "F", "rank 0 (stage 0): the output of layers.2, microbatch 1"),
    (2, {"pp": 2}, 1, "layers.3", 0, "B",
     "rank 1 (stage 1): the gradient at the output of layers.3, microbatch 0"),
    (2, {"pp": 2}, 0, "layers.0", 2, "F", "rank 0 (stage 0): the output of layers.0, microbatch 2"),
    (4, {"pp": 2, "tp": 2, **V2}, 1, "layers.2", 1, "B",
     "rank 1 (stage 2): the gradient at the output of layers.2, microbatch 1"),
    (2, {"pp": 2}, 1, "layers.2.mlp", 0, "B",
     "rank 1 (stage 1): the gradient that layers.2 gives back to stage 0, microbatch 0"),
    (2, {"tp": 2}, 1, "layers.2.mlp", 0, "B",
     "ranks 0, 1 (stage 0): the gradient at the output of layers.1, microbatch 0"),
    (4, {"pp": 2, "zero1": True, "schedule": "zb_h1"}, 3, "layers.3", 0, "F",
     "rank 3 (stage 1): the output of layers.3, microbatch 0"),
    (2, {"recompute": "full", "zero1": True}, 1, "layers.1", 0, "B",
     "rank 1 (stage 0): the gradient at the output of layers.1, microbatch 0"),
]  # fmt: skip


def bad_step(
    transport: Transport, cfg: Config, rank: int, layer: str, microbatch: int, way: str
) -> tuple[list[float], str, bool, bool]:
    """A bad step between good ones: whether each was finite, what was said of the bad one,
    whether it changed a weight or moment, and whether a place is known of the good ones."""
    mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
    training, share = build(cfg, mesh), share_text(mesh)
    finite, places, changed = [], [], False
    for step in range(3):
        before = [b.weight.clone() for b in training.flat.buckets]
        moments = [s["exp_avg"].clone() for s in training.optimizer.inner.state.values()]
        hook = None
        if step == 1 and mesh.rank == rank:
            hook = plant(training, layer=layer, microbatch=microbatch, way=way)
        batch = replace(batch_of(cfg, step, mesh.dp.index, mesh.dp.size), step=step)
        totals = training.step(batch, 1e-2)
        training.flat.current()
        if hook is not None:
            hook.remove()
        finite.append(float(totals.finite))
        places.append(training.watch.first(step, share, False))
        if step == 1:
            after = [b.weight for b in training.flat.buckets]
            later = [s["exp_avg"] for s in training.optimizer.inner.state.values()]
            changed = not all(map(torch.equal, [*before, *moments], [*after, *later]))
    mesh.close()
    return finite, str(places[1]), changed, bool(places[0] or places[2])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[-1][:40])
def test_a_bad_step_is_named_by_rank_stage_layer_and_microbatch_and_changes_nothing(
    case: tuple[int, dict[str, Any], int, str, int, str, str],
) -> None:
    ranks, layout, hit, layer, microbatch, way, said = case
    model = GPT2 if "tp" in layout else LLAMA
    train = replace(TRAIN, global_batch_size=3 * ranks, micro_batch_size=1, bad_step="skip")
    cfg = config(model, train=train, **layout)
    for rank in run_ranks(ranks, bad_step, cfg, hit, layer, microbatch, way):
        assert rank == ([1.0, 0.0, 1.0], said, False, False)


def poisoned(transport: Transport, cfg: Config) -> str:
    """A gradient that is hit in memory, after its backward and before the replicas are summed."""
    mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
    training = build(cfg, mesh)
    watched = training.reducer.on_complete
    assert watched is not None

    def hit(bucket: Any) -> None:
        if mesh.rank == 1:
            bucket.grad[0] = torch.nan
        watched(bucket)

    training.reducer.on_complete = hit
    training.step(batch_of(cfg, 0, mesh.dp.index, mesh.dp.size), 1e-2)
    place = training.watch.first(0, share_text(mesh), False)
    mesh.close()
    return str(place)


def test_a_sum_that_rots_in_memory_is_named_by_rank() -> None:
    for said in run_ranks(2, poisoned, config(GPT2)):
        assert said.startswith("rank 1 (stage 0): the gradients of ")
        assert said.endswith(", before the sum over replicas")


def overflows(transport: Transport, cfg: Config) -> list[list[float]]:
    """fp16 steps, the second with an infinite gradient on one rank of one stage."""
    mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
    training, told = build(cfg, mesh), []
    for step in range(4):
        hook = None
        if step == 1 and mesh.rank == 5:
            hook = plant(training, layer="layers.2", microbatch=0, way="B")
        totals = training.step(batch_of(cfg, step, mesh.dp.index, mesh.dp.size), 1e-3)
        if hook is not None:
            hook.remove()
        assert training.loss_scale is not None
        told.append([*totals.stacked().tolist(), *training.loss_scale.state()])
    weights = sum(float(p.detach().double().sum()) for p in training.flat.parameters())
    mesh.close()
    return [*told, [weights]]


def test_all_ranks_skip_an_overflow_of_one_and_halve_the_scale() -> None:
    train = replace(TRAIN, dtype="fp16", loss_scale=1024.0, loss_scale_interval=2)
    cfg = config(GPT2, train=replace(train, global_batch_size=8), tp=2, pp=2)
    ranks = run_ranks(8, overflows, cfg)
    assert len({str(rank[:4]) for rank in ranks}) == 1  # a norm of nan is equal to none
    steps = ranks[0][:4]
    assert [step[3] for step in steps] == [1, 0, 1, 1]
    scale = Told._fields.index("scale")
    assert [step[scale] for step in steps] == [1024, 1024, 512, 512]
    assert [step[scale + 1 :] for step in steps] == [[1024, 1], [512, 0], [512, 1], [1024, 0]]
    assert steps[1][4] == 0, "the loss was finite"
