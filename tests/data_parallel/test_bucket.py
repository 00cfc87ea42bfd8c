"""Parameters and gradients in flat memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megalite.data_parallel import bucket as bucket_module
from megalite.data_parallel.bucket import Bucket, FlatParameters
from megalite.grads import GradSink, main_grad
from megalite.slices import Slice, get_slice, set_slice
from model.config import GPTConfig
from tests.grid import hold
from tests.parity.harness import GPT2, LLAMA, config


def param(
    name: str, *shape: int, dtype: torch.dtype = torch.float32, **more: object
) -> nn.Parameter:
    draw = torch.Generator().manual_seed(sum(map(ord, name)))
    value = torch.randn(shape, generator=draw).to(dtype)
    piece = Slice(name, shape, (0,) * len(shape), shape, **more)  # type: ignore[arg-type]
    return set_slice(nn.Parameter(value), piece)


def names(bucket: Bucket) -> list[str]:
    return [get_slice(p).name for p in bucket.params]


def test_parameters_move_into_the_buffer_with_their_values() -> None:
    params = [param("a", 3, 2, dtype=torch.bfloat16), param("b", 5, dtype=torch.bfloat16)]
    before = [p.detach().clone() for p in params]
    bucket = Bucket(0, "", False, True, params)
    for p, old, (same, view) in zip(params, before, bucket.views(bucket.weight), strict=True):
        assert same is p
        assert torch.equal(p.detach(), old)
        assert p.data_ptr() == view.data_ptr()
        assert p.untyped_storage().data_ptr() == bucket.weight.untyped_storage().data_ptr()
    bucket.weight.fill_(2.0)
    assert bool((params[1] == 2).all())
    assert bucket.grad.dtype is torch.float32
    GradSink().add(params[1], torch.ones(5))
    assert bucket.grad[:11].tolist() == [0.0] * 6 + [1.0] * 5
    assert main_grad(params[0]).shape == (3, 2)


def test_the_order_is_that_of_a_backward_pass_and_the_kinds_are_apart() -> None:
    first = [param("w0", 4, decay=True), param("n0", 4), param("p0", 4, partial=True)]
    second = [param("w1", 4, decay=True), param("r1", 4, replica=1), param("t1", 4, tied="copy")]
    flat = FlatParameters({0: first, 3: second})
    found = {(b.stage, b.late, b.decay, b.counted): names(b) for b in flat.buckets}
    assert found == {
        (3, "tied", False, False): ["t1"],
        (3, "", False, False): ["r1"],
        (3, "", True, True): ["w1"],
        (0, "partial", False, True): ["p0"],
        (0, "", False, True): ["n0"],
        (0, "", True, True): ["w0"],
    }
    assert [names(b)[0] for b in flat.buckets] == ["t1", "r1", "w1", "p0", "n0", "w0"]
    assert flat.num_elements == 24


def test_a_bucket_is_closed_when_it_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "_SMALLEST", 10)
    flat = FlatParameters({0: [param(str(n), 4) for n in range(8)]})
    assert [names(b) for b in flat.buckets] == [["7", "6", "5"], ["4", "3", "2"], ["1", "0"]]
    monkeypatch.setattr(bucket_module, "_LARGEST", 4)
    flat = FlatParameters({0: [param(str(n), 4) for n in range(8)]})
    assert [names(b) for b in flat.buckets] == [[str(n)] for n in reversed(range(8))]


def test_a_parameter_of_two_stages_is_held_once_by_the_first() -> None:
    shared = param("e", 4, tied="shared")
    flat = FlatParameters({0: [shared, param("a", 2)], 1: [param("b", 2), shared]})
    assert flat.num_elements == 8
    (holder,) = [b for b in flat.buckets if "e" in names(b)]
    assert (holder.stage, holder.late) == (0, "shared")
    assert flat.bucket_of[id(shared)] is holder


@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_every_parameter_of_a_model_is_in_one_bucket(
    model: GPTConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "_SMALLEST", 1000)
    for rank in hold(config(model, tp=4, pp=2, sequence_parallel=True), 8):
        held = [p for module in rank.gpt.values() for p in module.parameters()]
        assert sorted(map(id, held)) == sorted(map(id, rank.flat.parameters()))
        pointers = {p.untyped_storage().data_ptr() for p in held}
        assert pointers == {b.weight.untyped_storage().data_ptr() for b in rank.flat.buckets}
        assert rank.flat.num_elements == sum(p.numel() for p in held)


def adamw(values: Tensor, grads: Tensor) -> Tensor:
    """Twenty updates of a tensor of its own."""
    values = values.clone()
    optimizer = torch.optim.AdamW([values], lr=1e-3, fused=True)
    for n in range(20):
        values.grad = grads * (1.0 - 0.1 * n)
        optimizer.step()
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_update_does_not_depend_on_the_place_in_a_bucket(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    values, grads = torch.randn(2, 960, generator=draw, dtype=torch.float64).to(dtype)
    expected = adamw(values, grads)
    for start, size in ((0, 15), (7, 1), (33, 100), (500, 460)):
        mine = set_slice(
            nn.Parameter(values[start : start + size].clone()), Slice("x", (size,), (0,), (size,))
        )
        bucket = Bucket(0, "", True, True, [mine])
        flat_grad = torch.zeros_like(bucket.grad)
        flat_grad[:size] = grads[start : start + size]
        got = adamw(bucket.weight, flat_grad)
        assert torch.equal(got[:size], expected[start : start + size])
        assert not got[size:].any(), "what fills a bucket up stays zero"
    # Without the fill, the ends of the buffers round otherwise.
    parts = [adamw(v, g) for v, g in zip(values.split(15), grads.split(15), strict=True)]
    assert not torch.equal(torch.cat(parts), expected)


def test_pieces_know_their_place_and_their_owner() -> None:
    for rank in hold(config(GPT2, tp=2, pp=2), 4):
        for bucket in rank.flat.buckets:
            for piece, held in zip(bucket.pieces(bucket.weight), bucket.params, strict=True):
                at = get_slice(held)
                assert (piece.name, piece.shape, piece.offset) == (at.name, at.shape, at.offset)
                assert piece.tensor.shape == at.extent
                assert piece.tensor.data_ptr() == held.data_ptr()
                assert piece.owner is bucket.counted
