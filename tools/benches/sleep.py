"""Stages that sleep instead of computing: ranks behave like devices, however few cores there are.

The same module runs in megalite's executor and in ``torch.distributed.pipelining``. Its graph has
two nodes, so that both can ask for them apart: one sleeps in F and in I, the other in W.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as peers

from megalite.grads import GradSink, WeightProduct
from megalite.mesh import Mesh
from megalite.pipeline.executor import Batch, Executor
from megalite.pipeline.p2p import Channels
from megalite.pipeline.stage import Stage
from megalite.schedule.action import Plan
from tools.benches.clock import Contestant

HIDDEN = 4096
"""Elements of a message, fp32."""


@dataclass(frozen=True)
class Times:
    """Seconds of F, I and W of one stage and microbatch."""

    forward: float
    input_grad: float
    weight_grad: float

    def shared(self, chunks: int) -> Times:
        """Of each of a rank's ``chunks`` stages."""
        parts = (self.forward, self.input_grad, self.weight_grad)
        return Times(*(t / chunks for t in parts))


@dataclass
class _Nap(WeightProduct):
    """A weight product that takes its time and gives nothing."""

    seconds: float = 0.0

    def run(self, sink: GradSink) -> None:
        time.sleep(self.seconds)
        sink.ready(self.weights[0])


class _Layer(torch.autograd.Function):
    """The identity in F and I; with a sink, W is handed to it, else it is the weight's node's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, times: Times, sink: GradSink | None) -> Tensor:
        ctx.times, ctx.sink, ctx.weight, ctx.done = times, sink, weight, False
        time.sleep(times.forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        # torch's pipelining goes through this node again to reach the weight in W.
        if not ctx.done:
            time.sleep(ctx.times.input_grad)
        ctx.done = True
        if ctx.sink is None:
            return grad.clone(), torch.zeros_like(ctx.weight), None, None
        nap = _Nap((ctx.weight,), (), grad, seconds=ctx.times.weight_grad)
        ctx.sink.add_product(nap)
        return grad.clone(), None, None, None


class _Weight(torch.autograd.Function):
    """The identity, whose backward is W."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class SleepStage(nn.Module):
    """A stage of one sleeping layer on (b, d) hidden states.

    Args:
        sink: where W goes as a product of its own; without one autograd reaches it.
        sums: whether to end in the sum that stands for the loss.
    """

    def __init__(self, times: Times, sink: GradSink | None = None, sums: bool = False) -> None:
        super().__init__()
        self.times, self.sink, self.sums = times, sink, sums
        self.weight = nn.Parameter(torch.zeros(1))

    def hidden_shape(self, micro_batch_size: int, seq_length: int) -> tuple[int, int]:
        return micro_batch_size, seq_length

    def forward(self, x: Tensor, targets: Tensor | None = None, rows: Any = None) -> Tensor:
        weight: Tensor = self.weight
        if self.sink is None:
            weight = _Weight.apply(weight, self.times.weight_grad)
        out: Tensor = _Layer.apply(x, weight, self.times, self.sink)
        return out.sum() if self.sums else out


def ours(mesh: Mesh, plan: Plan, times: Times) -> Contestant:
    """A step of megalite's executor. Collective over the mesh."""
    rank, last = mesh.pp.index, plan.num_stages - 1
    mine = plan.stages_of(rank)
    stages = {}
    for s in mine:
        sink = GradSink()
        module = SleepStage(times.shared(len(mine)), sink, sums=s == last)
        stages[s] = Stage(module, s, plan.num_stages, sink, torch.float32, mesh.device)
    executor = Executor(rank, stages, Channels(mesh, plan))
    batch = Batch(torch.zeros(plan.num_microbatches, 1, HIDDEN), None)
    return lambda: executor.run(plan, batch)


PEERS: dict[str, type[Any]] = {
    "gpipe": peers.ScheduleGPipe,
    "1f1b": peers.Schedule1F1B,
    "interleaved_1f1b": peers.ScheduleInterleaved1F1B,
    "looped_bfs": peers.ScheduleLoopedBFS,
    "zb_v": peers.ScheduleZBVZeroBubble,
    "dualpipe_v": peers.ScheduleDualPipeV,
}
"""The schedules of ``torch.distributed.pipelining``, by our names."""


def torch_step(mesh: Mesh, plan: Plan, times: Times) -> Contestant:
    """A step of torch's schedule of the same name, with its stages where ``plan`` has them."""
    mine = plan.stages_of(mesh.pp.index)
    stages = [
        pipelining.PipelineStage(
            SleepStage(times.shared(len(mine))), s, plan.num_stages, mesh.device
        )
        for s in mine
    ]
    kind = PEERS[plan.name]
    single = issubclass(kind, peers.PipelineScheduleSingle)
    schedule = kind(
        stages[0] if single else stages,
        plan.num_microbatches,
        loss_fn=lambda out, _: out.sum(),
        scale_grads=False,
    )
    x, target = torch.zeros(plan.num_microbatches, HIDDEN), torch.zeros(plan.num_microbatches)
    inputs = (x,) if 0 in mine else ()
    targets = target if plan.num_stages - 1 in mine else None
    return lambda: schedule.step(*inputs, target=targets, return_outputs=False)


def floor(num_microbatches: int, chunks: int, times: Times) -> Contestant:
    """One rank's stages in a plain loop: every sleep of a step and autograd's own time, but no
    messages, no waiting and no engine."""
    stages = [SleepStage(times.shared(chunks)) for _ in range(chunks)]
    x, grad = torch.zeros(1, HIDDEN, requires_grad=True), torch.ones(1, HIDDEN)

    def step() -> None:
        for _ in range(num_microbatches):
            for stage in stages:
                torch.autograd.backward([stage(x)], [grad])

    return step
