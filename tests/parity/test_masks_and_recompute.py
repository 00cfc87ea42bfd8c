"""What depends on samples, and what is computed twice, in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalite.mesh import Mesh
from model.config import GPTConfig
from tests.parity.groups import TOLERANCE
from tests.parity.harness import GPT2, LLAMA, TRAIN, config, differences, join, serial, train


@pytest.mark.parametrize("base", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_each_of_them_changes_what_is_learned_or_nothing(base: GPTConfig) -> None:
    plain, dropped = serial(base), serial(replace(base, dropout=0.1))
    reset, loose = serial(base, TRAIN, True), config(base)
    assert dropped.losses[0] != plain.losses[0]
    again = join([train(replace(loose, parallel=config(recompute="full").parallel), Mesh.single())])
    assert again.losses == plain.losses
    assert all(torch.equal(again.weights[n], t) for n, t in plain.weights.items())
    assert reset.losses[0] != plain.losses[0]


@pytest.mark.parametrize("micro_batch_size", [1, 3, 6, 4])
def test_the_size_of_a_microbatch_changes_no_mask(micro_batch_size: int) -> None:
    model = replace(GPT2, dropout=0.3)
    cut = replace(TRAIN, micro_batch_size=micro_batch_size)
    seen = differences(serial(model, cut), serial(model))
    for what, (size, where) in seen.items():
        assert size <= TOLERANCE[what], f"{what} differs by {size:.1e} at {where}"
