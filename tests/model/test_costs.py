"""Costs by formula, beside what the layers do: parameters, matrix products, memory kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from launch.config import Config
from launch.profile import Probe
from megalite.mesh import Mesh
from model.config import PRESETS, GPTConfig
from model.costs import (
    LayerCost,
    ModelCosts,
    Passes,
    block_elements,
    embedding_elements,
    head_elements,
    model_work,
)
from tests.grid import hold
from tests.parity.harness import GPT2, LLAMA, TRAIN, config

SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_heads": 8,
    "seq_length": 32,
    "vocab_size": 501,
}
MODELS = {
    "gpt2": replace(GPT2, **SMALL, ffn_hidden_size=192),
    "llama": replace(LLAMA, **SMALL, ffn_hidden_size=160, num_kv_heads=2),
    "no_bias": replace(GPT2, **SMALL, bias=False),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_parameters_of_a_layer_are_those_that_a_rank_holds(name: str, tp: int) -> None:
    model = MODELS[name]
    counts = (0, model.num_layers, 0)
    for rank in hold(config(model, tp=tp, pp=3, partition=counts), 3 * tp):
        wanted = {
            0: embedding_elements(model, tp),
            1: model.num_layers * block_elements(model, tp),
            2: head_elements(model, tp),
        }
        assert rank.flat.num_elements == wanted[rank.mesh.pp.index]


def test_all_layers_together_are_the_whole_model() -> None:
    for name in PRESETS:
        model = GPTConfig(**{**PRESETS[name], "vocab_size": 1000})  # type: ignore[arg-type]
        whole = embedding_elements(model) + head_elements(model)
        whole += model.num_layers * block_elements(model)
        if model.tied_embeddings:
            whole -= model.vocab_size * model.hidden_size
        assert whole == model.num_parameters()


def probes(model: GPTConfig, dtype: Any = "fp32", **layout: Any) -> tuple[Config, dict[str, Probe]]:
    cfg = config(model, train=replace(TRAIN, micro_batch_size=3, dtype=dtype), **layout)
    mesh = Mesh.single()
    return cfg, {
        "embedding": Probe(cfg, mesh, range(0), first=True),
        "block": Probe(cfg, mesh, range(1)),
        "head": Probe(cfg, mesh, range(0), last=True),
    }


class Products(TorchDispatchMode):
    """Counts the operations of matrix products, those in place too, without attention's."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            left, right = args[-2:]
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


def products(run: Callable[..., Any], *args: Any) -> int:
    counter = Products()
    with counter:
        run(*args)
    return counter.flops


@pytest.mark.parametrize("name", MODELS)
def test_the_operations_of_each_pass_are_those_of_its_matrix_products(name: str) -> None:
    cfg, kinds = probes(MODELS[name])
    work = model_work(cfg.model, 3)
    attention = 2.0 * 3 * 32 * 32 * 64
    for kind, probe in kinds.items():
        flops = getattr(work, kind).flops
        extra = attention if kind == "block" else 0.0
        stage = probe.stage
        forward = products(stage.forward, 0, probe.x, probe.targets)
        assert forward == flops.forward - extra
        input_grad = products(stage.input_grad, 0, probe.grad)
        assert input_grad == flops.input_grad - 2.5 * extra
        assert products(stage.weight_grad, 0) == flops.weight_grad
    assert work.embedding.flops == Passes() and work.block.flops.forward > 0


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_a_layer_keeps_until_its_backward_is_what_is_measured(name: str) -> None:
    cfg, kinds = probes(replace(MODELS[name], vocab_size=5000))
    work = model_work(cfg.model, 3, element_bytes=4)
    # On a CPU an rms_norm is no kernel of its own and keeps what it multiplies by its weight.
    more = {"block": 2 * 3 * 32 * 64 * 4, "head": 3 * 32 * 64 * 4} if name == "llama" else {}
    for kind, probe in kinds.items():
        kept = getattr(work, kind).kept_bytes + more.get(kind, 0)
        assert probe.kept_bytes() == pytest.approx(kept, rel=0.05), kind


