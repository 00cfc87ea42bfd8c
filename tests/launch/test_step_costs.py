"""What a step asks of the host and the network besides its own work: nothing that grows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from launch.build import build
from launch.config import Config
from launch.figures import Figures
from megalite.mesh import Mesh, Transport
from megalite.parallel_config import mesh_shape
from tests.counting import CountingTransport
from tests.parity.harness import GPT2, TRAIN, batch_of, config
from tests.ranks import run_ranks


class HostReads(TorchDispatchMode):
    """Counts where the host asks the device for a number, and so waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.count += "_local_scalar_dense" in name or "nonzero" in name
        return func(*args, **(kwargs or {}))


def reads(cfg: Config) -> int:
    training = build(cfg, Mesh.single())
    data = replace(batch_of(cfg, 0, 0, 1), step=1)
    training.step(data, 1e-3)
    with HostReads() as host:
        training.step(data, 1e-3)
    return host.count


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_step_reads_nothing_from_the_device(dtype: str, m: int) -> None:
    model = replace(GPT2, dropout=0.1)
    train = replace(TRAIN, dtype=dtype, global_batch_size=m, micro_batch_size=1)
    assert reads(config(model, train=train, recompute="full")) == 0


def test_a_replayed_policy_reads_one_number_a_step_whatever_the_microbatches() -> None:
    """And so a read is seen."""
    for m in (1, 4):
        train = replace(TRAIN, bad_step="replay", global_batch_size=m, micro_batch_size=1)
        assert reads(config(GPT2, train=train)) == 1


def logged(transport: Transport, cfg: Config, steps: int) -> list[Counter[str]]:
    """Collectives of the whole world by step, with what is gathered to be plotted."""
    counting = CountingTransport(transport)
    mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), counting)
    training = build(cfg, mesh)
    figures = Figures(cfg, mesh, training.plan, training.trace)
    found = []
    for step in range(1, steps + 1):
        counting.reset()
        data = replace(batch_of(cfg, step, mesh.dp.index, mesh.dp.size), step=step)
        training.step(data, 1e-3)
        figures.gather(step)
        figures.of_step(step, 1.0)
        found.append(Counter(r.op for r in counting.select(ranks=mesh.world.ranks)))
    mesh.close()
    return found


def test_logging_sends_nothing_outside_its_interval() -> None:
    train = replace(TRAIN, dtype="fp32", global_batch_size=4)
    for rank in run_ranks(4, logged, config(GPT2, train=train, pp=2), 21):
        for step, sent in enumerate(rank, 1):
            due = {"all_reduce": 1, "all_gather": 1} if step % 10 == 0 else {"all_reduce": 1}
            assert sent == due, f"step {step}"
