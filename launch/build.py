"""From a configuration and a mesh to what trains: plan, stages, reducer, optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, nn

from launch.config import Config, num_microbatches
from launch.partition import layers_of
from megalite.clock import clock_of
from megalite.data_parallel.bucket import FlatParameters
from megalite.data_parallel.reducer import GradReducer
from megalite.grads import GradSink
from megalite.mesh import Mesh
from megalite.optim.adamw import AdamW, apex_state
from megalite.optim.clip import StepTotals, step_totals
from megalite.pipeline.executor import Batch, Executor
from megalite.pipeline.p2p import Channels
from megalite.pipeline.stage import Stage
from megalite.pipeline.timed import TimedStage
from megalite.rng import initialize
from megalite.schedule.action import Plan
from megalite.schedule.costs import Costs, MemoryLimit
from megalite.schedule.generators import build_schedule, forward_only
from megalite.schedule.lower import lower
from megalite.schedule.validate import validate
from megalite.tensor_parallel.cross_entropy import IGNORE
from megalite.tensor_parallel.linear import Layout
from megalite.trace import Trace
from model.gpt import GPTStage

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


# What gradients are summed and weights are updated in.
SUM_DTYPES = {name: torch.promote_types(d, torch.float32) for name, d in DTYPES.items()}


@dataclass
class Training:
    """Everything that a step touches, on one rank.

    ``gpt`` maps this rank's stages to the model's modules; ``plan`` is the step's lowered and
    proven list of actions of every pipeline rank.
    """

    cfg: Config
    mesh: Mesh
    plan: Plan
    gpt: dict[int, GPTStage]
    executor: Executor
    flat: FlatParameters
    reducer: GradReducer
    optimizer: AdamW
    trace: Trace = field(default_factory=Trace)

    @property
    def has_last_stage(self) -> bool:
        return self.plan.num_stages - 1 in self.gpt

    def gradients(self, batch: Batch) -> StepTotals:
        """Forward and backward of one step, reduced over all ranks."""
        self.reducer.zero(self.plan.num_microbatches)
        loss = self.executor.run(self.plan, batch, self.reducer)
        self.reducer.finish()
        with self.trace.span("totals"):
            return step_totals(
                self.flat,
                loss,
                count_tokens(batch),
                self.mesh,
                constant=loss_constant(self.cfg),
                clip=self.cfg.optim.clip_grad_norm,
            )

    def step(self, batch: Batch, lr: float) -> StepTotals:
        """One step of training; the weights change unless the totals are not finite."""
        totals = self.gradients(batch)
        with self.trace.span("optimizer"):
            self.optimizer.step(lr, totals.factor, totals.finite)
        return totals

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor | None:
        """On the rank of the last stage: the summed loss, or without targets the logits."""
        return self.executor.run(forward_plan(self.plan.rank_of, batch.tokens.shape[0]), batch)

    @torch.no_grad()
    def losses(self, batch: Batch) -> Tensor:
        """(2,) float64: summed loss and token count of a batch over all replicas, no gradients."""
        loss = self.forward(batch)
        total = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        if loss is not None and self.mesh.tp.index == 0:
            total[0] = loss
            total[1] = count_tokens(batch)
        self.mesh.world.all_reduce(total).wait()
        return total


def count_tokens(batch: Batch) -> Tensor:
    """0-d number of targets that are not ignored."""
    assert batch.targets is not None
    return (batch.targets != IGNORE).sum()


def loss_constant(cfg: Config) -> float:
    """Tokens of a full batch: what backward divides by, in every layout."""
    return float(cfg.train.global_batch_size * cfg.model.seq_length)


@dataclass
class Held:
    """What a rank holds in memory from step to step: its stages in flat buffers, the gradients'
    sums and the optimizer's state."""

    gpt: dict[int, GPTStage]
    flat: FlatParameters
    reducer: GradReducer
    optimizer: AdamW


def build(cfg: Config, mesh: Mesh, plan: Plan | None = None, *, timed: bool = False) -> Training:
    """Plan, model with its initial weights, reducer and optimizer for this rank.

    Collective over the mesh (the channels of the pipeline are groups). ``timed`` stages note how
    long each of their passes takes.
    """
    plan = plan or make_plan(cfg, mesh.shape.dp)
    trace = open_trace(cfg, mesh)
    channels = Channels(mesh, plan, trace)
    held = hold(cfg, mesh, plan, trace)
    kind = TimedStage if timed else Stage
    stages = {
        s: kind(
            module,
            s,
            plan.num_stages,
            module.layout.sink,
            module.layout.dtype,
            mesh.device,
            1.0 / loss_constant(cfg),
        )
        for s, module in held.gpt.items()
    }
    executor = Executor(mesh.pp.index, stages, channels, trace)
    return Training(
        cfg, mesh, plan, held.gpt, executor, held.flat, held.reducer, held.optimizer, trace
    )


