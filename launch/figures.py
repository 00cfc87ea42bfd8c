"""Figures of a run beside its loss: how well the devices are used, and what each stage needs."""

from __future__ import annotations

import re
import resource
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from launch.config import Config
from megalite.mesh import Mesh, Work
from megalite.report.measured import busy_by_stage
from megalite.resilience.stragglers import Passes
from megalite.schedule.action import Op, Plan
from megalite.trace import Span, Trace
from model.config import GPTConfig

EVERY = 10  # steps between two looks at all ranks
_GB = 1e9

# Dense bf16 products, flops/s, by words of the device's name, the first that fits. From NVIDIA's
# data sheets, without sparsity.
PEAK_FLOPS = (
    ("B200", 2.25e15),
    ("GH200", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A10", 125e12),
    ("RTX 4090", 165e12),
)


def peak_flops(device_name: str) -> float | None:
    """Of a device, if it is known."""
    return next((p for name, p in PEAK_FLOPS if re.search(rf"\b{name}\b", device_name)), None)


def flops_per_token(model: GPTConfig) -> float:
    """6 for each weight that a token is multiplied by, and 12 x layers x width x sequence for
    attention, over the whole square; what recomputation adds does not count.

    Source: Chowdhery et al. 2022 (arXiv:2204.02311), appendix B.
    """
    looked_up = 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
    if model.position == "learned":
        looked_up += model.seq_length * model.hidden_size
    weights = model.num_parameters() - looked_up
    return 6.0 * weights + 12.0 * model.num_layers * model.hidden_size * model.seq_length


class Figures:
    """What is plotted beside the records of steps; every rank has one.

    - ``mfu``: model flops by the peak of all devices, where that is known; never on a CPU.
    - ``passes``: how long those of each rank have taken when they were last looked at, of a traced
      run; who takes them clears them.
    - each 10 steps, by one small message among all ranks that is read a step later:
      ``memory_gb/stage_...``, the peak so far of any rank that holds the stage (on a CPU of the
      process), and which rank has the largest; of a traced run also ``busy/stage_...``, the part
      of a step in which the stage computes, and ``bubble/stage_...``, that in which its rank does
      not, means over replicas.
    """

    def __init__(self, cfg: Config, mesh: Mesh, plan: Plan, trace: Trace) -> None:
        self.mesh, self.plan, self.trace = mesh, plan, trace
        self.stages = plan.stages_of(mesh.pp.index)
        self._chunks = max(len(plan.stages_of(rank)) for rank in range(plan.pp))
        self._flops = flops_per_token(cfg.model)
        name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else ""
        self._peak = peak_flops(name) if cfg.train.dtype == "bf16" else None
        self._gathered: tuple[int, Tensor, Work] | None = None
        self.passes: list[Passes] = []

    def gather(self, step: int) -> None:
        """After a step, on all ranks alike."""
        if step % EVERY:
            return
        spans = self.trace.newest()
        window, busy = busy_by_stage(spans)
        fractions = [busy.get(s, 0.0) / window if window else -1.0 for s in self.stages]
        fractions += [0.0] * (self._chunks - len(fractions))
        row = [peak_memory(self.mesh.device) / _GB, *fractions, *passes_of(spans)]
        mine = torch.tensor(row, dtype=torch.float64, device=self.mesh.device)
        whole = mine.new_empty(self.mesh.world.size * len(row))
        self._gathered = step, whole, self.mesh.world.all_gather(whole, mine)

    def of_step(self, step: int, tokens_per_s: float) -> dict[str, float]:
        """What there is to plot of a step that is done."""
        found: dict[str, float] = {}
        if self._peak is not None:
            world = self.mesh.shape.world_size
            found["mfu"] = tokens_per_s * self._flops / (world * self._peak)
        if self._gathered and self._gathered[0] == step:
            _, whole, work = self._gathered
            work.wait()
            self._gathered = None
            rows = whole.view(self.mesh.world.size, -1).tolist()
            pp = [self.mesh.shape.coords(r)["pp"] for r in range(len(rows))]
            found |= by_stage(self.plan, pp, rows)
            self.passes = [Passes(*row[-len(Passes._fields) :]) for row in rows]
        return found


def by_stage(plan: Plan, pp: list[int], rows: list[list[float]]) -> dict[str, float]:
    """The figures of all ranks, by stage.

    Args:
        pp: the pipeline rank of each rank.
        rows: of each rank the peak memory in GB and the busy fraction of its stages, -1 where
            nothing was traced.
    """
    peak = max(range(len(rows)), key=lambda r: rows[r][0])
    found = {"memory_gb/peak": rows[peak][0], "memory_gb/peak_rank": float(peak)}
    for rank in range(plan.pp):
        mine = [row for row, p in zip(rows, pp, strict=True) if p == rank]
        stages = plan.stages_of(rank)
        name = "_".join(map(str, stages))
        found[f"memory_gb/stage_{name}"] = max(row[0] for row in mine)
        if any(row[1] < 0 for row in mine):
            continue
        busy = [sum(row[1 + i] for row in mine) / len(mine) for i in range(len(stages))]
        found |= {f"busy/stage_{s}": b for s, b in zip(stages, busy, strict=True)}
        found[f"bubble/stage_{name}"] = 1.0 - sum(busy)
    return found


def passes_of(spans: Sequence[Span]) -> Passes:
    """The medians over the microbatches and stages of a step on one rank."""
    times: dict[str, list[float]] = {}
    for span in spans:
        if span.row == "compute":
            times.setdefault(span.op, []).append(span.end - span.start)
    middle = {op: median(t) for op, t in times.items()}
    backward = middle.get(Op.BACKWARD.value, middle.get(Op.INPUT_GRAD.value, 0.0))
    forward, weight = (middle.get(op.value, 0.0) for op in (Op.FORWARD, Op.WEIGHT_GRAD))
    return Passes(forward, backward, weight)


def peak_memory(device: torch.device) -> float:
    """Bytes that this process has had at most, of the device or else of the host."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
