"""What a layout costs, in real compute on two ranks: beside plain PyTorch, DDP and FSDP2."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from launch.build import build
from launch.config import Config, TrainConfig
from megalite.mesh import Mesh, Transport
from megalite.mesh_shape import MeshShape
from megalite.parallel_config import ParallelConfig
from megalite.pipeline.executor import Batch
from model.config import GPTConfig
from tools.benches import gpt
from tools.benches.clock import Contestant, slowest, time_in_turn
from tools.benches.pipeline import gpt_rows
from tools.benches.plain import PlainGPT, plain_step
from tools.benches.ranks import run_ranks
from tools.benches.rows import Goal, Row, Sample

REPETITIONS = 7


@dataclass(frozen=True)
class Work:
    """A model, and the microbatches of a step in one process."""

    model: GPTConfig
    num_microbatches: int
    micro_batch_size: int

    @property
    def tokens(self) -> int:
        return self.num_microbatches * self.micro_batch_size * self.model.seq_length

    def batch(self) -> tuple[Tensor, Tensor]:
        """(m, b, s) token ids and next tokens."""
        made = torch.Generator().manual_seed(1)
        shape = (self.num_microbatches, self.micro_batch_size, self.model.seq_length + 1)
        rows = torch.randint(self.model.vocab_size, shape, generator=made)
        return rows[..., :-1].contiguous(), rows[..., 1:].contiguous()

    def config(self, replicas: int = 1, **parallel: Any) -> Config:
        batch_size = self.num_microbatches * self.micro_batch_size * replicas
        train = TrainConfig(
            global_batch_size=batch_size, micro_batch_size=self.micro_batch_size, dtype="fp32"
        )
        layout = ParallelConfig(**parallel)
        return replace(Config(), model=self.model, parallel=layout, train=train)


NARROW = Work(gpt.MODEL, 4, 1)  # 8.5M parameters
WIDE = Work(
    GPTConfig(num_layers=4, hidden_size=512, num_heads=8, seq_length=256, vocab_size=8192), 1, 4
)


def run() -> list[Row]:
    rows = dp_rows(NARROW, slowest(run_ranks(2, race_dp, NARROW, REPETITIONS)))
    rows += tp_rows(WIDE, slowest(run_ranks(2, race_tp, WIDE, REPETITIONS)))
    return rows + gpt_rows(slowest(run_ranks(2, gpt.race, gpt.MODEL, REPETITIONS)))


def race_dp(transport: Transport, work: Work, repetitions: int) -> dict[str, list[float]]:
    """Seconds of a step: ``one`` on one rank while the other waits, ``two`` on both, each for
    itself, and ``dp2`` together, each with as many tokens as alone."""
    mesh = Mesh.create(MeshShape(dp=2), transport)
    first = transport.rank == 0
    plain, ours = plain_of(work), ours_of(work, Mesh.single())
    contestants: dict[str, Contestant] = {
        "plain one": plain if first else idle,
        "ours one": ours if first else idle,
        "plain two": plain,
        "ours two": ours,
        "ours dp2": ours_of(work, mesh, replicas=2),
        "ours dp2 zero1": ours_of(work, mesh, replicas=2, zero1=True),
        "DDP dp2": ddp_of(work),
        "FSDP2 dp2": fsdp_of(work),
    }
    found = time_in_turn(mesh.world, contestants, repetitions)
    contestants.clear()
    del plain, ours
    mesh.close()
    return found


def race_tp(transport: Transport, work: Work, repetitions: int) -> dict[str, list[float]]:
    """Seconds of a step of the same tokens: on one rank, and cut over two."""
    mesh = Mesh.create(MeshShape(tp=2), transport)
    ours = ours_of(work, Mesh.single())
    contestants: dict[str, Contestant] = {
        "one": ours if transport.rank == 0 else idle,
        "tp2": ours_of(work, mesh, tp=2),
        "tp2 sequence parallel": ours_of(work, mesh, tp=2, sequence_parallel=True),
    }
    found = time_in_turn(mesh.world, contestants, repetitions)
    contestants.clear()
    del ours
    mesh.close()
    return found


def idle() -> None:
    """What a rank does whose turn it is not."""


def ours_of(work: Work, mesh: Mesh, replicas: int = 1, **parallel: Any) -> Contestant:
    training = build(work.config(replicas, **parallel), mesh)
    data = Batch(*work.batch())
    return lambda: training.step(data, 1e-4)


def plain_of(work: Work) -> Contestant:
    step, data = plain_step(PlainGPT(work.model)), work.batch()
    return lambda: step(*data)


def ddp_of(work: Work) -> Contestant:
    model = DistributedDataParallel(PlainGPT(work.model))

    def sync(last: bool) -> None:
        model.require_backward_grad_sync = last

    step, data = plain_step(model, sync), work.batch()
    return lambda: step(*data)


def fsdp_of(work: Work) -> Contestant:
    model = PlainGPT(work.model)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    step, data = plain_step(model, model.set_requires_gradient_sync), work.batch()
    return lambda: step(*data)


def dp_rows(work: Work, found: dict[str, Sample]) -> list[Row]:
    """In tokens/s of all ranks together."""
    rate = {
        name: s.rate(work.tokens * (1 if name.endswith("one") else 2)) for name, s in found.items()
    }
    d = work.model.hidden_size
    rows = [
        Row(
            f"GPT d {d}, one rank, tokens/s: beside plain PyTorch",
            rate["ours one"],
            rate["plain one"],
            Goal("at least", 0.98),
        )
    ]
    for name in ("ours dp2", "ours dp2 zero1"):
        what, against = (
            f"GPT d {d}, {name.removeprefix('ours ')}, tokens/s: beside",
            Goal("at least", 0.92),
        )
        rows += [
            Row(f"{what} two processes", rate[name], rate["ours two"], against),
            Row(f"{what} DDP", rate[name], rate["DDP dp2"]),
            Row(f"{what} FSDP2", rate[name], rate["FSDP2 dp2"]),
        ]
    rows.append(
        Row(
            f"GPT d {d}, two processes, tokens/s: beside plain PyTorch",
            rate["ours two"],
            rate["plain two"],
        )
    )
    return rows


def tp_rows(work: Work, found: dict[str, Sample]) -> list[Row]:
    rate = {name: s.rate(work.tokens) for name, s in found.items()}
    what = f"GPT d {work.model.hidden_size}"
    return [
        Row(
            f"{what}, {name}, tokens/s: beside one rank",
            rate[name],
            rate["one"],
            Goal("at least", 1.6),
        )
        for name in ("tp2", "tp2 sequence parallel")
    ]
