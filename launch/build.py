"""From a configuration and a mesh to what trains: plan, stages, reducer, optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
from megalite.optim.adamw import AdamW, Buffers, apex_state
from megalite.optim.clip import StepTotals, step_totals
from megalite.optim.loss_scale import LossScale
from megalite.pipeline.executor import Batch, Executor
from megalite.pipeline.p2p import Channels
from megalite.pipeline.watched import stage_kind
from megalite.place import Phase, Place
from megalite.recompute import recomputed
from megalite.resilience.finite import FiniteWatch
from megalite.resilience.stop import Control
from megalite.rng import initialize
from megalite.schedule.action import Plan
from megalite.schedule.costs import Costs, MemoryLimit
from megalite.schedule.generators import build_schedule, forward_only
from megalite.schedule.lower import lower
from megalite.schedule.validate import validate
from megalite.tensor_parallel.cross_entropy import IGNORE
from megalite.tensor_parallel.linear import Layout
from megalite.trace import Trace
from model.gpt import Block, GPTStage

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
    proven list of actions of every pipeline rank. ``request``: this rank knows of a request to
    the run, and the next step tells all.
    """

    cfg: Config
    mesh: Mesh
    plan: Plan
    gpt: dict[int, GPTStage]
    executor: Executor
    flat: FlatParameters
    reducer: GradReducer
    optimizer: AdamW
    watch: FiniteWatch
    loss_scale: LossScale | None
    trace: Trace = field(default_factory=Trace)
    request: bool = False
    place: Place = field(default_factory=Place)
    control: Control = field(default_factory=Control.of_worker)

    @property
    def has_last_stage(self) -> bool:
        return self.plan.num_stages - 1 in self.gpt

    def gradients(self, batch: Batch) -> StepTotals:
        """Forward and backward of one step, reduced over all ranks."""
        self.watch.begin(batch.step)
        self.reducer.zero(self.plan.num_microbatches)
        loss = self.executor.run(self.plan, batch, self.reducer)
        self.reducer.finish()
        self.place.at(Phase.TOTALS)
        with self.trace.span("totals"):
            return step_totals(
                self.flat,
                loss,
                count_tokens(batch),
                self.mesh,
                constant=loss_constant(self.cfg),
                clip=self.cfg.optim.clip_grad_norm,
                scale=self.loss_scale.scale if self.loss_scale else None,
                request=self.request,
                stop=self.control.stop,
            )

    def step(self, batch: Batch, lr: float) -> StepTotals:
        """One step of training; the weights change unless the totals are not finite.

        ``train.bad_step=replay`` looks at once, which waits for the device, and computes a step
        that is not finite a second time: the weights are still those from which it began. What
        fp16 leaves out at an overflow of gradients is no such step.
        """
        totals = self.gradients(batch)
        if self.cfg.train.bad_step == "replay":
            bad = totals.bad_losses if self.loss_scale else 1.0 - totals.finite
            if float(bad) > 0:
                self.watch.keep()
                totals = replace(self.gradients(batch), replays=1)
        self.place.at(Phase.OPTIMIZER)
        with self.trace.span("optimizer"):
            self.optimizer.step(lr, totals.factor, totals.finite)
        if self.loss_scale:
            self.loss_scale.update(totals.finite)
        return totals

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor | None:
        """On the rank of the last stage: the summed loss, or without targets the logits.

        Nothing is dropped.
        """
        self.flat.current()
        plan = forward_plan(self.plan.rank_of, batch.tokens.shape[0])
        return self.executor.run(plan, replace(batch, samples=None))

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


Fill = Callable[[FlatParameters], Buffers]
"""Gives flat parameters that were made bare their memory and values, and the optimizer's state."""


@dataclass
class Held:
    """What a rank holds in memory from step to step: its stages in flat buffers, the gradients'
    sums and the optimizer's state."""

    gpt: dict[int, GPTStage]
    flat: FlatParameters
    reducer: GradReducer
    optimizer: AdamW


def build(
    cfg: Config,
    mesh: Mesh,
    plan: Plan | None = None,
    *,
    timed: bool = False,
    eod: int | None = None,
    fill: Fill | None = None,
    place: Place | None = None,
) -> Training:
    """Plan, model with its initial weights, reducer and optimizer for this rank.

    Collective over the mesh (the channels of the pipeline are groups). ``timed`` stages note how
    long each of their passes takes. ``eod`` is the tokenizer's, for ``data.reset_at_document``.
    ``fill`` brings the state that the run has already: see ``hold``.
    ``place`` is where the rank notes what it is at.
    """
    assert eod is not None or not cfg.data.reset_at_document, "no border between documents"
    plan = plan or make_plan(cfg, mesh.shape.dp)
    trace, place = open_trace(cfg, mesh), place or Place()
    channels = Channels(mesh, plan, trace)
    held = hold(cfg, mesh, plan, trace, eod, fill)
    scaling = open_loss_scale(cfg, mesh)
    kind = stage_kind(timed=timed, watched=cfg.run.record)
    stages = {
        s: kind(
            module,
            s,
            plan.num_stages,
            module.layout.sink,
            module.layout.dtype,
            mesh.device,
            1.0 / loss_constant(cfg),
            scaling.scale if scaling else None,
        )
        for s, module in held.gpt.items()
    }
    executor = Executor(mesh.pp.index, stages, channels, trace, place)
    layers = {s: layers_by_name(module) for s, module in held.gpt.items()}
    watch = FiniteWatch(mesh.rank, stages, layers, held.reducer, plan.num_microbatches)
    parts = (held.flat, held.reducer, held.optimizer)
    return Training(cfg, mesh, plan, held.gpt, executor, *parts, watch, scaling, trace, place=place)


