"""Directions that Narayanan et al. 2021 (arXiv:2104.04473) measured; none was fitted to."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.planner.rows import predict

MEGATRON = {
    "gpu": "A100",
    "gpu_mem_gb": "80",
    "seq": "2048",
    "vocab": "51200",
    "vpp": "1",
    "recompute": "full",
    "seq_par": "0",
    "zero": "0",
    "schedule": "1f1b",
    "attn": "fused-softmax",
    "framework": "Megatron-LM 2021",
    "cluster": "selene",
}


def step(**changes: Any) -> float:
    return predict({**MEGATRON, **{k: str(v) for k, v in changes.items()}}).iter_time_s


@pytest.mark.parametrize("batch", [32, pytest.param(128, marks=pytest.mark.full)])
def test_tp_of_a_node_is_best_and_both_extremes_are_worse(batch: int) -> None:  # figure 13
    shape = {"layers": 32, "hidden": 20480, "heads": 128, "gpus": 64, "mbs": 1, "gbs": batch}
    times = {tp: step(**shape, tp=tp, pp=64 // tp) for tp in (2, 4, 8, 16, 32)}
    assert min(times, key=lambda tp: times[tp]) == 8
    assert min(times[2], times[32]) > 1.1 * times[8]


@pytest.mark.parametrize("batch", [32, pytest.param(512, marks=pytest.mark.full)])
def test_more_pp_or_more_tp_of_a_small_model_is_slower(batch: int) -> None:  # figures 14 and 15
    shape = {"layers": 32, "hidden": 3840, "heads": 32, "gpus": 64, "mbs": 1, "gbs": batch}
    by_pp = [step(**shape, tp=1, pp=pp) for pp in (2, 4, 8, 16, 32)]
    by_tp = [step(**shape, tp=tp, pp=1) for tp in (2, 4, 8, 16, 32)]
    assert by_pp == sorted(by_pp)
    assert by_tp == sorted(by_tp)
    assert by_tp[-1] / by_tp[-2] > 1.5  # beyond a node


@pytest.mark.full
def test_interleaving_gains_least_in_a_large_batch() -> None:  # figure 12
    shape = {"layers": 96, "hidden": 12288, "heads": 96, "gpus": 96, "tp": 8, "pp": 12, "mbs": 1}
    gains = [
        step(**shape, gbs=b) / step(**shape, gbs=b, vpp=4, schedule="1f1b-interleaved")
        for b in (12, 24, 60)
    ]
    assert gains == sorted(gains, reverse=True)
    assert gains[1] > 1.10 and gains[2] > 1.05