def hold(cfg: Config, mesh: Mesh, plan: Plan, trace: Trace | None = None) -> Held:
    """A rank's stages with their initial weights, and what updates them. Sends nothing.

    With ``Mesh.at`` on the device ``meta`` it takes no memory: what any rank of any layout would
    hold.
    """
    gpt = build_stages(cfg, mesh, plan)
    flat = FlatParameters({s: list(module.parameters()) for s, module in gpt.items()})
    if mesh.device.type != "meta":
        initialize(flat.parameters(), cfg.train.seed)
    reducer = GradReducer(flat, mesh, trace)
    for module in gpt.values():
        module.layout.sink.on_ready = reducer.grad_ready
    return Held(gpt, flat, reducer, AdamW(flat, cfg.optim))


def open_trace(cfg: Config, mesh: Mesh) -> Trace:
    """What records the steps of this rank: nothing without ``run.trace``."""
    if not cfg.run.trace:
        return Trace()
    return Trace(clock_of(mesh.device), cfg.run.trace_spans)


def make_plan(cfg: Config, dp: int, costs: Costs | None = None) -> Plan:
    """The step's actions of every pipeline rank, lowered and proven; ``auto`` plans for
    ``costs``.

    Raises:
        ConfigError, ScheduleError: for a file that does not fit, or holds no schedule.
    """
    parallel = cfg.parallel
    plan = lower(
        build_schedule(
            parallel.schedule,
            parallel.pp,
            num_microbatches(cfg, dp),
            parallel.virtual_stages,
            costs,
            MemoryLimit(parallel.schedule_memory or parallel.pp),
        )
    )
    validate(plan, trains=True)
    return plan


@cache
def forward_plan(rank_of: tuple[int, ...], num_microbatches: int) -> Plan:
    """The lowered plan of an evaluation."""
    return lower(forward_only(rank_of, num_microbatches))


def build_stages(
    cfg: Config,
    mesh: Mesh,
    plan: Plan,
    make_sink: Callable[[], GradSink] = GradSink,
) -> dict[int, GPTStage]:
    """This rank's stages, on its device, with their memory but no values yet."""
    ranges = layers_of(cfg, plan)
    last, mine = plan.num_stages - 1, plan.stages_of(mesh.pp.index)
    split_tie = cfg.model.tied_embeddings and plan.rank_of[0] != plan.rank_of[last]
    found: dict[int, GPTStage] = {}
    shared: nn.Parameter | None = None
    for s in mine:
        layout = Layout(
            mesh.tp,
            cfg.parallel.sequence_parallel,
            DTYPES[cfg.train.dtype],
            mesh.device,
            make_sink(),
        )
        found[s] = GPTStage(
            cfg.model,
            ranges[s],
            layout,
            first=s == 0,
            last=s == last,
            shared_embedding=shared,
            split_tie=split_tie,
        )
        shared = found[s].embedding if s == 0 else shared
    return found


def describe(training: Training) -> str:
    """What runs where, for the log."""
    cfg, flat, shape = training.cfg, training.flat, training.mesh.shape
    first = flat.buckets[0]
    wide = str(first.grad.dtype).removeprefix("torch.")
    clip = cfg.optim.clip_grad_norm or "off"
    apex = apex_state() if cfg.optim.backend == "auto" else "absent"
    stages = [
        f"stage {s} on pp {training.plan.rank_of[s]}: {_layers(layers)}"
        for s, layers in enumerate(layers_of(cfg, training.plan))
    ]
    lines = [
        shape.table(),
        *stages,
        f"schedule: {training.plan.name}, {training.plan.microbatches} of "
        f"{cfg.train.micro_batch_size} x {cfg.model.seq_length} tokens a replica and step",
        f"model: {cfg.model.num_parameters():,} parameters, {flat.num_elements:,} on rank 0, in "
        f"{cfg.train.dtype}; gradients, master weights and moments in {wide}",
        f"optimizer: AdamW ({training.optimizer.backend}), gradient norm clipped at {clip}"
        + ("" if apex in ("absent", "complete") else f"; not used: apex is {apex}"),
    ]
    return "\n".join(lines)


def _layers(layers: range) -> str:
    if len(layers) < 2:
        return f"layer {layers.start}" if layers else "no layer"
    return f"layers {layers.start} to {layers.stop - 1}"
