"""ZeRO-1 on and off: the same bits at dp 2, in every dtype."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from launch.build import build
from launch.config import Config
from launch.state import state_pieces
from megalite.data_parallel import bucket as bucket_module
from megalite.mesh import Mesh, Transport
from megalite.parallel_config import mesh_shape
from model.config import GPTConfig
from tests.parity.harness import GPT2, LLAMA, TRAIN, Part, assemble, batch_of, config, parts
from tests.ranks import run_ranks

SP = {"sequence_parallel": True}
V = {"virtual_stages": 2}


@dataclass
class Run:
    """``numbers``: losses and norms of each step, and a loss of an evaluation. ``state``: this
    replica's share; ``weights``: all that it has."""

    numbers: list[float] = field(default_factory=list)
    state: list[Part] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)


def runs(transport: Transport, cfgs: list[Config]) -> list[Run]:
    """Three steps of each."""
    bucket_module._SMALLEST = 1000  # borders of shares cut rows; this process ends with the body
    found = []
    for cfg in cfgs:
        mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
        training, run = build(cfg, mesh), Run()
        for step in range(3):
            batch = batch_of(cfg, step, mesh.dp.index, mesh.dp.size)
            totals = training.step(batch, cfg.optim.lr)
            run.numbers += [float(totals.loss), float(totals.grad_norm)]
        held_out = training.losses(batch_of(cfg, 99, mesh.dp.index, mesh.dp.size))
        run.numbers.append(float(held_out[0] / held_out[1]))
        run.state = parts(state_pieces(training, share=True))
        run.weights = [p.tensor.clone() for p in training.flat.weight_pieces()]
        found.append(run)
        mesh.close()
    return found


GPT2_257 = replace(GPT2, vocab_size=257)
CASES: list[Any] = [
    (2, GPT2, {}, "gloo"),
    (2, LLAMA, {}, "nccl_rules"),
    (4, GPT2, {"tp": 2, **SP}, "gloo"),
    (4, GPT2, {"pp": 2}, "nccl_rules"),
    pytest.param(8, LLAMA, {"tp": 4, **SP}, "gloo", marks=pytest.mark.full),
    (8, GPT2_257, {"tp": 2, "pp": 2, **SP, **V, "schedule": "zb_v"}, "nccl_rules"),
]


@pytest.mark.parametrize(("ranks", "model", "layout", "transport"), CASES)
def test_zero1_changes_no_bit_at_dp_2(
    ranks: int, model: GPTConfig, layout: dict[str, Any], transport: str
) -> None:
    dtypes: list[Any] = ["fp64", "fp32", "bf16"]
    cfgs = [
        config(model, train=replace(TRAIN, dtype=dtype), zero1=zero1, **layout)
        for dtype in dtypes
        for zero1 in (False, True)
    ]
    got = run_ranks(ranks, runs, cfgs, transport=transport)
    for n, dtype in enumerate(dtypes):
        off, on = ([rank[2 * n + i] for rank in got] for i in (0, 1))
        for a, b in zip(off, on, strict=True):
            assert a.numbers == b.numbers, dtype
            assert all(map(torch.equal, a.weights, b.weights)), dtype
        expected, state = (assemble(run.state for run in each) for each in (off, on))
        assert expected.keys() == state.keys()
        assert ("optim.master.final_norm.weight" in state) == (dtype == "bf16")
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor), f"{dtype}: {name}"
    # Another dtype is not equal, so the comparison can fail.
    assert got[0][0].numbers != got[0][2].numbers
