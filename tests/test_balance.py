"""What a profile is worth, on a model of few layers and a large vocabulary: part of the full suite.

Ranks outnumber the cores here, so stages do not compute side by side: each possible stage is
measured alone, in one process, in seconds of CPU time, which other processes do not stretch. The
step is then made by stages that sleep for the measured times, on four ranks over gloo.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from launch import profile as profile_module
from launch.build import make_plan
from launch.config import Config, TrainConfig
from launch.partition import layers_of, split
from launch.profile import Probe, measure
from megalite.mesh import Mesh, Transport
from megalite.parallel_config import ParallelConfig, mesh_shape
from megalite.pipeline.executor import Batch, Executor
from megalite.pipeline.p2p import Channels
from megalite.schedule.simulate import simulate
from model.config import GPTConfig
from tests.ranks import run_ranks

PP, LAYERS, ROUNDS, STEPS = 4, 8, 5, 3
CFG = Config(
    model=GPTConfig(
        num_layers=LAYERS, hidden_size=128, num_heads=4, seq_length=64, vocab_size=6000
    ),
    parallel=ParallelConfig(pp=PP),
    train=TrainConfig(global_batch_size=32, micro_batch_size=4, dtype="fp32"),
)
Times = tuple[float, float, float]  # F, I, W
Kind = tuple[int, int]  # stage, blocks


def every_split() -> Iterator[tuple[int, ...]]:
    def of(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
        if stages == 1:
            yield (layers,)
            return
        for first in range(layers + 1):
            yield from ((first, *rest) for rest in of(layers - first, stages - 1))

    return of(LAYERS, PP)


def measured_stages() -> dict[Kind, Times]:
    """The times of a stage with so many blocks: the first, one between (number 1), the last."""
    kinds = [(s, n) for s in (0, 1, PP - 1) for n in range(LAYERS + 1) if s != 1 or n]
    probes = {
        (s, n): Probe(CFG, Mesh.single(), range(n), first=s == 0, last=s == PP - 1)
        for s, n in kinds
    }
    rounds = [{kind: probe.run() for kind, probe in probes.items()} for _ in range(ROUNDS + 1)]

    def middle(kind: Kind, part: int) -> float:
        return median(r[kind][part] for r in rounds[1:])

    found: dict[Kind, Times] = {k: (middle(k, 0), middle(k, 1), middle(k, 2)) for k in kinds}
    found |= {(s, n): found[1, n] for s in range(2, PP - 1) for n in range(1, LAYERS + 1)}
    return found | {(s, 0): (0.0, 0.0, 0.0) for s in range(1, PP - 1)}


class Sleeping:
    """What the executor asks of a stage; it takes the time and computes nothing."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, index: int, times: Times) -> None:
        self.module, self.times, self.saved = self, times, set[int]()
        self.first, self.last = index == 0, index == PP - 1

    def hidden_shape(self, micro_batch_size: int, seq_length: int) -> tuple[int, ...]:
        return (micro_batch_size, seq_length)

    def forward(
        self, microbatch: int, x: Tensor, targets: Tensor | None = None, rows: Any = None
    ) -> Tensor:
        time.sleep(self.times[0])
        self.saved.add(microbatch)
        return torch.zeros(() if self.last else x.shape)

    def backward(self, microbatch: int, grad: Tensor | None) -> Tensor | None:
        time.sleep(self.times[1] + self.times[2])
        self.saved.remove(microbatch)
        return None if self.first else torch.zeros(self.hidden_shape(1, 8))

    def live(self, microbatch: int) -> bool:
        return microbatch in self.saved

    @property
    def live_microbatches(self) -> int:
        return len(self.saved)


def sleep_steps(transport: Transport, splits: Sequence[Sequence[Times]]) -> list[float]:
    """Median seconds of a step of each split; the splits take turns."""
    mesh = Mesh.create(mesh_shape(CFG.parallel, PP), transport)
    plan, rank = make_plan(CFG, 1), mesh.pp.index
    channels = Channels(mesh, plan)
    stages: list[Any] = [{rank: Sleeping(rank, times[rank])} for times in splits]
    executors = [Executor(rank, stage, channels) for stage in stages]
    rows = torch.zeros(plan.num_microbatches, 1, 8)
    taken: list[list[float]] = [[] for _ in splits]
    for _ in range(STEPS):
        for executor, times in zip(executors, taken, strict=True):
            mesh.world.all_reduce(torch.zeros(1)).wait()
            start = time.perf_counter()
            executor.run(plan, Batch(rows, rows))
            longest = torch.tensor([time.perf_counter() - start])
            mesh.world.all_reduce(longest, "max").wait()
            times.append(float(longest))
    mesh.close()
    return [median(times) for times in taken]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_profile_finds_the_best_split_and_is_worth_what_the_simulator_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Clock:
        perf_counter = staticmethod(time.process_time)

    monkeypatch.setattr(profile_module, "time", Clock)
    plan = make_plan(CFG, 1)
    costs = measure(CFG, Mesh.single(), ROUNDS)
    chosen = tuple(len(r) for r in split(CFG, costs, plan.rank_of))
    uniform = tuple(len(r) for r in layers_of(CFG, plan))
    stages = measured_stages()

    def slowest(counts: tuple[int, ...]) -> float:
        return max(sum(stages[s, n]) for s, n in enumerate(counts))

    best = min(every_split(), key=slowest)
    print(f"chosen {chosen}: {1e3 * slowest(chosen):.2f} ms, best {best}: ", end="")
    print(f"{1e3 * slowest(best):.2f} ms, uniform {uniform}: {1e3 * slowest(uniform):.2f} ms")
    assert slowest(chosen) <= 1.05 * slowest(best)
    assert slowest(uniform) > 1.05 * slowest(best), "there is nothing to gain here"

    stretch = 0.15 / slowest(uniform)  # long enough for the waking-up not to count
    splits: list[list[Times]] = []
    steps = []
    for counts in (uniform, chosen):
        times = [stages[s, n] for s, n in enumerate(counts)]
        splits.append([(f * stretch, i * stretch, w * stretch) for f, i, w in times])
        forward, input_grad, weight_grad = zip(*splits[-1], strict=True)
        steps.append(simulate(plan, forward, input_grad, weight_grad).makespan)
    taken = run_ranks(PP, sleep_steps, splits, timeout_s=300.0)[0]
    predicted, got = steps[0] / steps[1], taken[0] / taken[1]
    print(f"a step is faster by {predicted:.3f} as simulated, {got:.3f} as measured")
    assert got == pytest.approx(predicted, rel=0.1)
    assert got > 1.0
