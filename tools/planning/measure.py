"""``measure``: what this machine does, from a few kernels and collectives between two ranks."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml

from megalite.errors import ConfigError
from megalite.mesh import Mesh, TorchTransport, local_device
from megalite.mesh_shape import MeshShape
from megalite.planner.kernels import FEW_RANKS
from tools.benches.ranks import run_ranks

_REPEATS = 5
_LEAST_S = 0.02  # a timed stretch is as long, at least
_MB = 1 << 20
Rates = dict[str, float]


def measure(target: Path) -> str:
    """Times this machine and writes its hardware file; what was found, in lines.

    Raises:
        ConfigError: if the file cannot be written.
    """
    found, links = run_ranks(2, _time_all)[0]
    content = describe(found, links)
    try:
        target.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise ConfigError("--out", f"{target}: {error.strerror}", "Name another file") from error
    lines = [f"{name:14s} {value:.4g}" for name, value in {**found, **links}.items()]
    return "\n".join([*lines, f"written: {target}"])


def describe(found: Rates, links: Rates) -> dict[str, Any]:
    """The hardware file of what was measured: rates in operations or bytes a second, seconds."""
    source = f"tools/plan.py measure on {platform.node()} ({platform.machine()})"

    def entry(value: float, how: str = source) -> dict[str, Any]:
        return {"value": float(f"{value:.4g}"), "source": how}

    on_cpu = found["processors"] == 1
    constants = {
        "sustained": 1.0,
        "ramp_k": found["ramp_k"],
        "stream": 1.0,
        "gap": found["gap"],
        "flash": found["flash"],
        "loss": found["loss"],
        "sync": 0.0,
    }
    return {
        "name": f"{platform.node()}, measured",
        "memory_bytes": entry(found["memory_bytes"]),
        "peak_flops": entry(found["gemm"]),
        "gemm_share": entry(1.0, "the rate above was measured"),
        "hbm_bytes_s": entry(found["stream"]),
        "hbm_share": entry(1.0, "the bandwidth above was measured"),
        "processors": entry(found["processors"]),
        "node_size": entry(links["ranks"]),
        "link_bytes_s": entry(links["link"] / (1 - FEW_RANKS / 2)),
        "link_share": entry(1.0, "the bandwidth above was measured"),
        "link_latency_s": entry(links["latency"] / (1 + 1 / 3)),
        "net_bytes_s": entry(links["link"], "one machine: as inside it"),
        "net_share": entry(1.0, "the bandwidth above was measured"),
        "net_latency_s": entry(links["latency"], "one machine: as inside it"),
        "launch_s": entry(0.0 if on_cpu else found["gap"]),
        "reserve_bytes": entry(0.0, "not measured"),
        "constants": {name: entry(value) for name, value in constants.items()},
    }


def _time_all(transport: TorchTransport) -> tuple[Rates, Rates]:
    """On two ranks: kernels on the first while the other waits, then collectives on both."""
    mesh = Mesh.create(MeshShape(dp=2), transport)
    found = time_kernels(local_device(0)) if transport.rank == 0 else {}
    return found, time_links(mesh)


def time_kernels(device: torch.device) -> Rates:
    """Rates of products, element-wise kernels, attention and loss on one device."""
    on_cpu = not _is_accelerator(device)
    dtype = torch.float32 if on_cpu else torch.bfloat16
    n = 768 if on_cpu else 8192
    rate, ramp = _products(n, device, dtype)
    elements = (16 if on_cpu else 256) * _MB // 4
    stream = _stream(elements, device, dtype)
    return {
        "gemm": rate,
        "ramp_k": ramp,
        "stream": stream,
        "flash": _attention(device, dtype, 256 if on_cpu else 2048) / rate,
        "loss": _loss(device, dtype, stream, 256 if on_cpu else 4096),
        "gap": _gap(device, dtype),
        "memory_bytes": _memory(device),
        "processors": 1 if on_cpu else _processors(device),
    }


def _seconds(body: Callable[[], torch.Tensor]) -> float:
    """Of one call, the median of several stretches; waits for the device at the ends."""

    def stretch(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times - 1):
            body()
        float(body().flatten()[0])
        return time.perf_counter() - start

    stretch(1)
    times = max(1, math.ceil(_LEAST_S / max(stretch(1), 1e-7)))
    found = sorted(stretch(times) / times for _ in range(_REPEATS))
    return found[_REPEATS // 2]


def _products(n: int, device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """The rate of long products, and the k that a short one computes besides."""
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    rate = 2 * n**3 / _seconds(lambda: a @ b)
    k = 64
    short = _seconds(lambda: a[:, :k] @ b[:k])
    return rate, min(max(rate * short / (2 * n * n) - k, 0.0), 512.0)


def _stream(elements: int, device: torch.device, dtype: torch.dtype) -> float:
    """Bytes a second of what stands between products: norms, activations and sums, equally."""
    x = torch.randn(elements // 512, 512, device=device, dtype=dtype)
    size = x.numel() * x.element_size()
    times = (
        _seconds(lambda: F.layer_norm(x, (512,))) / 2,
        _seconds(lambda: F.gelu(x)) / 2,
        _seconds(lambda: x + x) / 2,
    )
    return size / (sum(times) / len(times))


def _attention(device: torch.device, dtype: torch.dtype, seq: int) -> float:
    """Operations a second of a causal fused attention; half of the scores count."""
    q = torch.randn(4, 4, seq, 64, device=device, dtype=dtype)
    flops = 2.0 * 4 * 4 * seq * seq * 64
    with torch.no_grad():
        spent = _seconds(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    return flops / spent


def _loss(device: torch.device, dtype: torch.dtype, stream: float, rows: int) -> float:
    """Passes over the logits of cross-entropy forward and backward, relative to the model's."""
    logits = torch.randn(rows, 8192, device=device, dtype=torch.float32, requires_grad=True)
    targets = torch.zeros(rows, device=device, dtype=torch.long)

    def body() -> torch.Tensor:
        logits.grad = None
        loss = F.cross_entropy(logits, targets)
        loss.backward()
        return loss.detach()

    counted = logits.numel() * (38 + 14)
    return min(max(_seconds(body) * stream / counted, 0.1), 4.0)


