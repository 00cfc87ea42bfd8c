"""A small GPT in real compute: one process, a pipeline of ours, and torch's on the same blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import pipelining

from launch.build import Training, build, loss_constant
from launch.config import Config, TrainConfig
from megalite.mesh import Mesh, Transport
from megalite.mesh_shape import MeshShape
from megalite.parallel_config import ParallelConfig
from megalite.pipeline.executor import Batch, Reducer
from megalite.schedule.action import Plan
from megalite.schedule.generators import SCHEDULES
from megalite.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from model.config import GPTConfig
from tools.benches.clock import Contestant, time_in_turn

MODEL = GPTConfig(
    num_layers=8, hidden_size=256, num_heads=4, seq_length=256, vocab_size=8192
)  # 8.5M parameters
MICROBATCHES = 8
MICRO_BATCH_SIZE = 1
TOKENS = MICROBATCHES * MICRO_BATCH_SIZE * MODEL.seq_length
ALONE = ParallelConfig()
# The head costs about two blocks: its rank has fewer.
LAYOUTS: dict[str, ParallelConfig] = {
    "1f1b": ParallelConfig(pp=2, schedule="1f1b", partition=(5, 3)),
    "interleaved_1f1b": ParallelConfig(
        pp=2, schedule="interleaved_1f1b", virtual_stages=2, partition=(3, 2, 2, 1)
    ),
    "zb_h1": ParallelConfig(pp=2, schedule="zb_h1", partition=(5, 3)),
    "zb_v": ParallelConfig(pp=2, schedule="zb_v", virtual_stages=2, partition=(2, 3, 2, 1)),
}


def config(model: GPTConfig, parallel: ParallelConfig) -> Config:
    train = TrainConfig(
        global_batch_size=MICROBATCHES * MICRO_BATCH_SIZE,
        micro_batch_size=MICRO_BATCH_SIZE,
        dtype="fp32",
    )
    return replace(Config(), model=model, parallel=parallel, train=train)


def batch(model: GPTConfig) -> Batch:
    made = torch.Generator().manual_seed(1)
    shape = (MICROBATCHES, MICRO_BATCH_SIZE, model.seq_length + 1)
    rows = torch.randint(model.vocab_size, shape, generator=made)
    return Batch(rows[..., :-1].contiguous(), rows[..., 1:].contiguous())


def race(transport: Transport, model: GPTConfig, repetitions: int) -> dict[str, list[float]]:
    """Seconds of a training step on two ranks, by contestant.

    ``one`` is a process that computes while the other waits; ``two`` are both at once, each for
    itself: what the machine has to give.
    """
    mesh = Mesh.create(MeshShape(pp=2), transport)
    data = batch(model)
    single = step_of(build(config(model, ALONE), Mesh.single()), data)
    contestants: dict[str, Contestant] = {
        "one": single if transport.rank == 0 else (lambda: None),
        "two": single,
    }
    for name, parallel in LAYOUTS.items():
        if name in SCHEDULES:
            contestants[f"ours {name}"] = step_of(build(config(model, parallel), mesh), data)
    contestants["torch 1f1b"] = step_of(torch_training(model, mesh), data)
    found = time_in_turn(mesh.world, contestants, repetitions)
    contestants.clear()
    del single
    mesh.close()
    return found


def step_of(training: Training, data: Batch) -> Callable[[], object]:
    return lambda: training.step(data, 1e-4)


def torch_training(model: GPTConfig, mesh: Mesh) -> Training:
    """Our stages, reducer and optimizer with torch's 1F1B in the place of our executor."""
    training = build(config(model, LAYOUTS["1f1b"]), mesh)
    training.executor = _TorchEngine(training)  # type: ignore[assignment]
    return training


class _TorchEngine:
    """Stands in for ``Executor``: one stage a rank."""

    def __init__(self, training: Training) -> None:
        self.training, mesh = training, training.mesh
        self.first, self.last = mesh.pp.index == 0, mesh.pp.index == mesh.pp.size - 1
        stage = pipelining.PipelineStage(
            training.gpt[mesh.pp.index], mesh.pp.index, mesh.pp.size, mesh.device
        )
        self.scale = 1.0 / loss_constant(training.cfg)
        self.schedule = pipelining.Schedule1F1B(
            stage, training.plan.num_microbatches, loss_fn=self.loss, scale_grads=False
        )

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        tp = self.training.mesh.tp
        return vocab_parallel_cross_entropy(logits, targets.t().contiguous(), tp).sum() * self.scale

    def run(self, plan: Plan, batch: Batch, reducer: Reducer | None = None) -> Tensor | None:
        assert batch.targets is not None
        losses: list[Tensor] = []
        self.schedule.step(
            *((batch.tokens.flatten(0, 1),) if self.first else ()),
            target=batch.targets.flatten(0, 1) if self.last else None,
            losses=losses,
            return_outputs=False,
        )
        return torch.stack(losses).sum().detach() / self.scale if self.last else None
