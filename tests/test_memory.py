"""A rank holds its own slices and nothing else: measured in live tensors, against a formula."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from launch.build import build
from launch.config import Config
from megalite.mesh import Mesh, Transport
from megalite.parallel_config import mesh_shape
from model.config import GPTConfig
from tests.live import live_bytes
from tests.parity.harness import GPT2, LLAMA, TRAIN, batch_of, config
from tests.ranks import run_ranks

WIDE = {"hidden_size": 128, "ffn_hidden_size": 384, "num_heads": 8, "seq_length": 32}
MODELS: dict[str, GPTConfig] = {
    "gpt2": replace(GPT2, **WIDE, vocab_size=257),  # type: ignore[arg-type]
    "llama": replace(LLAMA, **WIDE, vocab_size=257),  # type: ignore[arg-type]
}
TP, PP, MICROBATCHES, SIZE = 2, 2, 4, 2
# Of a parameter: the weight and the sum of its gradients; two moments, and a master of bf16.
BYTES = {"fp32": (4 + 4, 8), "bf16": (2 + 4, 8 + 4), "fp64": (8 + 8, 16)}


@dataclass
class Measured:
    pp_index: int
    built: int
    after_steps: int
    buffers: int


def measure(transport: Transport, cfgs: list[Config]) -> list[Measured]:
    found = []
    for cfg in cfgs:
        before = live_bytes()
        mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
        training = build(cfg, mesh)
        built = live_bytes() - before
        for step in range(2):
            training.step(batch_of(cfg, step, mesh.dp.index, mesh.dp.size), 1e-3)
        after = live_bytes() - before
        buffers = sum(
            t.numel() * t.element_size() for free in training.executor._free.values() for t in free
        )
        found.append(Measured(mesh.pp.index, built, after, buffers))
        mesh.close()
        del training
    return found


def elements(model: GPTConfig, pp_index: int, pp: int = PP, tp: int = TP) -> tuple[int, int]:
    """What a rank holds: all elements, and those that every tp rank holds."""
    d, kv, ffn = model.hidden_size, model.kv_heads * model.head_dim, model.ffn
    norm = d * (2 if model.norm == "layernorm" else 1)
    ups = 2 if model.activation == "swiglu" else 1
    matrices = 2 * d * d + 2 * d * kv + (ups + 1) * d * ffn
    column_biases = (d + 2 * kv + ups * ffn) if model.bias else 0
    row_biases = 2 * d if model.bias else 0
    layers = model.num_layers // pp
    everywhere = layers * (2 * norm + row_biases)
    if pp_index == 0 and model.position == "learned":
        everywhere += model.seq_length * d
    if pp_index == pp - 1:
        everywhere += norm
    matrices_of_tokens = 2 if pp == 1 and not model.tied_embeddings else 1
    rows = matrices_of_tokens * -(-model.vocab_size // tp)
    return layers * (matrices + column_biases) // tp + rows * d + everywhere, everywhere


CASES = [
    (model, dtype, cut)
    for model in MODELS
    for dtype, cut in (("fp32", False), ("bf16", True), ("fp64", True))
]


def config_of(model: str, dtype: Any, cut: bool) -> Config:
    train = replace(
        TRAIN, dtype=dtype, global_batch_size=MICROBATCHES * SIZE, micro_batch_size=SIZE
    )
    layout: dict[str, Any] = {"tp": TP, "pp": PP, "sequence_parallel": cut}
    return config(MODELS[model], train=train, **layout)


@pytest.fixture(scope="module")
def measured() -> list[list[Measured]]:
    """Rank, then case."""
    return run_ranks(TP * PP, measure, [config_of(*case) for case in CASES])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rank_holds_its_slices_of_weights_gradients_and_moments(
    case: tuple[str, str, bool], measured: list[list[Measured]]
) -> None:
    name, dtype, cut = case
    model, each = MODELS[name], sum(BYTES[dtype])
    for rank in measured:
        got = rank[CASES.index(case)]
        local, everywhere = elements(model, got.pp_index)
        expected = local * each
        if cut:  # partial gradients have a buffer of their own until they are summed
            expected += everywhere * (8 if dtype == "fp64" else 4)
        assert got.built == pytest.approx(expected, rel=0.01)
        # A whole model, one gradient more or moments of the wrong size would be seen.
        assert local < 0.6 * model.num_parameters()
        assert local * 2 > 0.05 * expected


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_add_only_the_buffers_of_the_pipeline(
    case: tuple[str, str, bool], measured: list[list[Measured]]
) -> None:
    name, dtype, cut = case
    model = MODELS[name]
    width = torch.finfo({"fp32": torch.float32, "bf16": torch.bfloat16}.get(dtype, torch.float64))
    message = model.seq_length * SIZE * model.hidden_size * width.bits // 8 // (TP if cut else 1)
    for rank in measured:
        got = rank[CASES.index(case)]
        assert got.after_steps - got.built == pytest.approx(got.buffers, abs=2048)
        assert message <= got.buffers <= 3 * message
        assert got.buffers % message == 0


# ranks, layout without pp or without tp; dp is what is left
ZERO1: list[tuple[int, str, str, dict[str, Any]]] = [
    (3, "gpt2", "bf16", {}),
    (3, "llama", "fp32", {}),
    (4, "gpt2", "fp64", {"tp": 2, "sequence_parallel": True}),
    (4, "llama", "bf16", {"pp": 2}),
    (4, "gpt2", "fp32", {}),
]


@pytest.mark.parametrize("case", ZERO1, ids=str)
def test_zero1_cuts_the_optimizer_state_over_replicas(
    case: tuple[int, str, str, dict[str, Any]],
) -> None:
    ranks, name, dtype, layout = case
    cfg = config_of(name, dtype, False)
    whole = {"tp": 1, "pp": 1, "zero1": True}
    cfg = replace(cfg, parallel=replace(cfg.parallel, **{**whole, **layout}))
    tp, pp = layout.get("tp", 1), layout.get("pp", 1)
    dp = ranks // (tp * pp)
    on_all = [rank[0] for rank in run_ranks(ranks, measure, [cfg])]
    for got in on_all:
        local, everywhere = elements(MODELS[name], got.pp_index, pp, tp)
        kept, cut = BYTES[dtype]
        expected = local * (kept + cut / dp)
        if tp > 1:  # partial gradients have a buffer of their own
            expected += everywhere * (8 if dtype == "fp64" else 4)
        assert got.built == pytest.approx(expected, rel=0.01)
        assert got.after_steps - got.built == pytest.approx(got.buffers, abs=2048)
        assert local * cut / dp > 0.05 * expected, "state that is not cut would be seen"
    for pp_index in range(pp):
        same = {got.built for got in on_all if got.pp_index == pp_index}
        assert len(same) == 1, "replicas hold the same number of bytes"


def test_with_zero1_off_the_whole_state_is_held() -> None:
    cfg = config_of("gpt2", "bf16", False)
    cfg = replace(cfg, parallel=replace(cfg.parallel, tp=1, pp=1))
    for (got,) in run_ranks(2, measure, [cfg]):
        local, _ = elements(MODELS["gpt2"], 0, 1, 1)
        assert got.built == pytest.approx(local * sum(BYTES["bf16"]), rel=0.01)
