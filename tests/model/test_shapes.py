from __future__ import annotations

import pytest
import torch
from jaxtyping import TypeCheckError

from megalite.mesh import Axis
from megalite.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tests.ranks import run_ranks


def wrong_shape(_: int) -> str:
    logits, targets = torch.randn(2, 3, 8), torch.zeros(2, 3, dtype=torch.int32)
    try:
        vocab_parallel_cross_entropy(logits, targets, Axis("tp"))
    except TypeCheckError:
        return "checked"
    return "unseen"


def test_stated_shapes_and_types_are_checked_here_and_in_forked_ranks() -> None:
    assert wrong_shape(0) == "checked"
    assert run_ranks(1, wrong_shape, transport="none") == ["checked"]
    with pytest.raises(TypeCheckError):
        targets = torch.zeros(3, 2, dtype=torch.int64)
        vocab_parallel_cross_entropy(torch.randn(2, 3, 8), targets, Axis("tp"))