def _gap(device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of a kernel that does nothing to speak of."""
    x = torch.zeros(8, device=device, dtype=dtype)
    return _seconds(lambda: x + 1)


def _memory(device: torch.device) -> float:
    if not _is_accelerator(device):
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return float(torch.accelerator.get_memory_info(device)[1])


def _is_accelerator(device: torch.device) -> bool:
    """Whether it is more than the host: torch types an index that a CPU's device has not."""
    return str(device) != "cpu"


def _processors(device: torch.device) -> float:
    properties: Any = torch.get_device_module(device).get_device_properties(device)
    return float(properties.multi_processor_count)


def time_links(mesh: Mesh) -> Rates:
    """Latency of a small all-reduce, and bandwidth of a large one, between two ranks."""
    axis = mesh.dp
    small = torch.zeros(64, device=mesh.device)
    large = torch.zeros(4 * _MB, device=mesh.device)

    def reduce(x: torch.Tensor) -> Callable[[], torch.Tensor]:
        def body() -> torch.Tensor:
            axis.all_reduce(x).wait()
            return x

        return body

    latency, whole = _fixed(reduce(small), 50), _fixed(reduce(large), 5)
    bandwidth = large.numel() * 4 / max(whole - latency, 1e-9)
    return {"latency": latency, "link": bandwidth, "ranks": float(max(2, os.cpu_count() or 2))}


def _fixed(body: Callable[[], torch.Tensor], times: int) -> float:
    """As ``_seconds``, with as many calls on every rank."""
    found = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        for _ in range(times - 1):
            body()
        float(body().flatten()[0])
        found.append((time.perf_counter() - start) / times)
    return sorted(found[1:])[_REPEATS // 2]
