"""The cross-entropy of a cut vocabulary against the dense one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megalite.mesh import Axis, Transport
from megalite.tensor_parallel.cross_entropy import IGNORE, vocab_parallel_cross_entropy
from tests.ranks import run_ranks
from tests.tensor_parallel.dense import Differences, drawn, grad, meshes

V, S, B = 16, 4, 3

# Targets of 12 tokens: each quarter of the vocabulary in turn, one quarter without any, some or
# all ignored.
TARGETS = {
    "shard 0": [0, 1, 2, 3] * 3,
    "shard 1": [4, 5, 6, 7] * 3,
    "shard 2": [8, 9, 10, 11] * 3,
    "shard 3": [12, 13, 14, 15] * 3,
    "everywhere": [0, 5, 10, 15, 3, 4, 7, 8, 11, 12, 1, 14],
    "none on shard 2": [0, 5, 15, 3, 4, 7, 12, 1, 14, 13, 6, 2],
    "some ignored": [0, IGNORE, 10, 15, IGNORE, 4, 7, 8, 11, IGNORE, 1, 14],
    "all ignored": [IGNORE] * 12,
}


def targets_of(name: str) -> Tensor:
    return torch.tensor(TARGETS[name]).view(S, B)


def dense(whole: Tensor, targets: Tensor) -> Tensor:
    flat = cross_entropy(
        whole.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none"
    )
    return flat.view(S, B)


def compare(tp: Axis, name: str, scale: float, vocab: int, stretch: float) -> Differences:
    """Loss and gradient where the last of ``V`` columns, from ``vocab`` on, are padding."""
    found, targets = Differences(), targets_of(name)
    whole = (drawn(name, S, B, vocab) * scale).requires_grad_()
    weights = drawn("d loss", S, B) * stretch
    expected = dense(whole, targets)
    expected.backward(weights)
    padded = torch.full((S, B, V), 1e4, dtype=torch.float64)
    padded[..., :vocab] = whole.detach()
    width = V // tp.size
    mine = slice(tp.index * width, (tp.index + 1) * width)
    logits = padded[..., mine].clone().requires_grad_()
    valid = min(max(vocab - tp.index * width, 0), width)
    losses = vocab_parallel_cross_entropy(logits, targets, tp, valid)
    losses.backward(weights)
    gradient = torch.zeros(S, B, V, dtype=torch.float64)
    gradient[..., :vocab] = grad(whole)
    found.add("loss", losses, expected)
    found.add("d logits", grad(logits), gradient[..., mine])
    found["finite"] = float(not bool(losses.isfinite().all() and grad(logits).isfinite().all()))
    return found


def in_bf16(tp: Axis) -> tuple[torch.dtype, torch.dtype, float]:
    """Dtype of losses and of gradients for bf16 logits; largest difference from fp32's losses."""
    width = V // tp.size
    mine = slice(tp.index * width, (tp.index + 1) * width)
    narrow = drawn("bf16", S, B, V).bfloat16()
    logits = narrow[..., mine].clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(logits, targets_of("everywhere"), tp)
    losses.sum().backward()
    off = losses.detach() - dense(narrow.float(), targets_of("everywhere"))
    return losses.dtype, grad(logits).dtype, float(off.abs().max())


Measured = dict[tuple[int, str], Differences]
Narrow = dict[int, tuple[torch.dtype, torch.dtype, float]]


def measure(transport: Transport | None) -> tuple[Measured, Narrow]:
    found, narrow = Measured(), Narrow()
    made = meshes(transport)
    for mesh in made:
        for name in TARGETS:
            found[mesh.tp.size, name] = compare(mesh.tp, name, 3.0, V, 1.0)
        # 9 and 11 columns exist: on 4 ranks one is all padding, one in part.
        unreal = [t for t in TARGETS if max(TARGETS[t]) < 9]
        assert len(unreal) >= 3
        for vocab in (9, 11):
            for name in unreal:
                key = f"{name}, {vocab} columns"
                found[mesh.tp.size, key] = compare(mesh.tp, name, 3.0, vocab, 2.5)
        # exp of such logits is not finite by itself.
        found[mesh.tp.size, "large"] = compare(mesh.tp, "some ignored", 1e3, V, 1.0)
        narrow[mesh.tp.size] = in_bf16(mesh.tp)
    for mesh in made:
        mesh.close()
    return found, narrow


@pytest.fixture(scope="module")
def measured() -> list[tuple[Measured, Narrow]]:
    return [measure(None), *run_ranks(4, measure)]


def test_loss_and_gradient_are_those_of_the_dense_formula(
    measured: list[tuple[Measured, Narrow]],
) -> None:
    seen = {}
    for found, _ in measured:
        for (tp, name), differences in found.items():
            seen[tp, name] = differences
            for what, size in differences.items():
                bound = 1e-10 if name == "large" else 1e-12
                assert size <= bound, f"tp {tp}, {name}: {what} differs by {size:.1e}"
    assert {tp for tp, _ in seen} == {1, 2, 4}
    assert len(seen) == 3 * (len(TARGETS) + 2 * 3 + 1)


def test_bf16_logits_have_fp32_losses_and_bf16_gradients(
    measured: list[tuple[Measured, Narrow]],
) -> None:
    for _, narrow in measured:
        for dtype, grad_dtype, off in narrow.values():
            assert dtype is torch.float32
            assert grad_dtype is torch.bfloat16
            assert off < 1e-6


def test_an_ignored_token_has_no_loss_and_no_gradient() -> None:
    logits = drawn("one", 2, V).requires_grad_()
    losses = vocab_parallel_cross_entropy(logits, torch.tensor([3, IGNORE]), Axis("tp"))
    losses.sum().backward()
    assert bool(losses[0] > 0)
    assert bool(losses[1] == 0)
    assert bool(grad(logits)[0].any())
    assert not grad(logits)[1].any()


def test_padding_is_no_part_of_the_softmax() -> None:
    logits = torch.zeros(1, V, dtype=torch.float64)
    target = torch.tensor([0])
    for valid in (V, 10, 1):
        loss = vocab_parallel_cross_entropy(logits, target, Axis("tp"), valid)
        assert float(loss) == pytest.approx(math.log(valid), abs=1e-14)


def test_a_second_backward_is_refused_and_not_wrong() -> None:
    logits = drawn("twice", 2, V).requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([3, 4]), Axis("tp")).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        loss.backward()


def test_shapes_that_do_not_fit_are_named() -> None:
    # As users call it: without the tests' own check of shapes around it.
    plain = vocab_parallel_cross_entropy.__wrapped__  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"\(2, 3, 16\) do not fit targets \(3, 2\)"):
        plain(torch.zeros(2, 3, V), torch.zeros(3, 2, dtype=torch.long), Axis("tp"))
