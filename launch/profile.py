"""How long each kind of layer takes on this machine, and what it keeps: measured, on probes.

Probes are layers of their own with random weights, run in the real shapes on the real tp axis.
Nothing that trains is touched: no weight, no gradient sum, no global random number generator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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
"""Microbatches of a probe that are timed before it is asked whether they agree, and again."""
MOST_S = 3.0
"""After so many seconds no more are timed, agreed or not."""
TIMED_STEPS = 5
"""Steps of training, or all if they are fewer, after which the stages' times are set beside the
prediction."""
_LEAST = 3  # of the times of a pass: those that have to agree, and whose median counts
_AGREE = 1.1  # times the least of them
_SMALL = 0.02  # of all passes together: a disagreement that changes nothing
_TOO_FAR = 1.5  # times the prediction, either way: what is told
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

    def compare(self, measured: Sequence[tuple[float, float]]) -> str:
        """The table with the times that training takes, and a warning if they are others."""
        far = self.surprises(measured)
        if not far:
            return self.table(measured)
        advice = (
            "warning: training does not take the times that its layers were split by "
            f"({', '.join(far)}): the machine was busy when they were measured, or is busy now. "
            "Start again on a quiet machine, or set parallel.partition to counts"
        )
        return "\n".join([self.table(measured), advice])

    def surprises(self, measured: Sequence[tuple[float, float]]) -> list[str]:
        """Where a stage takes other times than predicted, if that is not little of a microbatch."""
        found, least = [], _SMALL * max(map(sum, measured))
        for stage, (cost, times) in enumerate(zip(self.stages, measured, strict=True)):
            backward = cost.time.input_grad + cost.time.weight_grad
            for kind, ours, real in zip("FB", (cost.time.forward, backward), times, strict=True):
                low, high = sorted((ours, real))
                if high > _TOO_FAR * low and high - low > least:
                    found.append(f"{kind} of stage {stage} {_ms(real)}, not {_ms(ours)} ms")
        return found


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
    plan = None if parallel.schedule == "auto" else make_plan(cfg, dp)
    if plan is not None and parallel.partition != "profile":
        return cfg, plan, None
    costs = measure(cfg, mesh)
    # Where auto places stages follows from what they cost; so the split comes first.
    loop = place_stages("loop", parallel.pp, parallel.virtual_stages)
    rank_of = plan.rank_of if plan is not None else loop
    if parallel.partition in ("profile", "balanced"):
        layers = split(cfg, costs, rank_of)
        counts = tuple(map(len, layers))
        cfg = replace(cfg, parallel=replace(parallel, partition=counts))
    else:
        mode = parallel.partition
        layers = place_layers([1.0] * cfg.model.num_layers, len(rank_of), mode=mode)
    found = Split(costs, layers)
    if plan is None:
        plan = make_plan(cfg, dp, found.planned(message_seconds(cfg, mesh)))
    return cfg, plan, found


def message_seconds(cfg: Config, mesh: Mesh, rounds: int | None = None) -> float:
    """Of hidden states from one pipeline rank to the next: half of there and back, settled, the
    mean over all. Collective; 0 without a pipeline."""
    if mesh.pp.size == 1:
        return 0.0
    ends = [column[:2] for column in mesh.shape.groups("pp")]
    pair = next((g for g in mesh.new_group(ends) if g is not None), None)
    total = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    tensor = _hidden(cfg, mesh)
    for _ in range(2):
        _round_trip(tensor, mesh, pair)
    found = _settled(lambda: _round_trip(tensor, mesh, pair), mesh, rounds)
    if found:
        total[0], total[1] = found[0] / 2, 1.0
    mesh.world.all_reduce(total).wait()
    seconds, count = total.tolist()
    return float(seconds / count)


def _hidden(cfg: Config, mesh: Mesh) -> Tensor:
    """What goes from one pipeline rank to the next."""
    cut = mesh.tp.size if cfg.parallel.sequence_parallel else 1
    rows = cfg.train.micro_batch_size * cfg.model.seq_length // cut
    dtype = DTYPES[cfg.train.dtype]
    return torch.zeros(rows, cfg.model.hidden_size, dtype=dtype, device=mesh.device)


def _round_trip(tensor: Tensor, mesh: Mesh, pair: Group | None) -> list[float]:
    """Seconds there and back, if this rank is of the pair."""
    if pair is None:
        return []
    me, start = mesh.pp.index, _now(mesh.device)
    for sender in (0, 1):
        work = pair.send(tensor, 1 - me) if me == sender else pair.recv(tensor, 1 - me)
        work.wait()
    return [_now(mesh.device) - start]


def _settled(once: Callable[[], list[float]], mesh: Mesh, rounds: int | None) -> list[float]:
    """What each time of ``once`` is on a machine that does nothing else: of ever more calls the
    median of the least three, as soon as those agree on every rank, or ``MOST_S`` are over.

    A busy machine adds to some calls and takes from none, so the mean and the median of a few say
    how busy it was. Collective over the mesh, which makes as many calls on each rank.
    """
    begin, calls = time.perf_counter(), []
    while True:
        calls += [once() for _ in range(rounds or ROUNDS)]
        least = [sorted(times)[:_LEAST] for times in zip(*calls, strict=True)]
        small = _SMALL * sum(times[0] for times in least)
        apart = any(t[-1] > _AGREE * t[0] and t[-1] - t[0] > small for t in least)
        going_on = torch.tensor([float(apart), time.perf_counter() - begin], device=mesh.device)
        mesh.world.all_reduce(going_on, "max").wait()
        unsettled, spent = going_on.tolist()
        if not unsettled or spent >= MOST_S:
            return [median(times) for times in least]


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


def measure(cfg: Config, mesh: Mesh, rounds: int | None = None) -> ModelCosts:
    """Seconds of F, I and W, bytes kept, and parameters of each kind of layer.

    Collective over the mesh. The kinds take turns, until the least times of each pass agree;
    times are the mean over all ranks, bytes the least of any: the same on each.
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
    times = _settled(lambda: [t for probe in probes for t in probe.run()], mesh, rounds)
    found = torch.tensor(times, dtype=torch.float64, device=mesh.device).view(len(probes), 3)
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
