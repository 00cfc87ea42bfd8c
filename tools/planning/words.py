"""What was found, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megalite.planner.advice import advice, bubble_warning, sensitivity
from megalite.planner.estimate import Estimate
from megalite.planner.memory import RankMemory
from megalite.planner.search import Ranking

GB = 1e9
_PARTS = ("weights", "gradients", "optimizer", "activations", "work", "buffers", "reserve")


def size_of(number: float) -> str:
    """Parameters, in millions or billions."""
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"


def layout_json(e: Estimate, memory: float = 0.0) -> dict[str, Any]:
    """One layout, in the words of the configuration; ``memory``: bytes of a device, if not its
    own."""
    p, job = e.job.parallel, e.job
    return {
        "tp": p.tp,
        "pp": p.pp,
        "dp": job.mesh.dp,
        "virtual_stages": p.virtual_stages,
        "schedule": p.schedule,
        "micro_batch_size": job.micro_batch,
        "num_microbatches": job.microbatches,
        "recompute": p.recompute,
        "sequence_parallel": p.sequence_parallel,
        "zero1": p.zero1,
        "partition": p.partition if isinstance(p.partition, str) else list(p.partition),
        "step_time_s": e.step_s,
        "pipeline_s": e.pipeline_s,
        "reduction_s": e.reduce_s,
        "optimizer_s": e.optimizer_s,
        "bubble_fraction": e.bubble_fraction,
        "mfu": e.mfu,
        "tokens_per_s_gpu": job.global_batch * job.shape.seq / e.step_s / job.world_size,
        "memory_gb": e.peak_bytes / GB,
        "memory_free_gb": ((memory or e.machine.hw.memory_bytes) - e.peak_bytes) / GB,
        "memory": memory_json(e.memory[e.worst_rank]),
    }


def memory_json(m: RankMemory) -> dict[str, float]:
    return {f"{name}_gb": getattr(m, name) / GB for name in _PARTS}


def ranking_json(r: Ranking) -> dict[str, Any]:
    return {
        "gpus": r.request.gpus,
        "gpu": r.request.machine.hw.name,
        "global_batch_size": r.request.global_batch,
        "parameters": r.request.shape.num_parameters(),
        "memory_gpu_gb": r.request.memory / GB,
        "memory_cap_gb": r.request.cap / GB,
        "headroom": r.request.headroom,
        "layouts": [layout_json(e, r.request.memory) for e in r.best],
        "refused": [
            {"reason": x.reason, "count": x.count, "example": x.example} for x in r.refused
        ],
        "candidates": r.num_layouts,
        "simulated": r.num_simulated,
        "advice": advice(r),
        "sensitivity": sensitivity(r),
    }


def ranking_text(r: Ranking) -> str:
    head = (
        f"{size_of(r.request.shape.num_parameters())} parameters on {r.request.gpus:,} x "
        f"{r.request.machine.hw.name}, {r.request.global_batch:,} sequences a step: "
        f"{r.num_layouts:,} layouts bounded, {r.num_simulated:,} simulated"
    )
    lines = [head, memory_words(r), "", *_table(r.best, r.request.memory), ""]
    if warning := bubble_warning(r.best[0]):
        lines.append(warning)
    lines += [*advice(r), *sensitivity(r), ""]
    lines += [f"refused {x.count:,}: {x.reason} (such as {x.example})" for x in r.refused]
    return "\n".join(lines)


def memory_words(r: Ranking) -> str:
    """What of a device's memory may be planned with, and why."""
    request, reserve = r.request, r.request.machine.hw.reserve_bytes
    return (
        f"{request.memory / GB:.1f} GB a GPU; {request.headroom:.0%} "
        f"({(request.memory - request.cap) / GB:.1f} GB) stays free for fragmentation (--headroom),"
        f" and {reserve / GB:.1f} GB for context and NCCL are counted in every layout"
    )


def _table(found: Sequence[Estimate], memory: float) -> list[str]:
    rows = [
        ("tp", "pp", "v", "dp", "mbs", "schedule", "recompute", "sp", "zero1", "partition")
        + ("step s", "MFU", "bubble", "GB", "free")
    ]
    for e in found:
        p = e.job.parallel
        rows.append(
            (
                str(p.tp),
                str(p.pp),
                str(p.virtual_stages),
                str(e.job.mesh.dp),
                str(e.job.micro_batch),
                p.schedule,
                p.recompute,
                "yes" if p.sequence_parallel else "no",
                "yes" if p.zero1 else "no",
                str(p.partition),
                f"{e.step_s:.4g}",
                f"{e.mfu:.1%}",
                f"{e.bubble_fraction:.1%}",
                f"{e.peak_bytes / GB:.1f}",
                f"{(memory - e.peak_bytes) / GB:.1f}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]


def explanation_text(found: dict[str, Any]) -> str:
    """``explain``'s JSON, in lines."""
    layout = found["layout"]
    lines = [
        f"step {layout['step_time_s']:.4g} s, MFU {layout['mfu']:.1%}, "
        f"{layout['tokens_per_s_gpu']:,.0f} tokens/s a GPU",
        "",
        "where a step goes, on the slowest rank:",
        *(f"  {name:34s} {100 * share:5.1f} %" for name, share in found["time"].items()),
        "",
        "one layer of a microbatch, ms:",
        *(f"  {name:34s} {1000 * s:8.3f}" for name, s in found["layer_s"].items()),
        "",
        "memory of each pipeline rank, GB:",
        "  rank " + " ".join(f"{name:>11s}" for name in (*_PARTS, "total")),
    ]
    for rank, parts in enumerate(found["memory"]):
        cells = [parts[f"{name}_gb"] for name in _PARTS]
        lines.append(f"  {rank:4d} " + " ".join(f"{x:11.2f}" for x in (*cells, sum(cells))))
    return "\n".join(lines)
