"""``measure``: what this machine does, from a few kernels and collectives on two ranks at once."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from megalite.errors import ConfigError
from megalite.mesh import Axis, Mesh, TorchTransport, local_device
from megalite.mesh_shape import MeshShape
from megalite.planner.constants import MEGALITE, Constants
from megalite.planner.cost import LayerCosts, Split
from megalite.planner.hardware import HardwareSpec
from megalite.planner.kernels import FEW_RANKS, Kernels
from tools.benches.ranks import run_ranks
from tools.planning.bodies import TINY, Sizes, linears
from tools.planning.models import shape_of
from tools.planning.timing import LARGE_BYTES, Bench, Rates

ROUNDS = 7
_MOST_RAMP = 512.0
_NORM_AND_SUM, _ACTIVATION, _LOGITS = 7 + 3, 2 + 3, 38 + 14
"""How often the planner has each read or written: see ``cost.LayerCosts``; of logits, bytes."""


def measure(target: Path) -> str:
    """Times this machine and writes its hardware file; what was found, in lines.

    Raises:
        ConfigError: if the file cannot be written.
    """
    found = mean(run_ranks(2, _time_all, ROUNDS))
    write(describe(found), target)
    lines = [f"{name:14s} {value:.4g}" for name, value in found.items()]
    return "\n".join([*lines, f"written: {target}"])


def write(content: dict[str, Any], target: Path) -> None:
    try:
        target.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise ConfigError("--out", f"{target}: {error.strerror}", "Name another file") from error


def _time_all(transport: TorchTransport, rounds: int) -> Rates:
    """On one of two ranks. Cores are the ranks' own; an accelerator is the first one's alone."""
    mesh = Mesh.create(MeshShape(dp=2), transport)
    device = local_device(0)
    bench = open_bench(mesh.dp, device)
    for _ in range(rounds):
        bench.round()
    mesh.close()
    return rates(bench, device)


def open_bench(axis: Axis, device: torch.device) -> Bench:
    on_cpu = str(device) == "cpu"
    return Bench(axis, device, computes=on_cpu or axis.index == 0)


def mean(ranks: Sequence[Rates]) -> Rates:
    """Of the ranks that found something."""
    known = [[r[name] for r in ranks if name in r] for name in ranks[0]]
    return {name: sum(v) / len(v) for name, v in zip(ranks[0], known, strict=True)}


def rates(bench: Bench, device: torch.device) -> Rates:
    """Operations or bytes a second, seconds, and shares, from what a rank has timed."""
    seconds = bench.medians()
    found = links(seconds)
    if bench.bodies:
        on_cpu = str(device) == "cpu"
        found |= kernels(seconds, bench.sizes, 4 if on_cpu else 2)
        found["processors"] = 1.0 if on_cpu else _processors(device)
        found["memory_bytes"] = _memory(device)
        if not on_cpu:
            found["gap"] = seconds["gap"]
    return found


def kernels(seconds: Rates, sizes: Sizes, element_bytes: int) -> Rates:
    """Rates of products, attention, what stands between them, loss and update."""
    hidden = sizes.rows * sizes.width * element_bytes
    stream = _NORM_AND_SUM * hidden / seconds["stream"]
    rate, ramp = _products(seconds, sizes, 2 * element_bytes / stream)
    attention = 3.5 * 2.0 * sizes.rows * sizes.seq * sizes.width
    logits = sizes.rows * sizes.vocab
    product = 2.0 * logits * (sizes.width + ramp) / rate
    loss = max(seconds["head"] - product, 0.0) * stream / (logits * _LOGITS)
    return {
        "gemm": rate,
        "ramp_k": ramp,
        "stream": stream,
        "flash": attention / seconds["attention"] / rate,
        "activation": _ACTIVATION * 4 * hidden / seconds["activation"],
        "loss": max(loss, 0.1),
        "update": sizes.update * MEGALITE.update_bytes / seconds["update"],
        "gap": seconds["block"] / _num_gaps(),
    }


def _products(seconds: Rates, sizes: Sizes, sum_s: float) -> tuple[float, float]:
    """The rate of long products, and how much longer than k a product takes: from a layer's
    products and those of one half as wide. ``sum_s`` is of adding to an element of a gradient's
    sum, which the planner counts apart."""

    def work(width: int) -> tuple[float, float, float]:
        elements = [(n * k, sizes.rows * (n + k) + n * k) for n, k in linears(width)]
        weights, results = (float(sum(e)) for e in zip(*elements, strict=True))
        return 6.0 * sizes.rows * weights, 2.0 * results, sum_s * weights

    flops, results, sums = work(sizes.width)
    few, short, few_sums = work(sizes.width // 2)
    # Sums are never the larger part: a machine that pauses while they are timed says so.
    spent = max(seconds["products"] - sums, seconds["products"] / 2)
    share = max(seconds["short"] - few_sums, seconds["short"] / 2) / spent
    slower, left = share * flops - few, short - share * results
    ramp = min(max(slower / left, 0.0), _MOST_RAMP) if left > 0 else _MOST_RAMP
    return (flops + ramp * results) / spent, ramp


def _num_gaps() -> float:
    """Kernels that the planner counts in F, I and W of a block."""
    endless = 1e30
    hw = HardwareSpec("", 1, endless, 1, endless, 1, 1, 1, 1, 1, 1, 1, 1, 1)
    c = Constants(1, 0, 1, 1.0, 1, 1, 1, 1, 0)
    passes = LayerCosts(shape_of(TINY), Split(), 1, Kernels(hw, c), MEGALITE).layer()
    return passes.forward + passes.input_grad + passes.weight_grad


def links(seconds: Rates) -> Rates:
    """Latency and bandwidth of an all-reduce over two ranks; what a gather takes of its time, and
    what either hides beside products."""
    small, large = (max(seconds[f"reduce {size}"], 1e-6) for size in ("small", "large"))
    gathers = sum(max(seconds[f"gather {size}"], 0.0) for size in ("small", "large"))
    beside = sum(max(seconds[f"beside reduce {size}"], 0.0) for size in ("small", "large"))
    return {
        "latency": small,
        "link": LARGE_BYTES / max(large - small, 1e-9),
        "gather": min(max(gathers / (small + large), 0.25), 1.5),
        "overlap": min(max(1 - beside / (small + large), 0.0), 1.0),
        "ranks": float(max(2, os.cpu_count() or 2)),
    }


def describe(found: Rates) -> dict[str, Any]:
    """The hardware file of what was measured."""
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
        "node_size": entry(found["ranks"]),
        "link_bytes_s": entry(found["link"] / (1 - FEW_RANKS / 2)),
        "link_share": entry(1.0, "the bandwidth above was measured"),
        "link_latency_s": entry(found["latency"] / (1 + 1 / 3)),
        "net_bytes_s": entry(found["link"], "one machine: as inside it"),
        "net_share": entry(1.0, "the bandwidth above was measured"),
        "net_latency_s": entry(found["latency"], "one machine: as inside it"),
        "launch_s": entry(0.0 if on_cpu else found["gap"]),
        "reserve_bytes": entry(0.0, "not measured"),
        "gather_share": entry(found["gather"]),
        "overlap": entry(found["overlap"]),
        "constants": {name: entry(value) for name, value in constants.items()},
        "rates": {name: entry(found[name]) for name in ("activation", "update")},
    }


def _memory(device: torch.device) -> float:
    if str(device) == "cpu":
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return float(torch.accelerator.get_memory_info(device)[1])


def _processors(device: torch.device) -> float:
    properties: Any = torch.get_device_module(device).get_device_properties(device)
    return float(properties.multi_processor_count)
