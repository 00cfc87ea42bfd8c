"""How long each kind of layer takes on this machine, and what it keeps: measured, on probes.

Probes are layers of their own with random weights, run in the real shapes on the real tp axis.
Nothing that trains is touched: no weight, no gradient sum, no global random number generator.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from launch.build import DTYPES, Training, make_plan, recompute_blocks
from launch.config import Config
from launch.partition import split
from megalite.grads import GradSink
from megalite.mesh import Group, Mesh
from megalite.pipeline.stage import Stage
from megalite.pipeline.timed import TimedStage
from megalite.rows import Rows
from megalite.schedule.action import Plan
from megalite.schedule.costs import Costs
from megalite.schedule.placement import place_layers, place_stages
from megalite.tensor_parallel.linear import Layout
from model.costs import LayerCost, ModelCosts, Passes
from model.gpt import GPTStage

ROUNDS = 5
"""Microbatches of a probe whose median counts, after two that do not."""
TIMED_STEPS = 5
"""Steps of training after which the stages' times are set beside the prediction."""
_BLOCKS = 2  # in one probe: what a stage costs besides its layers is shared
_SEED = 20211102


@dataclass(frozen=True)
class Split:
    """A measured partition: the cost of each kind of layer, and the layers of each stage."""

    costs: ModelCosts
    layers: tuple[range, ...]

    @property
    def stages(self) -> list[LayerCost]:
        return self.costs.stages(self.layers)

    def planned(self, comm: float) -> Costs:
        """What a schedule is planned for, with seconds of a message between ranks."""
        passes = [stage.time for stage in self.stages]
        return Costs(
            tuple(p.forward for p in passes),
            tuple(p.input_grad for p in passes),
            tuple(p.weight_grad for p in passes),
            comm,
        )

    def profile(self) -> str:
        """What was measured, a line each kind of layer."""
        shown = {
            "embedding": self.costs.embedding,
            "block": self.costs.block,
            "head and loss": self.costs.head,
        }
        lines = [
            f"  {name}: {_ms(c.time.forward)}, {_ms(c.time.input_grad)}, "
            f"{_ms(c.time.weight_grad)} ms; {c.kept_bytes / 1e6:.2f} MB; {c.num_elements:,}"
            for name, c in shown.items()
        ]
        head = "profile of a microbatch and tp rank: F, I, W; kept until B; parameters"
        return "\n".join([head, *lines, self.table()])

    def table(self, measured: Sequence[tuple[float, float]] = ()) -> str:
        """The time of each stage as predicted and, if given, as measured in seconds of F and B."""
        lines = ["time of a microbatch in each stage: F, B"]
        for stage, (cost, layers) in enumerate(zip(self.stages, self.layers, strict=True)):
            backward = cost.time.input_grad + cost.time.weight_grad
            text = f"  stage {stage} ({len(layers)} blocks): predicted "
            text += f"{_ms(cost.time.forward)}, {_ms(backward)} ms"
            if measured:
                text += ", measured {}, {} ms".format(*map(_ms, measured[stage]))
            lines.append(text)
        return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def resolve(cfg: Config, mesh: Mesh) -> tuple[Config, Plan, Split | None]:
    """What is left to be measured: the counts of ``partition: profile``, the plan of ``auto``.

    Collective over the mesh; every rank comes to the same.

    Returns:
        ``cfg`` with counts in place of ``profile``, the step's plan, and, if anything was
        measured, what.
    """
    parallel, dp = cfg.parallel, mesh.shape.dp
    if "profile" != parallel.partition and "auto" != parallel.schedule:
        return cfg, make_plan(cfg, dp), None
    costs = measure(cfg, mesh)
    if parallel.schedule == "auto":
        # Where auto places stages follows from what they cost; so the split comes first.
        rank_of = place_stages("loop", parallel.pp, parallel.virtual_stages)
    else:
        rank_of = make_plan(cfg, dp).rank_of
    if parallel.partition in ("profile", "balanced"):
        layers = split(cfg, costs, rank_of)
        counts = tuple(map(len, layers))
        cfg = replace(cfg, parallel=replace(parallel, partition=counts))
    else:
        mode = parallel.partition
        layers = place_layers([1.0] * cfg.model.num_layers, len(rank_of), mode=mode)
    found = Split(costs, layers)
    return cfg, make_plan(cfg, dp, found.planned(message_seconds(cfg, mesh))), found


def message_seconds(cfg: Config, mesh: Mesh, rounds: int = ROUNDS) -> float:
    """Of hidden states from one pipeline rank to the next: half of there and back, the median,
    the mean over all. Collective; 0 without a pipeline."""
    if mesh.pp.size == 1:
        return 0.0
    ends = [column[:2] for column in mesh.shape.groups("pp")]
    pair = next((g for g in mesh.new_group(ends) if g is not None), None)
    total = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    if pair is not None:
        total[0], total[1] = _round_trip(cfg, mesh, pair, rounds) / 2, 1.0
    mesh.world.all_reduce(total).wait()
    seconds, count = total.tolist()
    return float(seconds / count)


def _round_trip(cfg: Config, mesh: Mesh, pair: Group, rounds: int) -> float:
    cut = mesh.tp.size if cfg.parallel.sequence_parallel else 1
    rows = cfg.train.micro_batch_size * cfg.model.seq_length // cut
    dtype = DTYPES[cfg.train.dtype]
    tensor = torch.zeros(rows, cfg.model.hidden_size, dtype=dtype, device=mesh.device)
    me, taken = mesh.pp.index, []
    for _ in range(rounds + 2):
        start = _now(mesh.device)
        for sender in (0, 1):
            work = pair.send(tensor, 1 - me) if me == sender else pair.recv(tensor, 1 - me)
            work.wait()
        taken.append(_now(mesh.device) - start)
    return median(taken[2:])


