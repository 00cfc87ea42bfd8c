"""Stages that sleep instead of computing, so that many ranks on few cores behave like devices."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from launch.tracing import origin_of
from megalite.clock import clock_offset
from megalite.grads import GradSink
from megalite.mesh import Mesh, Transport, Work
from megalite.mesh_shape import MeshShape
from megalite.pipeline.executor import Batch, Executor
from megalite.pipeline.p2p import Channels, Kind
from megalite.pipeline.stage import Stage
from megalite.schedule.generators import build_schedule
from megalite.schedule.lower import lower
from megalite.trace import Trace, write_trace


class _Sleep(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grad, None, None


class SleepingModule:
    """The identity on (b, s) hidden states, in its time; the last stage sums them up."""

    def __init__(self, forward_s: float, first: bool, last: bool) -> None:
        self.forward_s, self.first, self.last = forward_s, first, last
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def __call__(self, x: Tensor, targets: Tensor | None = None, rows: Any = None) -> Tensor:
        x = x.double() * self.weight if self.first else x
        out: Tensor = _Sleep.apply(x, self.forward_s, 2 * self.forward_s)
        return out.sum() if self.last else out

    def parameters(self) -> Iterator[nn.Parameter]:
        yield self.weight

    def hidden_shape(self, micro_batch_size: int, seq_length: int) -> tuple[int, ...]:
        return micro_batch_size, seq_length


@dataclass(frozen=True)
class Case:
    """What the stages of a pipeline need for a forward (a backward takes twice that), and how
    late messages arrive, by (sender, receiver, kind)."""

    schedule: str = "1f1b"
    num_microbatches: int = 6
    virtual_stages: int = 1
    forward_s: float = 0.01
    slow: dict[int, float] = field(default_factory=dict)
    late: dict[tuple[int, int, Kind], float] = field(default_factory=dict)
    steps: int = 3


class _Delayed:
    def __init__(self, work: Work, delay_s: float) -> None:
        self.work, self.delay_s = work, delay_s

    def wait(self) -> None:
        self.work.wait()
        time.sleep(self.delay_s)


class LateChannels(Channels):
    """Channels on which the receipt of some messages takes longer."""

    late: dict[tuple[int, int, Kind], float] = {}

    def recv(self, kind: Kind, sender: int, tensor: Tensor) -> Work:
        me = self.mesh.pp.index
        work = self._groups[sender, me, kind].recv(tensor, 0)
        delay = self.late.get((sender, me, kind))
        return self.trace.message(sender, _Delayed(work, delay) if delay else work)


def run_traced(transport: Transport, case: Case, folder: str) -> None:
    """Some steps of a case, traced."""
    pp = transport.world_size
    mesh = Mesh.create(MeshShape(pp=pp), transport)
    plan = lower(build_schedule(case.schedule, pp, case.num_microbatches, case.virtual_stages))
    trace = Trace(most=100_000)
    channels = LateChannels(mesh, plan, trace)
    channels.late = case.late
    last = plan.num_stages - 1
    stages = {
        s: Stage(
            SleepingModule(case.forward_s * case.slow.get(s, 1.0), s == 0, s == last),
            s,
            plan.num_stages,
            GradSink(),
            torch.float64,
            mesh.device,
        )
        for s in plan.stages_of(mesh.pp.index)
    }
    executor = Executor(mesh.pp.index, stages, channels, trace)
    tokens = torch.zeros(case.num_microbatches, 1, 8, dtype=torch.long)
    first = clock_offset(mesh.world, mesh.device)
    for step in range(1, case.steps + 1):
        with trace.step(step):
            executor.run(plan, Batch(tokens, tokens))
            with trace.span("totals"):
                mesh.world.all_reduce(torch.zeros(1)).wait()
    last_offset = clock_offset(mesh.world, mesh.device)
    write_trace(Path(folder), trace, origin_of(mesh, plan), first, last_offset)
    mesh.close()
