"""Planted faults: each breaks one thing that a layout needs, and must be seen by parity."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from launch.build import Training, make_plan
from launch.config import Config
from megalite.mesh import DONE, Axis, Work
from megalite.pipeline.p2p import Kind
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from tests.parity.harness import Fault


def _without(training: Training, name: str) -> None:
    """Let the reducer see an axis of size 1."""
    training.reducer.mesh = copy.copy(training.mesh)
    setattr(training.reducer.mesh, name, Axis(name))


def no_dp_sum(training: Training) -> None:
    """Each replica keeps its own gradient; under ZeRO-1 it updates its share with that."""
    training.reducer.mesh = copy.copy(training.mesh)
    training.reducer.mesh.dp = _deaf(training.mesh.dp)


def no_partial_sum(training: Training) -> None:
    _without(training, "tp")


def no_tie_sum(training: Training) -> None:
    _without(training, "tie")


def doubled_bias(training: Training) -> None:
    def again(module: RowParallelLinear, _: Any, out: Tensor) -> Tensor:
        assert module.bias is not None
        return out + module.bias.detach()

    for gpt in training.gpt.values():
        for module in gpt.modules():
            if isinstance(module, RowParallelLinear):
                # Biases start at zero, where two of them are as good as one.
                assert module.bias is not None
                with torch.no_grad():
                    module.bias.fill_(0.01)
                module.register_forward_hook(again)


@dataclass
class _Deaf:
    """A group that gathers, but whose sums are its own part only."""

    real: Any
    index: int
    size: int

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Work:
        return DONE

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        return self.real.all_gather(output, tensor)  # type: ignore[no-any-return]

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        output.copy_(tensor.chunk(self.size)[self.index])
        return DONE


def _deaf(axis: Axis) -> Axis:
    return replace(axis, group=_Deaf(axis.group, axis.index, axis.size))  # type: ignore[arg-type]


def no_input_grad_sum(training: Training) -> None:
    for gpt in training.gpt.values():
        for module in gpt.modules():
            if isinstance(module, ColumnParallelLinear):
                module.layout = replace(module.layout, tp=_deaf(module.layout.tp))


def lost_gradient(training: Training) -> None:
    """Stages get a gradient of zero from the next."""
    channels = training.executor.channels
    send = channels.send

    def silent(kind: Kind, receiver: int, tensor: Tensor) -> Work:
        return send(kind, receiver, torch.zeros_like(tensor) if kind == "B" else tensor)

    channels.send = silent  # type: ignore[method-assign]


def swapped_microbatches(training: Training) -> None:
    """The last stage compares a microbatch with the targets of another."""
    run = training.executor.run

    def wrong(plan: Any, batch: Any, reducer: Any = None) -> Any:
        return run(plan, replace(batch, targets=batch.targets.roll(1, 0)), reducer)

    if training.has_last_stage:
        training.executor.run = wrong  # type: ignore[method-assign]


def no_gather(training: Training) -> None:
    """Replicas go on with the old weights outside their own share."""
    training.flat.zero1 = False


def a_stale_bucket(training: Training) -> None:
    """One bucket, that of the last use, is not gathered."""
    training.flat._by_use.pop()


def norm_of_a_share(training: Training) -> None:
    """Of the replicas only the first counts its share in the norm."""
    for bucket in training.flat.buckets:
        bucket.counted = bucket.counted and training.mesh.dp.index == 0


def applicable(cfg: Config, dp: int) -> list[Fault]:
    """The faults that a layout must notice."""
    parallel, found = cfg.parallel, []
    cut = parallel.sequence_parallel and parallel.tp > 1
    if dp > 1:
        found += [no_dp_sum, norm_of_a_share]
    if dp > 1 and parallel.zero1:
        found += [no_gather, a_stale_bucket]
    if cut or parallel.tp > cfg.model.kv_heads:
        found.append(no_partial_sum)
    if parallel.tp > 1:
        found.append(no_input_grad_sum)
        if cfg.model.bias:
            found.append(doubled_bias)
    if parallel.pp > 1:
        found += [lost_gradient, swapped_microbatches]
        ends = make_plan(cfg, dp).rank_of
        if cfg.model.tied_embeddings and ends[0] != ends[-1]:
            found.append(no_tie_sum)
    return found