def stage_times(training: Training) -> list[tuple[float, float]]:
    """Seconds of F and B of a microbatch in each stage of a timed training so far.

    Collective. The median on each rank, the mean over those that have the stage.
    """
    mesh, num_stages = training.mesh, training.plan.num_stages
    total = torch.zeros(num_stages, 2, dtype=torch.float64)
    for index, stage in training.executor.stages.items():
        assert isinstance(stage, TimedStage)
        total[index] = torch.tensor(stage.seconds(), dtype=torch.float64)
    total = total.to(mesh.device)
    mesh.world.all_reduce(total).wait()
    mean = total / (mesh.shape.dp * mesh.shape.tp)
    return [(forward, backward) for forward, backward in mean.tolist()]


def measure(cfg: Config, mesh: Mesh, rounds: int = ROUNDS) -> ModelCosts:
    """Seconds of F, I and W, bytes kept, and parameters of each kind of layer.

    Collective over the mesh. Each rank takes the median over its rounds, in which the kinds take
    turns; times are the mean over all ranks, bytes the least of any: the same on each.
    """
    probes = [
        Probe(cfg, mesh, range(0), first=True),
        Probe(cfg, mesh, range(_BLOCKS)),
        Probe(cfg, mesh, range(0), last=True),
    ]
    # A message's buffer may live on in its transport's thread for a moment, on some ranks: what
    # the layers keep is the least that any rank saw.
    kept = -torch.tensor([probe.kept_bytes() for probe in probes], device=mesh.device)
    mesh.world.all_reduce(kept, "max").wait()
    for probe in probes:
        probe.run()
    times = [[probe.run() for probe in probes] for _ in range(rounds)]
    found = torch.tensor(
        [[median(r[k][p] for r in times) for p in range(3)] for k in range(len(probes))],
        dtype=torch.float64,
        device=mesh.device,
    )
    mesh.world.all_reduce(found).wait()
    seconds = (found / mesh.world.size).tolist()
    costs = [
        LayerCost(Passes(*s), probe.num_elements, k)
        for s, probe, k in zip(seconds, probes, (-kept).tolist(), strict=True)
    ]
    block = costs[1]
    costs[1] = LayerCost(
        block.time * (1 / _BLOCKS), block.num_elements // _BLOCKS, block.kept_bytes // _BLOCKS
    )
    return ModelCosts(*costs)


class Probe:
    """A stage that belongs to no pipeline, with its inputs."""

    def __init__(
        self, cfg: Config, mesh: Mesh, blocks: range, *, first: bool = False, last: bool = False
    ) -> None:
        self.device = mesh.device
        # A stage's own code decides by its number whether it is the first or the last of three.
        index = 0 if first else 2 if last else 1
        dtype = DTYPES[cfg.train.dtype]
        layout = Layout(mesh.tp, cfg.parallel.sequence_parallel, dtype, self.device, GradSink())
        # Any token may stand for the border between documents: a mask costs the same.
        eod = 0 if cfg.data.reset_at_document else None
        module = GPTStage(cfg.model, blocks, layout, first=first, last=last, eod=eod)
        recompute_blocks(module, cfg.parallel.recompute)
        self.num_elements = sum(p.numel() for p in module.parameters())
        self.stage = Stage(module, index, 3, layout.sink, dtype, self.device, 1.0)
        draw = torch.Generator(self.device).manual_seed(_SEED)
        with torch.no_grad():
            for p in module.parameters():
                p.normal_(0.0, cfg.model.init_std, generator=draw)
        rows = (cfg.train.micro_batch_size, cfg.model.seq_length)
        ids: dict[str, Any] = {"generator": draw, "device": self.device}
        self.targets = torch.randint(max(cfg.model.vocab_size, 1), rows, **ids)
        self.rows = Rows(self.targets, torch.arange(rows[0], device=self.device))
        hidden = module.hidden_shape(*rows)
        self.x = self.targets if first else torch.randn(hidden, dtype=dtype, **ids)
        self.grad: Tensor | None = None if last else torch.randn(hidden, dtype=dtype, **ids)

    def run(self) -> tuple[float, float, float]:
        """Seconds of F, I and W of a microbatch."""
        ticks = [_now(self.device)]
        self.stage.forward(0, self.x, self.targets, self.rows)
        ticks.append(_now(self.device))
        self.stage.input_grad(0, self.grad)
        ticks.append(_now(self.device))
        self.stage.weight_grad(0)
        ticks.append(_now(self.device))
        forward, input_grad, weight_grad = (b - a for a, b in zip(ticks, ticks[1:], strict=False))
        return forward, input_grad, weight_grad

    def kept_bytes(self) -> int:
        """What F leaves in memory for the backward, without the output, with the input."""
        held = {StorageWeakRef(p.untyped_storage()).cdata for p in self.stage.module.parameters()}
        made = _Made(held)
        with made:
            self.stage.forward(0, self.x.clone(), self.targets, self.rows)
        kept = made.living()
        self.stage.backward(0, self.grad)
        return kept


def _now(device: torch.device) -> float:
    """Seconds, after all that the device has to do."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


class _Made(TorchDispatchMode):
    """Follows the memory of every tensor that is made, without keeping it alive.

    ``held`` are the storages, by address, that do not count: views of weights are made too.
    """

    def __init__(self, held: set[int]) -> None:
        super().__init__()
        self.held = held
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                ref = StorageWeakRef(storage)
                if ref.cdata not in self.held:
                    self._made[ref.cdata] = ref, storage.nbytes()
        return out

    def living(self) -> int:
        """Bytes of what was made and is still in use."""
        living: int = sum(size for ref, size in self._made.values() if not ref.expired())
        return living
