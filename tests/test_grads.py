"""The sums that gradients are added to, and what is told when."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megalite.grads import GradSink, WeightProduct, main_grad


def param(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    draw = torch.Generator().manual_seed(sum(shape))
    return nn.Parameter(torch.randn(shape, generator=draw).to(dtype))


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_the_sum_is_at_least_fp32_and_stays_the_same_memory(
    dtype: torch.dtype, wide: torch.dtype
) -> None:
    p = param(3, 2, dtype=dtype)
    total = main_grad(p)
    assert total.dtype is wide
    assert total.shape == p.shape
    assert not total.any()
    GradSink().add(p, torch.ones_like(p))
    assert main_grad(p) is total
    assert bool((total == 1).all())
    assert p.grad is None


def test_small_gradients_are_not_lost_in_a_bf16_model() -> None:
    p = param(1, dtype=torch.bfloat16)
    sink = GradSink()
    sink.add(p, torch.ones(1, dtype=torch.bfloat16))
    for _ in range(8):
        sink.add(p, torch.full((1,), 1 / 512, dtype=torch.bfloat16))
    assert float(main_grad(p)) == 1 + 8 / 512
    # A sum in the model's own dtype loses all eight.
    narrow = torch.ones(1, dtype=torch.bfloat16)
    for _ in range(8):
        narrow += torch.full((1,), 1 / 512, dtype=torch.bfloat16)
    assert float(narrow) == 1.0


def test_rows_are_added_also_where_an_index_stands_twice() -> None:
    p = param(5, 2, dtype=torch.bfloat16)
    index, rows = torch.tensor([3, 0, 3, 3]), drawn(4, 2, dtype=torch.bfloat16)
    sink = GradSink()
    sink.add_rows(p, index, rows)
    expected = torch.zeros(5, 2)
    for i, row in zip(index, rows, strict=True):
        expected[i] += row
    torch.testing.assert_close(main_grad(p), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_weight_product_is_that_of_autograd(dtype: torch.dtype) -> None:
    x = drawn(6, 4, dtype=dtype)
    weights = param(3, 4, dtype=dtype), param(2, 4, dtype=dtype)
    dys = drawn(6, 3, seed=1, dtype=dtype), drawn(6, 2, seed=2, dtype=dtype)
    product = WeightProduct(weights, dys, x)
    product.run(GradSink())
    product.run(GradSink())
    for weight, dy in zip(weights, dys, strict=True):
        (expected,) = torch.autograd.grad(nn.functional.linear(x, weight), weight, dy)
        got = main_grad(weight)
        torch.testing.assert_close(got, 2 * expected.to(got.dtype), rtol=1e-2, atol=1e-2)
        if dtype is not torch.bfloat16:
            torch.testing.assert_close(got, 2 * expected)


def test_a_product_is_put_off_only_while_there_is_a_queue() -> None:
    p, told = param(2, 3), list[Tensor]()
    sink = GradSink(told.append)
    product = WeightProduct((p,), (drawn(4, 2),), drawn(4, 3))
    sink.queue = []
    sink.add_product(product)
    assert sink.queue == [product]
    assert not told
    assert not main_grad(p).any()
    sink.queue = None
    sink.add_product(product)
    assert main_grad(p).any()
    assert len(told) == 1
    assert told[0] is p


def test_every_way_tells_of_each_gradient_once() -> None:
    told: list[Tensor] = []
    sink = GradSink(told.append)
    a, b, c = param(2), param(4, 2), sink.watch(param(2))
    sink.add(a, torch.ones(2))
    sink.add_rows(b, torch.tensor([1]), torch.ones(1, 2))
    (c * 2).sum().backward()
    (c * 3).sum().backward()
    assert [id(p) for p in told] == [id(p) for p in (a, b, c, c)]


def test_a_watched_parameter_keeps_no_grad_of_its_own() -> None:
    sink = GradSink()
    p = sink.watch(param(3, dtype=torch.bfloat16))
    for _ in range(2):
        # Two uses in one graph are one gradient.
        (p * 2 + p * 3).sum().backward()
        assert p.grad is None
    assert torch.equal(main_grad(p), torch.full((3,), 10.0))