@pytest.mark.parametrize("dtype,size", [("fp32", 4), ("bf16", 2), ("fp64", 8)])
@pytest.mark.parametrize("name", MODELS)
def test_a_recomputed_block_keeps_what_the_formula_says(name: str, dtype: str, size: int) -> None:
    """Two blocks in one stage, whose difference from one is free of what a stage keeps besides."""
    n, model = 3 * 32, replace(MODELS[name], dropout=0.1)

    def kept(recompute: str) -> int:
        cfg, _ = probes(model, dtype, recompute=recompute)
        one, two = (Probe(cfg, Mesh.single(), range(blocks)).kept_bytes() for blocks in (1, 2))
        return two - one

    works = {
        mode: model_work(model, 3, element_bytes=size, recompute=mode).block.kept_bytes
        for mode in ("none", "selective", "full")
    }
    assert kept("full") == works["full"] == n * 64 * size
    # Selective: all but a number for each head and token, that of a softmax.
    wide = 8 if dtype == "fp64" else 4
    assert kept("none") - kept("selective") == n * 8 * wide
    assert works["none"] == works["selective"] > 10 * works["full"]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_masks_of_dropout_are_a_byte_an_element(recompute: str) -> None:
    for kind, sites in {"embedding": 1, "block": 2, "head": 0}.items():
        found = []
        for rate in (0.0, 0.1):
            model = replace(MODELS["gpt2"], dropout=rate)
            cfg, layers = probes(model, recompute=recompute)
            work = model_work(model, 3, element_bytes=4, recompute=recompute)
            found.append((layers[kind].kept_bytes(), getattr(work, kind).kept_bytes))
        measured, formula = (b - a for a, b in zip(*found, strict=True))
        again = kind == "block" and recompute == "full"
        assert measured == formula == (0 if again else sites * 3 * 32 * 64)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_what_is_computed_again_counts_in_i(recompute: str) -> None:
    model = MODELS["gpt2"]
    _, layers = probes(model, recompute=recompute)
    plain = model_work(model, 3).block.flops
    work = model_work(model, 3, recompute=recompute).block.flops
    attention = 2.0 * 3 * 32 * 32 * 64
    assert work.forward == plain.forward and work.weight_grad == plain.weight_grad
    stage, block = layers["block"].stage, layers["block"]
    stage.forward(0, block.x, block.targets, block.rows)
    # Attention's own operations, once more and backwards, are not counted here.
    assert products(stage.input_grad, 0, block.grad) == work.input_grad - 3.5 * attention
    assert products(stage.weight_grad, 0) == work.weight_grad
    again = plain.forward if recompute == "full" else attention
    assert work.input_grad == plain.input_grad + again


def test_a_rank_of_tp_does_and_keeps_its_part() -> None:
    model = GPTConfig(**PRESETS["gpt-530b"])  # type: ignore[arg-type]
    whole, part = model_work(model, 1), model_work(model, 1, 8)
    cut = model_work(model, 1, 8, sequence_parallel=True)
    assert part.block.flops.total == pytest.approx(whole.block.flops.total / 8)
    assert part.head.flops.total == pytest.approx(whole.head.flops.total / 8, rel=1e-3)
    assert cut.block.kept_bytes == pytest.approx(whole.block.kept_bytes / 8)
    assert cut.block.kept_bytes < part.block.kept_bytes < whole.block.kept_bytes
    # Korthikanti et al. 2022 (arXiv:2205.05198), table 2, has 34 and 10 + 24 / t with dropout,
    # whose two masks after attention and MLP take 2.
    assert whole.block.kept_bytes == 32 * 2048 * 20480
    dropped = model_work(replace(model, dropout=0.1), 1).block
    assert dropped.kept_bytes == 34 * 2048 * 20480
    assert part.block.kept_bytes == (8 + 24 // 8) * 2048 * 20480


def test_the_head_of_a_large_model_costs_a_fifth_of_a_block_and_that_of_a_small_one_more() -> None:
    costs = model_work(GPTConfig(**PRESETS["gpt-530b"]), 1, 8).costs()  # type: ignore[arg-type]
    assert 0.18 < costs.head.time.total / costs.block.time.total < 0.22
    assert costs.embedding.time.total < 0.01 * costs.block.time.total
    costs = model_work(GPTConfig(**PRESETS["gpt2-124m"]), 1).costs()  # type: ignore[arg-type]
    assert costs.head.time.total > 4 * costs.block.time.total


def test_stages_add_up_their_layers() -> None:
    costs = ModelCosts(
        LayerCost(Passes(1, 2, 3), 10, 100),
        LayerCost(Passes(4, 5, 6), 20, 200),
        LayerCost(Passes(7, 8, 9), 30, 300),
    )
    stages = costs.stages([range(0), range(0, 2), range(2, 2), range(2, 3)])
    assert stages == [
        LayerCost(Passes(1, 2, 3), 10, 100),
        LayerCost(Passes(8, 10, 12), 40, 400),
        LayerCost(),
        LayerCost(Passes(11, 13, 15), 50, 500),
    ]
    assert costs.stages([range(2)]) == [LayerCost(Passes(16, 20, 24), 80, 800)]
    assert torch.tensor([s.time.total for s in stages]).tolist() == [6, 30, 0, 39]
