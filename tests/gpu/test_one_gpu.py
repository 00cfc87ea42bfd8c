"""What one GPU can show: the numbers of the CPU, NCCL, fused kernels, and no wait in a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from launch.build import Training, build
from launch.config import Config
from megalite.mesh import Mesh, TorchTransport
from megalite.pipeline.executor import Batch
from tests.parity.harness import GPT2, LLAMA, TRAIN, assemble, batch_of, config, parts, worst

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no GPU on this machine"
)
CUDA = torch.device("cuda", 0)
WIDE = replace(GPT2, hidden_size=256, seq_length=256, vocab_size=512, num_heads=4)


def on(device: torch.device, cfg: Config) -> Training:
    return build(cfg, Mesh.single(device))


def batch(cfg: Config, step: int, device: torch.device) -> Batch:
    made = batch_of(cfg, step, 0, 1)
    assert made.targets is not None
    moved = Batch(made.tokens.to(device), made.targets.to(device), None, step)
    if made.samples is not None:
        moved.samples = made.samples.to(device)
    return moved


def gradients(cfg: Config, device: torch.device) -> dict[str, torch.Tensor]:
    training = on(device, cfg)
    training.gradients(batch(cfg, 0, device))
    return {n: t.cpu() for n, t in assemble([parts(training.flat.grad_pieces())]).items()}


@pytest.mark.parametrize("dtype,tolerance", [("fp64", 1e-10), ("fp32", 1e-4)])
@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_gradients_are_those_of_the_cpu(
    model: Any, dropout: float, dtype: str, tolerance: float
) -> None:
    cfg = config(replace(model, dropout=dropout), train=replace(TRAIN, dtype=dtype))
    got, expected = gradients(cfg, CUDA), gradients(cfg, torch.device("cpu"))
    size, where = worst(got, expected)
    assert size < tolerance, f"{where} differs by {size:.1e}"


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_step_does_not_wait_for_the_device(dtype: str) -> None:
    cfg = config(WIDE, train=replace(TRAIN, dtype=dtype))
    training = on(CUDA, cfg)
    batches = [batch(cfg, step, CUDA) for step in range(4)]
    for made in batches[:2]:
        training.step(made, 1e-3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for made in batches[2:]:
            training.step(made, 1e-3)
        with pytest.raises(RuntimeError):
            torch.ones(1, device=CUDA).item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bf16_uses_flash_attention_and_learns() -> None:
    cfg = config(WIDE, train=replace(TRAIN, dtype="bf16", global_batch_size=4))
    training, data = on(CUDA, cfg), batch(config(WIDE), 0, CUDA)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        first = float(training.step(data, 1e-2).loss)
    kernels = " ".join(event.key for event in seen.key_averages())
    assert "flash" in kernels or "cudnn" in kernels, kernels
    for _ in range(20):
        last = float(training.step(data, 1e-2).loss)
    assert last < 0.7 * first


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    cfg = config(GPT2, train=replace(TRAIN, bad_step="skip"))
    training = on(CUDA, cfg)
    training.step(batch(cfg, 0, CUDA), 1e-2)
    before = [b.weight.clone() for b in training.flat.buckets]
    totals = training.gradients(batch(cfg, 1, CUDA))
    training.flat.buckets[0].grad[0] = torch.inf
    training.optimizer.step(1e-2, totals.factor, torch.zeros_like(totals.finite))
    assert all(map(torch.equal, before, [b.weight for b in training.flat.buckets]))


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recompute_gives_the_same_bits(mode: str) -> None:
    model = replace(WIDE, dropout=0.1)
    train = replace(TRAIN, dtype="bf16", deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        once = gradients(config(model, train=train), CUDA)
        again = gradients(config(model, train=train, recompute=mode), CUDA)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(again[name], grad) for name, grad in once.items())


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[TorchTransport]:
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=CUDA)
    yield TorchTransport(CUDA, 60.0)
    dist.destroy_process_group()


def test_groups_of_nccl_do_what_the_mesh_asks_of_them(nccl: TorchTransport) -> None:
    group = nccl.new_group([0])
    assert group is not None
    x = torch.arange(6.0, device=CUDA)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        y, out = x.to(dtype), torch.zeros(6, dtype=dtype, device=CUDA)
        group.all_reduce(y).wait()
        group.all_reduce(y, "max").wait()
        group.all_gather(out, y).wait()
        assert torch.equal(out, x.to(dtype))
        group.reduce_scatter(out, y).wait()
        group.reduce_scatter(y, y).wait()
        group.broadcast(y, 0).wait()
        assert torch.equal(out, x.to(dtype)) and torch.equal(y, x.to(dtype))
    nccl.close_group(group)
