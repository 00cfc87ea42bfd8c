"""A stage: B, and B in two parts, I and W."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from launch.build import build_stages, make_plan
from launch.config import Config
from megalite.grads import main_grad
from megalite.mesh import Axis, Mesh, Transport
from megalite.mesh_shape import MeshShape
from megalite.pipeline.stage import Stage
from megalite.rng import initialize
from megalite.slices import get_slice
from model.config import GPTConfig
from tests.parity.harness import EOD, GPT2, LLAMA, TRAIN, batch_of, config
from tests.ranks import run_ranks

PP, M = 3, 2
KINDS = ("first", "middle", "last", "alone")


def stage_of(kind: str, cfg: Config, tp: Axis) -> Stage:
    """A stage of three, or the only one, with its initial weights."""
    pp = 1 if kind == "alone" else PP
    index = {"first": 0, "middle": 1, "last": 2, "alone": 0}[kind]
    axes = {a: Axis(a) for a in ("dp", "tie", "world")}
    shape = MeshShape(tp=tp.size, pp=pp)
    mesh = Mesh(shape, None, {**axes, "tp": tp, "pp": Axis("pp", index, pp)})
    cfg = replace(cfg, parallel=replace(cfg.parallel, pp=pp))
    (module,) = build_stages(cfg, mesh, make_plan(cfg, 1), eod=EOD).values()
    initialize(module.parameters(), 1)
    layout = module.layout
    return Stage(module, index, pp, layout.sink, layout.dtype, layout.device, 0.125)


def inputs(kind: str, cfg: Config, stage: Stage) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Input, targets and output gradient of each microbatch."""
    batch = batch_of(cfg, 0, 0, 1)
    assert batch.targets is not None
    draw = torch.Generator().manual_seed(3)
    found = []
    for m in range(M):
        shape = stage.module.hidden_shape(*batch.tokens.shape[1:])
        x = torch.randn(shape, generator=draw, dtype=stage.dtype)
        dy = torch.randn(shape, generator=draw, dtype=stage.dtype)
        tokens = batch.tokens[m]
        found.append((tokens if stage.first else x, batch.targets[m], None if stage.last else dy))
    return found


def outcome(kind: str, cfg: Config, tp: Axis, order: str) -> list[Tensor]:
    """Outputs, input gradients and parameter gradients after a run in an order such as F0 B0."""
    stage = stage_of(kind, cfg, tp)
    given, rows = inputs(kind, cfg, stage), batch_of(cfg, 0, 0, 1)
    results: dict[str, Tensor] = {}
    for action in order.split():
        op, m = action[0], int(action[1:])
        x, targets, dy = given[m]
        if op == "F":
            results[action] = stage.forward(m, x, targets if stage.last else None, rows.rows(m))
            assert not results[action].requires_grad
        elif op == "W":
            stage.weight_grad(m)
        else:
            dx = stage.backward(m, dy) if op == "B" else stage.input_grad(m, dy)
            assert (dx is None) is stage.first
            results[f"dx{m}"] = torch.zeros(()) if dx is None else dx.clone()
        assert stage.sink.queue is None, "a queue is left open"
    assert stage.live_microbatches == 0
    params = list(stage.module.parameters())
    assert all(p.grad is None for p in params)
    names = [get_slice(p).name for p in params]
    assert len(names) == len(set(names)) >= 10
    ordered = [results[k] for k in sorted(results)]
    return [*ordered, *(main_grad(p) for p in params)]


WHOLE = "F0 F1 B0 B1"
PARTED = ("F0 F1 I0 W0 I1 W1", "F0 F1 I0 I1 W0 W1", "F0 I0 F1 I1 W0 W1")
SWAPPED = "F0 F1 I0 I1 W1 W0"
SP = {"sequence_parallel": True}
CASES: list[tuple[GPTConfig, dict[str, Any]]] = [(GPT2, {}), (LLAMA, {}), (GPT2, SP), (LLAMA, SP)]


