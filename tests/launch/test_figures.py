"""Figures for wandb: flops, known devices, and what is said of each stage."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from launch.figures import EVERY, Figures, by_stage, flops_per_token, peak_flops
from megalite.mesh import Mesh, Transport
from megalite.mesh_shape import MeshShape
from megalite.schedule.generators import build_schedule
from megalite.schedule.lower import lower
from megalite.trace import Span, Trace
from model.config import PRESETS, GPTConfig
from tests.parity.harness import GPT2, config
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA RTX A1000", None),
        ("Tesla K80", None),
        ("", None),
    ],
)
def test_peaks_are_known_by_whole_words_or_not_at_all(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_flops_count_every_product_and_no_lookup() -> None:
    model = GPTConfig(**PRESETS["gpt2-124m"])  # type: ignore[arg-type]
    d, layers, seq = 768, 12, 1024
    # 12 d^2 weights a layer, the head once; biases and norms are less than 0.2 % of it.
    expected = 6 * (layers * 12 * d * d + 50257 * d) + 12 * layers * d * seq
    assert flops_per_token(model) == pytest.approx(expected, rel=2e-3)
    untied = replace(model, tied_embeddings=False)
    assert flops_per_token(untied) == flops_per_token(model)


def test_each_stage_has_its_largest_memory_and_mean_times() -> None:
    plan = lower(build_schedule("interleaved_1f1b", 2, 2, 2))
    rows = [[1.0, 0.2, 0.3], [3.0, 0.4, 0.5], [2.0, 0.1, 0.1], [1.5, 0.3, 0.1]]
    found = by_stage(plan, [0, 0, 1, 1], rows)
    assert found.pop("memory_gb/peak") == 3.0 and found.pop("memory_gb/peak_rank") == 1.0
    expected = {
        "memory_gb/stage_0_2": 3.0,
        "memory_gb/stage_1_3": 2.0,
        "busy/stage_0": 0.3,
        "busy/stage_2": 0.4,
        "bubble/stage_0_2": 0.3,
        "busy/stage_1": 0.2,
        "busy/stage_3": 0.1,
        "bubble/stage_1_3": 0.7,
    }
    assert found == pytest.approx(expected)
    untraced = by_stage(plan, [0, 1], [[1.0, -1.0, -1.0], [2.0, -1.0, -1.0]])
    assert set(untraced) == {
        "memory_gb/peak",
        "memory_gb/peak_rank",
        "memory_gb/stage_0_2",
        "memory_gb/stage_1_3",
    }


def watch(transport: Transport) -> list[dict[str, float]]:
    """Figures of steps 9 to 11; rank 1 has once had 300 MB more."""
    mesh = Mesh.create(MeshShape(pp=2), transport)
    cfg, plan = config(GPT2, pp=2), lower(build_schedule("1f1b", 2, 2, 1))
    trace = Trace(most=100)
    figures = Figures(cfg, mesh, plan, trace)
    if mesh.rank == 1:
        bytearray(300_000_000).clear()
    for step in (1, 2, 3):
        with trace.step(step):
            now = time.monotonic()
            trace.add(Span("compute", "F", now, now, "F", mesh.rank, 0))
    found: list[dict[str, Any]] = []
    for step in (EVERY - 1, EVERY, EVERY + 1):
        figures.gather(step)
        found.append(figures.of_step(step, 100.0))
    mesh.close()
    return found


def test_memory_is_the_largest_of_any_rank_and_names_it() -> None:
    for before, at, after in run_ranks(2, watch):
        assert before == after == {}, "once in a while, and on a CPU there is no mfu"
        assert at["memory_gb/peak_rank"] == 1.0
        assert at["memory_gb/peak"] == at["memory_gb/stage_1"]
        assert at["memory_gb/stage_1"] > at["memory_gb/stage_0"] + 0.2
        assert at["busy/stage_0"] == at["busy/stage_1"] == 0.0
        assert at["bubble/stage_0"] == 1.0