def open_loss_scale(cfg: Config, mesh: Mesh) -> LossScale | None:
    """What scales the loss of fp16, whose gradients would vanish or overflow."""
    train = cfg.train
    if train.dtype != "fp16":
        return None
    return LossScale(train.loss_scale, train.loss_scale_interval, mesh.device)


def hold(
    cfg: Config,
    mesh: Mesh,
    plan: Plan,
    trace: Trace | None = None,
    eod: int | None = None,
    fill: Fill | None = None,
) -> Held:
    """A rank's stages with their initial weights, and what updates them. Sends nothing.

    With ``Mesh.at`` on the device ``meta`` it takes no memory: what any rank of any layout would
    hold. With ``fill`` nothing has memory before that is called.
    """
    gpt = build_stages(cfg, mesh, plan, eod=eod, bare=fill is not None)
    stages = {s: list(module.parameters()) for s, module in gpt.items()}
    flat = FlatParameters(stages, mesh.dp, cfg.parallel.zero1, trace, bare=fill is not None)
    state = fill(flat) if fill else None
    if fill is None and mesh.device.type != "meta":
        initialize(flat.parameters(), cfg.train.seed)
    reducer = GradReducer(flat, mesh, trace)
    for module in gpt.values():
        module.layout.sink.on_ready = reducer.grad_ready
        for user, params in users(module):
            flat.wait_before(user, params)
    return Held(gpt, flat, reducer, AdamW(flat, cfg.optim, skips_steps(cfg), state))


def layers_by_name(gpt: GPTStage) -> dict[str, nn.Module]:
    """The blocks of a stage."""
    return {block.name: block for block in gpt.blocks if isinstance(block, Block)}


def skips_steps(cfg: Config) -> bool:
    """Whether the run goes on after a step that is not finite."""
    return cfg.train.bad_step != "stop" or cfg.train.dtype == "fp16"


def users(gpt: GPTStage) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """The modules of a stage before whose forward certain parameters must be current.

    The head is used right after the final norm. The stage itself, which begins with the
    embedding, must not wait for it.
    """
    found: list[tuple[nn.Module, list[nn.Parameter]]] = []
    if gpt.embedding is not None:
        positions = [] if gpt.positions is None else list(gpt.positions.parameters())
        found.append((gpt, [gpt.embedding, *positions]))
    found += [(block, list(block.parameters())) for block in gpt.blocks]
    if gpt.norm is not None and gpt.head is not None:
        found.append((gpt.norm, [*gpt.norm.parameters(), gpt.head]))
    return found


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
    eod: int | None = None,
    bare: bool = False,
) -> dict[int, GPTStage]:
    """This rank's stages, on its device, with their memory, unless ``bare``, but no values yet."""
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
            bare,
        )
        found[s] = GPTStage(
            cfg.model,
            ranges[s],
            layout,
            first=s == 0,
            last=s == last,
            shared_embedding=shared,
            split_tie=split_tie,
            seed=cfg.train.seed,
            eod=eod if cfg.data.reset_at_document else None,
        )
        recompute_blocks(found[s], cfg.parallel.recompute)
        shared = found[s].embedding if s == 0 else shared
    return found


def recompute_blocks(module: GPTStage, mode: str) -> None:
    """Keep of each block (full), or of its attention's core (selective), the inputs only."""
    for block in module.blocks:
        assert isinstance(block, Block)
        if mode == "full":
            block.forward = recomputed(block.forward)  # type: ignore[method-assign]
        elif mode == "selective":
            block.attention.core = recomputed(block.attention.core)


def describe(training: Training) -> str:
    """What runs where, for the log."""
    cfg, flat, shape = training.cfg, training.flat, training.mesh.shape
    wide = str(SUM_DTYPES[cfg.train.dtype]).removeprefix("torch.")
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
        + ("" if apex in ("absent", "complete") else f"; not used: apex is {apex}")
        + (f"; its state cut over {shape.dp} replicas (ZeRO-1)" if flat.zero1 else ""),
    ]
    if cfg.train.deterministic:
        lines.append("deterministic: the same layout gives the same bits again")
    return "\n".join(lines)


def _layers(layers: range) -> str:
    if len(layers) < 2:
        return f"layer {layers.start}" if layers else "no layer"
    return f"layers {layers.start} to {layers.stop - 1}"