def compare(tp: Axis) -> None:
    """Assert that in parts every bit is that of B; another order of sums only rounds otherwise."""
    for model, layout in CASES if tp.size > 1 else CASES[:2]:
        cfg = config(model, train=replace(TRAIN, global_batch_size=4), tp=tp.size, **layout)
        for kind in KINDS:
            whole = outcome(kind, cfg, tp, WHOLE)
            assert all(bool(t.any()) for t in whole if t.ndim)
            # One matrix as embedding and head gets the former's part in I, the latter's in W.
            shared = kind == "alone" and model.tied_embeddings
            for order in (*PARTED, SWAPPED):
                for a, b in zip(whole, outcome(kind, cfg, tp, order), strict=True):
                    if shared or order == SWAPPED:
                        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
                    else:
                        assert torch.equal(a, b), (kind, layout, order)


def compare_on_ranks(transport: Transport) -> None:
    mesh = Mesh.create(MeshShape(tp=2), transport)
    compare(mesh.tp)
    mesh.close()


def test_input_and_weight_gradients_are_those_of_a_whole_backward() -> None:
    compare(Axis("tp"))


def test_so_they_are_with_tensor_and_sequence_parallelism() -> None:
    run_ranks(2, compare_on_ranks)


def test_without_w_the_weights_have_no_gradient_yet() -> None:
    cfg = config(LLAMA, train=replace(TRAIN, global_batch_size=4))
    stage = stage_of("middle", cfg, Axis("tp"))
    (x, _, dy), _ = inputs("middle", cfg, stage)
    stage.forward(0, x)
    stage.input_grad(0, dy)
    assert stage.live_microbatches == 1
    for param in stage.module.parameters():
        assert bool(main_grad(param).any()) is (param.ndim == 1), get_slice(param).name
    stage.weight_grad(0)
    assert all(main_grad(p).any() for p in stage.module.parameters())


@pytest.mark.parametrize("kind", ["first", "middle"])
def test_the_memory_of_an_output_goes_with_the_output(kind: str) -> None:
    cfg = config(GPT2, train=replace(TRAIN, global_batch_size=4))
    stage = stage_of(kind, cfg, Axis("tp"))
    (x, _, dy), _ = inputs(kind, cfg, stage)
    out = stage.forward(0, x)
    memory = StorageWeakRef(out.untyped_storage())
    assert not memory.expired()
    del out
    assert memory.expired(), "the graph keeps the output alive"
    assert stage.live_microbatches == 1
    stage.backward(0, dy)


def test_an_input_is_not_changed_and_not_kept() -> None:
    cfg = config(GPT2, train=replace(TRAIN, global_batch_size=4))
    stage = stage_of("middle", cfg, Axis("tp"))
    (x, _, dy), _ = inputs("middle", cfg, stage)
    before = x.clone()
    stage.forward(0, x)
    dx = stage.backward(0, dy)
    assert torch.equal(x, before)
    assert not x.requires_grad
    memory = StorageWeakRef(x.untyped_storage())
    del x
    assert memory.expired()
    assert dx is not None


def test_without_gradients_nothing_is_kept() -> None:
    cfg = config(GPT2, train=replace(TRAIN, global_batch_size=4))
    for kind in KINDS:
        stage = stage_of(kind, cfg, Axis("tp"))
        x, targets, _ = inputs(kind, cfg, stage)[0]
        with torch.no_grad():
            out = stage.forward(0, x, targets if stage.last else None)
        assert stage.live_microbatches == 0
        assert not stage.live(0)
        assert not out.requires_grad


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_the_last_stage_starts_from_the_scale(scale: float) -> None:
    cfg = config(GPT2, train=replace(TRAIN, global_batch_size=4))
    found = []
    for each in (1.0, scale):
        stage = stage_of("last", cfg, Axis("tp"))
        stage.loss_scale = each
        (x, targets, _), _ = inputs("last", cfg, stage)
        stage.forward(0, x, targets)
        dx = stage.backward(0, None)
        assert dx is not None
        found.append(dx)
    torch.testing.assert_close(found[1], scale * found[0], rtol=1e-14, atol=0)
