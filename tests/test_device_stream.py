from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.device_stream import Device, HostReadError


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device()
    yield device
    device.stream.close()


class GradientIntoBuffer(torch.autograd.Function):
    """A linear that adds its weight gradient to an fp32 sum itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.total = total
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        ctx.total.addmm_(dy.flatten(0, 1).t().float(), x.flatten(0, 1).float())
        return dy @ weight, None, None


class Block(nn.Module):
    """Embedding, attention, a layer with its own gradient sum, and a loss."""

    def __init__(self, d: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, d)
        self.embedding.weight.data.mul_(0.1)
        self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Parameter(torch.randn(d, 4 * d) * 0.02)
        self.total = torch.zeros(d, 4 * d)
        self.to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        q, k, v = (
            t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        hidden = F.gelu(self.up(x))
        x = x + GradientIntoBuffer.apply(hidden, self.down, self.total)
        x = torch.zeros_like(x).index_add(1, torch.arange(ids.shape[1]), x)
        logits = x.flatten(0, 1).float() @ self.embedding.weight.float().t()
        return F.cross_entropy(logits, ids.flatten().roll(1))


def train(dtype: torch.dtype, steps: int = 3) -> Callable[[], list[Tensor]]:
    """A run of a few steps, ready to be called; it gives its losses and final weights."""
    torch.manual_seed(0)
    model = Block(32, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    ids = torch.randint(0, 50, (2, 16))

    def run() -> list[Tensor]:
        losses = []
        for _ in range(steps):
            loss = model(ids)
            loss.backward()
            model.down.grad = model.total.to(dtype)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            model.total.zero_()
            losses.append(loss.detach())
        return losses + [p.detach() for p in model.parameters()]

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_training_behind_the_hosts_back_gives_the_same_bits(
    device: Device, dtype: torch.dtype
) -> None:
    expected = train(dtype)()
    run = train(dtype)
    with device.rules():
        got = run()
    assert expected[0] > expected[2] > 0.1
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_the_host_runs_ahead_of_forward_backward_and_optimizer(device: Device) -> None:
    run, gate = train(torch.float32), threading.Event()
    behind = torch.zeros(1)
    with device.rules():
        device.stream.put("a gate", gate.wait)
        behind += 1
        run()
        # The host is through, and the device has not even begun.
        with torch.utils._python_dispatch._disable_current_modes():
            assert bytes(behind.untyped_storage()) == bytes(4)
        gate.set()
    assert behind.item() == 1.0


def test_views_of_what_is_still_to_come_have_their_shape_and_later_their_values(
    device: Device,
) -> None:
    x, gate = torch.arange(12.0).view(3, 4), threading.Event()
    with device.rules():
        device.stream.put("a gate", gate.wait)
        y = (x * 2).t()[1:, ::2]
        z = y.contiguous()
        assert (y.shape, y.stride(), z.stride()) == ((3, 2), (1, 8), (2, 1))
        gate.set()
    assert torch.equal(y, (x * 2).t()[1:, ::2]) and torch.equal(y, z)


def test_memory_is_not_what_it_was(device: Device) -> None:
    with device.rules():
        fresh = torch.empty(4)
    assert fresh.isnan().all()


X = torch.tensor([1.0, -1.0, 2.0])
READS: dict[str, Callable[[], object]] = {
    "item": lambda: X.sum().item(),
    "bool": lambda: bool(X.sum() > 0),
    "format": lambda: f"{X.sum():.2f}",
    "repr": lambda: repr(X),
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "cpu": lambda: X.cpu(),
    "nonzero": lambda: X.nonzero(),
    "where": lambda: torch.where(X > 0),
    "mask": lambda: X[X > 0],
    "assignment by mask": lambda: X.clone().__setitem__(X > 0, X[:2].clone()),
    "masked_select": lambda: X.masked_select(X > 0),
    "unique": lambda: torch.unique(X),
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "range": lambda: list(range(X.long().sum())),
    "repeat_interleave": lambda: torch.repeat_interleave(torch.tensor([1, 2])),
    "one_hot": lambda: F.one_hot(torch.tensor([1, 2])),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_a_host_read_raises_unless_it_is_allowed(
    device: Device, read: Callable[[], object]
) -> None:
    with pytest.raises(HostReadError, match="needs a value on the host"), device.rules():
        read()
    with device.rules(), device.host_reads_allowed():
        read()


def test_an_allowed_read_sees_all_that_was_queued_before_it(device: Device) -> None:
    x, gate = torch.ones(2), threading.Event()
    with device.rules():
        device.stream.put("a gate", gate.wait)
        x.mul_(3.0)
        threading.Timer(0.01, gate.set).start()
        with device.host_reads_allowed():
            assert x.tolist() == [3.0, 3.0]


def test_reads_are_counted(device: Device) -> None:
    with device.rules(host_reads=1):
        X.sum().item()
        with pytest.raises(HostReadError):
            X.sum().item()


def test_what_cuda_does_without_waiting_raises_nothing(device: Device) -> None:
    x = X.clone()
    with device.rules():
        x[x > 1.5] = 0.0
        x.masked_fill_(x < -0.5, 5.0)
        y = x[torch.tensor([0, 1])]
        F.dropout(x, 0.5)
        x.to(torch.bfloat16).sum().to("cpu")
    assert x.tolist() == [1.0, 5.0, 0.0] and y.tolist() == [1.0, 5.0]


def test_random_numbers_are_drawn_in_the_order_of_the_stream(device: Device) -> None:
    def draw() -> list[Tensor]:
        x = torch.zeros(4)
        return [x.normal_(), torch.randn(3), F.dropout(torch.ones(8), 0.5), torch.rand_like(x)]

    torch.manual_seed(1)
    expected = [t.clone() for t in draw()]
    torch.manual_seed(1)
    with device.rules():
        got = draw()
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_an_error_of_the_device_reaches_the_host() -> None:
    device = Device()
    with pytest.raises(IndexError, match="out of range"), device.rules():
        F.embedding(torch.tensor([7]), torch.zeros(3, 2))
    device.stream.close()
