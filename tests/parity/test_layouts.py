"""The main test: any layout takes the same steps as one process, in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from launch.config import Config
from megalite.mesh import Mesh, Transport
from megalite.parallel_config import mesh_shape
from model.config import GPTConfig
from tests.parity.faults import applicable
from tests.parity.harness import (
    GPT2,
    LLAMA,
    Fault,
    config,
    differences,
    join,
    serial,
    train,
)
from tests.ranks import run_ranks

TOLERANCE = {"loss": 1e-12, "norm": 1e-10, "grads": 1e-10, "weights": 1e-10, "eval": 1e-12}

V2 = {"schedule": "interleaved_1f1b", "virtual_stages": 2}
SP = {"sequence_parallel": True}
GPIPE = {"schedule": "gpipe"}
V = {"virtual_stages": 2}
ZERO = {"zero1": True}
GPT2_257 = replace(GPT2, vocab_size=257)
# ranks, model, layout; dp is what is left
LAYOUTS: list[tuple[int, GPTConfig, dict[str, Any]]] = [
    (2, GPT2, {}),
    (2, GPT2, {"tp": 2}),
    (2, GPT2, {"tp": 2, **SP}),
    (2, GPT2, {"pp": 2}),
    (2, GPT2, {"pp": 2, **GPIPE}),
    (2, GPT2, {"pp": 2, **V2}),
    (4, GPT2, {"tp": 4}),
    (4, GPT2, {"tp": 4, **SP}),
    (4, GPT2, {"pp": 4}),
    (4, GPT2, {"pp": 4, **GPIPE}),
    (4, GPT2, {"tp": 2, "pp": 2, **V2}),
    (4, GPT2, {"tp": 2, **SP}),
    (4, GPT2, {"pp": 2, **V2}),
    (8, GPT2, {"tp": 4, "pp": 2, **SP}),
    (8, GPT2, {"tp": 2, "pp": 4, **GPIPE}),
    (8, GPT2, {"tp": 2, "pp": 2, **SP, **V2}),
    (8, GPT2, {"tp": 2, "pp": 2, **SP}),
    (2, LLAMA, {}),
    (2, LLAMA, {"tp": 2}),
    (2, LLAMA, {"tp": 2, **SP}),
    (2, LLAMA, {"pp": 2, **V2}),
    (4, LLAMA, {"tp": 4}),
    (4, LLAMA, {"tp": 4, **SP}),
    (4, LLAMA, {"pp": 4, **GPIPE}),
    (4, LLAMA, {"tp": 2, "pp": 2, **SP, **V2}),
    (4, LLAMA, {"tp": 2, **SP}),
    (4, LLAMA, {"pp": 2}),
    (8, LLAMA, {"tp": 4, "pp": 2, **SP, **V2}),
    (8, LLAMA, {"tp": 4, **SP}),
    (8, LLAMA, {"tp": 2, "pp": 2, **GPIPE}),
    (8, LLAMA, {"tp": 2, "pp": 4, **SP}),
    (2, GPT2, {"pp": 2, "schedule": "zb_h1"}),
    (4, LLAMA, {"pp": 4, "schedule": "zb_h2"}),
    (4, GPT2, {"tp": 2, "pp": 2, **SP, **V, "schedule": "zb_v"}),
    (2, LLAMA, {"pp": 2, **V, "schedule": "v_half"}),
    (2, GPT2, {"pp": 2, **V, "schedule": "v_min"}),
    (4, GPT2, {"pp": 2, **V, "schedule": "dualpipe_v"}),
    (2, GPT2, {"pp": 2, **V, "schedule": "looped_bfs"}),
    (2, GPT2, {"pp": 2, "partition": (3, 1)}),
    (2, GPT2, {"pp": 2, "partition": (0, 4)}),
    (2, LLAMA, {"pp": 2, "partition": (4, 0)}),
    (3, GPT2, {"pp": 3, "partition": (2, 0, 2)}),
    (3, LLAMA, {"pp": 3, "partition": (0, 4, 0)}),
    (4, LLAMA, {"pp": 4, "partition": (1, 0, 0, 3), **GPIPE}),
    (2, GPT2, {"pp": 2, "partition": (0, 1, 0, 3), **V2}),
    (2, LLAMA, {"pp": 2, "partition": (2, 0, 2, 0), **V2}),
    (4, GPT2, {"pp": 2, "partition": (2, 0, 0, 2), **V2}),
    (4, LLAMA, {"tp": 2, "pp": 2, "partition": (4, 0), **SP}),
    (8, GPT2, {"tp": 2, "pp": 4, "partition": (0, 2, 0, 2), **SP}),
    (4, GPT2, {"pp": 4, "partition": "balanced"}),
    (2, GPT2, {**ZERO}),
    (2, LLAMA, {**ZERO}),
    (3, GPT2, {**ZERO}),
    (3, LLAMA, {**ZERO}),
    (4, GPT2, {"tp": 2, **SP, **ZERO}),
    (4, LLAMA, {"tp": 2, **SP, **ZERO}),
    (4, GPT2, {"pp": 2, **ZERO}),
    (4, LLAMA, {"pp": 2, **ZERO, **V2}),
    (8, LLAMA, {"tp": 4, **SP, **ZERO}),
    (8, GPT2_257, {"tp": 4, **SP, **ZERO}),
    (6, GPT2, {"pp": 2, **V, **ZERO, "schedule": "zb_v"}),
    (4, LLAMA, {"pp": 2, **ZERO, "schedule": "zb_h1"}),
    (8, GPT2, {"tp": 2, "pp": 2, **SP, **ZERO, **V, "schedule": "zb_v"}),
    (6, GPT2, {"pp": 3, **ZERO, "partition": (2, 0, 2)}),
]


def name_of(case: tuple[int, GPTConfig, dict[str, Any]]) -> str:
    ranks, model, layout = case
    kind = "gpt2" if model.position == "learned" else "llama"
    kind += f"{model.vocab_size}" if model.vocab_size != 65 else ""
    return f"{ranks}-{kind}-" + "-".join(f"{k}={v}" for k, v in layout.items())


def clean_and_faulty(transport: Transport, cfg: Config, fault: Fault) -> list[dict[str, Any]]:
    """A rank of two runs: as it should be, and one step with a planted fault."""
    mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
    try:
        once = replace(cfg, train=replace(cfg.train, steps=1))
        return [train(cfg, mesh), train(once, mesh, fault)]
    finally:
        mesh.close()


@pytest.mark.parametrize("case", LAYOUTS, ids=name_of)
def test_a_layout_takes_the_steps_of_one_process(
    case: tuple[int, GPTConfig, dict[str, Any]],
) -> None:
    ranks, model, layout = case
    cfg = config(model, **layout)
    shape = mesh_shape(cfg.parallel, ranks)
    faults = applicable(cfg, shape.dp)
    fault = faults[LAYOUTS.index(case) % len(faults)]
    both = run_ranks(ranks, clean_and_faulty, cfg, fault)
    expected = serial(model)

    got = join([rank[0] for rank in both])
    for name, tensor in expected.initial.items():
        assert torch.equal(got.initial[name], tensor), f"{name} starts otherwise"
    for what, (size, where) in differences(got, expected).items():
        assert size <= TOLERANCE[what], f"{what} differs by {size:.1e} at {where}"

    broken = join([rank[1] for rank in both])
    seen = differences(broken, serial(model, replace(cfg.train, steps=1)))
    worst = max(size / TOLERANCE[what] for what, (size, _) in seen.items())
    assert worst > 1e3, f"{fault.__name__} went unseen"
