"""One GPU in bf16: a step of ours beside a plain PyTorch loop and beside the chip's own limits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from launch.build import build
from launch.config import Config, TrainConfig
from launch.figures import flops_per_token, peak_flops
from megalite.mesh import Mesh, local_device
from megalite.pipeline.executor import Batch
from model.config import PRESETS, GPTConfig
from tools.benches.plain import PlainGPT, plain_step
from tools.benches.rows import Goal, Row, Sample

NO_GPU = "gpu: there is no GPU on this machine, nothing was measured"
REPETITIONS = 7
MATRIX = 8192  # of the product that shows what the chip reaches at best


@dataclass(frozen=True)
class Case:
    """A model, and the microbatches of a step."""

    preset: str
    num_microbatches: int
    micro_batch_size: int
    goal: float | None = None

    @property
    def model(self) -> GPTConfig:
        fields: dict[str, Any] = dict(PRESETS[self.preset])
        return GPTConfig(**fields)

    @property
    def tokens(self) -> int:
        return self.num_microbatches * self.micro_batch_size * self.model.seq_length


CASES = (Case("gpt2-124m", 2, 16), Case("gpt3-1.3b", 2, 4, goal=0.55))


def run() -> list[Row]:
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return []
    device = local_device(0)
    peak = peak_flops(torch.cuda.get_device_name(device))
    ceiling = product_rate(device)
    rows = []
    if peak is not None:
        what = "bf16 matrix product, TFLOP/s: beside the chip's peak"
        rows.append(Row(what, ceiling.scaled(1e-12), Sample((peak * 1e-12,))))
    for case in CASES:
        rows += case_rows(case, race(case, device), ceiling, peak)
    return rows


def case_rows(
    case: Case, found: dict[str, Sample], ceiling: Sample, peak: float | None
) -> list[Row]:
    """Rates in TFLOP/s of model flops, so that a ratio to the peak is the MFU."""
    flops = flops_per_token(case.model) * case.tokens
    rate = {name: seconds.rate(flops * 1e-12) for name, seconds in found.items()}
    what = f"{case.preset} bf16, TFLOP/s"
    rows = [
        Row(f"{what}: beside plain PyTorch", rate["ours"], rate["plain"]),
        Row(f"{what}: beside the matrix product", rate["ours"], ceiling.scaled(1e-12)),
    ]
    if peak is not None:
        goal = Goal("at least", case.goal) if case.goal else None
        limit = Sample((peak * 1e-12,))
        rows.append(Row(f"{what}: MFU of the peak", rate["ours"], limit, goal))
        rows.append(Row(f"{what}: plain PyTorch's MFU", rate["plain"], limit))
    return rows


def race(case: Case, device: torch.device) -> dict[str, Sample]:
    """Seconds of a step by events on the stream, ours and plain in turn."""
    made = torch.Generator().manual_seed(1)
    shape = (case.num_microbatches, case.micro_batch_size, case.model.seq_length + 1)
    ids = torch.randint(case.model.vocab_size, shape, generator=made)
    tokens, targets = (t.contiguous().to(device) for t in (ids[..., :-1], ids[..., 1:]))
    steps = {
        "ours": ours(case, device, Batch(tokens, targets)),
        "plain": plain(case.model, device, tokens, targets),
    }
    found: dict[str, list[float]] = {name: [] for name in steps}
    for repetition in range(-2, REPETITIONS):
        for name, step in steps.items():
            seconds = timed(step)
            if repetition >= 0:
                found[name].append(seconds)
    return {name: Sample(tuple(values)) for name, values in found.items()}


def ours(case: Case, device: torch.device, data: Batch) -> Callable[[], object]:
    train = TrainConfig(
        global_batch_size=case.num_microbatches * case.micro_batch_size,
        micro_batch_size=case.micro_batch_size,
        dtype="bf16",
    )
    cfg = replace(Config(), model=case.model, train=train)
    training = build(cfg, Mesh.single(device))
    return lambda: training.step(data, 1e-4)


def plain(
    model: GPTConfig, device: torch.device, tokens: Tensor, targets: Tensor
) -> Callable[[], object]:
    """Under autocast: fp32 weights, products in bf16."""
    module: nn.Module = PlainGPT(model).to(device)
    step = plain_step(module)

    def run() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            step(tokens, targets)

    return run


def timed(step: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def product_rate(device: torch.device) -> Sample:
    """Flops/s of a large bf16 product."""
    a, b = (torch.randn(MATRIX, MATRIX, device=device, dtype=torch.bfloat16) for _ in range(2))

    def run() -> None:
        for _ in range(10):
            a @ b

    timed(run)
    return Sample(tuple(timed(run) for _ in range(REPETITIONS))).rate(10 * 2.0 * MATRIX**3)
