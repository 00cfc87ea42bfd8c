from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.planner.constants import MEGALITE, Framework, load_constants, load_stacks
from megalite.planner.cost import LayerCosts, Split
from megalite.planner.hardware import find_hardware
from megalite.planner.kernels import Kernels
from megalite.planner.shape import ModelShape

A100 = Kernels(find_hardware("a100-80"), load_constants())
LARGE = ModelShape(48, 6144, 64, 2048, 51200, dropout=True, fused_attention=False)
MEGATRON = load_stacks().framework("Megatron-LM 2022")
# Korthikanti et al. 2022 (arXiv:2205.05198), table 4: forward and backward of a layer in ms
TABLE_4 = {
    (False, "none"): (7.7, 11.9),
    (True, "none"): (7.2, 11.8),
    (False, "full"): (7.7, 19.5),
    (False, "selective"): (7.7, 13.2),
    (True, "selective"): (7.2, 13.1),
}


def layer(split: Split, framework: Framework = MEGATRON, shape: ModelShape = LARGE) -> tuple:
    passes = LayerCosts(shape, split, 4, A100, framework).layer()
    return 1000 * passes.forward, 1000 * (passes.input_grad + passes.weight_grad)


@pytest.mark.parametrize(("split", "published"), TABLE_4.items())
def test_a_layers_times_are_those_of_table_4(
    split: tuple[bool, str], published: tuple[float, float]
) -> None:
    found = layer(Split(8, *split))
    assert found == pytest.approx(published, rel=0.08)
    assert sum(found) == pytest.approx(sum(published), rel=0.05)


def test_what_is_not_fused_or_not_hidden_takes_longer() -> None:
    split = Split(8)
    assert sum(layer(split, replace(MEGATRON, fused_sum=False))) > sum(layer(split))
    assert sum(layer(split, replace(MEGATRON, overlap_tp=False))) > sum(layer(split))
    fused = replace(LARGE, fused_attention=True, dropout=False)
    assert sum(layer(split, MEGALITE, fused)) < 0.9 * sum(layer(split, MEGALITE, LARGE))


def test_products_are_quantised_in_tiles_and_waves() -> None:
    one_wave = A100.gemm(256 * 12, 128 * 9, 4096)  # 108 tiles on 108 processors
    assert A100.gemm(256 * 12 - 100, 128 * 9 - 60, 4096) == one_wave
    assert A100.gemm(256 * 13, 128 * 9, 4096) > 1.2 * one_wave
    plain = Kernels(replace(A100.hw, processors=1), A100.c)
    assert plain.gemm(256 * 13, 128 * 9, 4096) < 1.1 * plain.gemm(256 * 12, 128 * 9, 4096)


def test_short_products_and_narrow_results_are_slow() -> None:
    def rate(m: int, n: int, k: int) -> float:
        return 2 * m * n * k / A100.gemm(m, n, k)

    assert rate(8192, 8192, 8192) > 0.7 * A100.hw.peak_flops
    assert rate(8192, 8192, 128) < 0.5 * rate(8192, 8192, 8192)
    assert rate(256, 256, 256) < 0.1 * rate(8192, 8192, 8192)
    assert A100.gemm(4096, 8, 65536) < 2 * A100.gemm(4096, 64, 65536)  # k is split


def test_memory_bound_layers_take_as_long_as_their_bytes() -> None:
    assert A100.stream(2e9) == pytest.approx(2 * A100.stream(1e9), rel=0.02)
    assert A100.stream(1e9) > 1e9 / A100.hw.hbm_bytes_s


def test_collectives_grow_with_bytes_ranks_and_distance() -> None:
    assert A100.all_reduce(1e8, 1) == 0
    assert A100.all_reduce(1e8, 8) > A100.all_reduce(1e8, 2)
    assert A100.all_gather(1e8, 8) == pytest.approx(A100.all_reduce(1e8, 8) / 2)
    assert A100.all_reduce(1e8, 16) > 1.2 * A100.all_reduce(1e8, 8)
    near, far = A100.all_reduce(1e8, 8), A100.all_reduce(1e8, 8, stride=8)
    assert far > 5 * near
    assert A100.message(1e8, far=True) > A100.message(1e8, far=False)


def test_all_reduces_inside_a_node_are_those_measured() -> None:
    # vTrain's NCCL trace on A100: bytes, ranks, microseconds
    for size, ranks, measured in (
        (1 << 20, 2, 44.21),
        (1 << 26, 2, 404.7),
        (1 << 26, 8, 579.9),
        (1 << 30, 4, 7259.4),
        (1 << 30, 8, 8193.0),
    ):
        assert 1e6 * A100.all_reduce(size, ranks) == pytest.approx(measured, rel=0.17)


def test_a_small_model_is_bound_by_its_host() -> None:
    small = replace(LARGE, hidden=512, heads=8)
    passes = LayerCosts(small, Split(), 1, A100, MEGATRON).layer()
    assert passes.host_backward > passes.input_grad + passes.weight_grad
    passes = LayerCosts(LARGE, Split(), 1, A100, MEGATRON).layer()
    assert passes.host_backward < passes.input_grad + passes.weight_grad


def test_grouped_heads_make_the_products_narrower() -> None:
    whole = ModelShape(32, 4096, 32, 4096, 32000)
    grouped = replace(whole, kv_heads=8)
    assert sum(layer(Split(), MEGALITE, grouped)) < sum(layer(Split(), MEGALITE, whole))


def test_model_flops_are_those_of_the_paper() -> None:
    s, h, layers, v, b = 2048, 12288, 96, 51200, 1536
    shape = ModelShape(layers, h, 96, s, v)
    paper = 72 * b * layers * s * h * h * (1 + s / (6 * h) + v / (12 * h * layers))
    assert shape.model_flops(b) == pytest.approx(paper)
