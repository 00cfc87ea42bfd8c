"""Faults that break one thing in one place, and recorded runs of the parity harness's models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from launch.build import Training, build
from launch.config import Config
from launch.recording import recorded
from megalite.config import to_yaml
from megalite.grads import WeightProduct
from megalite.mesh import Axis, Mesh, Transport, Work
from megalite.parallel_config import mesh_shape
from megalite.pipeline.executor import Batch
from megalite.pipeline.p2p import Kind
from megalite.slices import get_slice
from megalite.tensor_parallel.cross_entropy import IGNORE
from model.gpt import Block
from tests.parity.faults import no_input_grad_sum, no_tie_sum
from tests.parity.harness import OPTIM, batch_of

Fault = Callable[[Training], None]


def record_steps(mesh: Mesh, cfg: Config, out: Path, fault: Fault | None = None) -> list[float]:
    """Train as ``cfg`` says and leave a record in ``out``; the losses."""
    cfg = replace(cfg, run=replace(cfg.run, record=True, dir=str(out)))
    training = build(cfg, mesh)
    if fault is not None:
        fault(training)  # before the record's hooks: inside of what they look at
    training = recorded(training, 0)
    if mesh.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.yaml").write_text(to_yaml(cfg))
    losses = []
    for step in range(cfg.train.steps):
        batch = batch_of(cfg, step, mesh.dp.index, mesh.shape.dp)
        losses.append(float(training.step(batch, OPTIM.lr).loss))
    return losses


def body(transport: Transport, runs: list[tuple[Config, Path, Fault | None]]) -> list[list[float]]:
    """A rank of several runs of one layout, one after the other."""
    mesh = Mesh.create(mesh_shape(runs[0][0].parallel, transport.world_size), transport)
    try:
        return [record_steps(mesh, cfg, out, fault) for cfg, out, fault in runs]
    finally:
        mesh.close()


def _at(training: Training, **where: int) -> bool:
    axes: dict[str, Axis] = {a: getattr(training.mesh, a) for a in where}
    return all(axes[a].index == index for a, index in where.items())


def _blocks(training: Training, layer: int) -> list[Block]:
    name = f"layers.{layer}.mlp_norm.weight"
    blocks = [b for gpt in training.gpt.values() for b in gpt.blocks if isinstance(b, Block)]
    return [b for b in blocks if get_slice(b.mlp_norm.weight).name == name]


def _parameters(training: Training, name: str) -> list[nn.Parameter]:
    return [p for p in training.flat.parameters() if get_slice(p).name == name]


def _scales(module: nn.Module, factor: float) -> None:
    module.register_forward_hook(lambda _m, _args, out: out * factor)


def scaled_attention(training: Training) -> None:
    if _at(training, tp=1, dp=0):
        for block in _blocks(training, 2):
            _scales(block.attention, 1 + 1e-6)


def wrong_bias(training: Training) -> None:
    def add(_m: nn.Module, _args: Any, out: Tensor) -> Tensor:
        return out + 1e-6

    if _at(training, tp=0):
        for block in _blocks(training, 1):
            block.mlp.down.register_forward_hook(add)


def wrong_norm(training: Training) -> None:
    if _at(training, tp=1):
        for gpt in training.gpt.values():
            if gpt.norm is not None:
                gpt.norm.eps *= 10


def not_a_number(training: Training) -> None:
    def spoil(_m: nn.Module, _args: Any, out: Tensor) -> Tensor:
        out = out.clone()
        out[0, 0, 0] = torch.nan
        return out

    for block in _blocks(training, 3):
        block.mlp.register_forward_hook(spoil)


def _with_batch(training: Training, change: Callable[[Tensor, Tensor], None]) -> None:
    run = training.executor.run

    def wrong(plan: Any, batch: Batch, reducer: Any = None) -> Any:
        assert batch.targets is not None
        copy = Batch(batch.tokens.clone(), batch.targets.clone())
        assert copy.targets is not None
        change(copy.tokens, copy.targets)
        return run(plan, copy, reducer)

    training.executor.run = wrong  # type: ignore[method-assign]


def dropped_microbatch(training: Training) -> None:
    """One replica leaves the targets of its last microbatch out."""

    def drop(_: Tensor, targets: Tensor) -> None:
        targets[-1] = IGNORE

    if _at(training, dp=0):
        _with_batch(training, drop)


def swapped_rows(training: Training) -> None:
    """Two rows of a microbatch change places."""

    def swap(tokens: Tensor, targets: Tensor) -> None:
        for rows in (tokens, targets):
            rows[1] = rows[1].flip(0)

    _with_batch(training, swap)


def _with_messages(training: Training, kind: Kind, factor: float) -> None:
    channels = training.executor.channels
    send = channels.send

    def wrong(which: Kind, receiver: int, tensor: Tensor) -> Work:
        return send(which, receiver, tensor * factor if which == kind else tensor)

    channels.send = wrong  # type: ignore[method-assign]


def spoiled_message(training: Training) -> None:
    if _at(training, pp=0):
        _with_messages(training, "F", 1 + 1e-6)


def spoiled_gradient_message(training: Training) -> None:
    if _at(training, pp=1):
        _with_messages(training, "B", 1 + 1e-6)


class _ScaledGrad(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (1 + 1e-6)


def scaled_input_grad(training: Training) -> None:
    """The input gradient of one MLP."""

    def scale(_m: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (_ScaledGrad.apply(args[0]),)

    for block in _blocks(training, 1):
        block.mlp.register_forward_pre_hook(scale)


def no_input_sum_in_one_layer(training: Training) -> None:
    """The sum over tp of the input gradient of one attention."""

    @dataclass
    class Only:
        gpt: dict[int, nn.Module]

    for block in _blocks(training, 2):
        no_input_grad_sum(Only({0: block.attention}))  # type: ignore[arg-type]


def lost_weight_grad(training: Training) -> None:
    """A rank forgets the weight product of one linear."""
    for block in _blocks(training, 3) if _at(training, tp=0, dp=0) else []:
        mine = block.mlp.up.weights[0]
        sink = block.mlp.up.layout.sink
        add = sink.add_product

        def forget(product: WeightProduct, mine: Any = mine, add: Any = add) -> None:
            if product.weights[0] is mine:
                product = replace(product, dys=tuple(torch.zeros_like(d) for d in product.dys))
            add(product)

        sink.add_product = forget  # type: ignore[method-assign]


def doubled_norm_grad(training: Training) -> None:
    for block in _blocks(training, 0) if _at(training, tp=1) else []:
        norm, sink = block.mlp_norm.weight, training.gpt[0].layout.sink
        add = sink.add

        def twice(param: Tensor, grad: Tensor, norm: Any = norm, add: Any = add) -> None:
            add(param, 2 * grad if param is norm else grad)

        sink.add = twice  # type: ignore[method-assign]


def wrong_update(training: Training) -> None:
    """One replica's update of one parameter is a little too large."""
    update = training.optimizer.step

    def step(*args: Any) -> None:
        update(*args)
        for param in _parameters(training, "layers.1.attention.v.weight"):
            param.data.mul_(1 + 1e-6)

    if _at(training, dp=1, tp=0):
        training.optimizer.step = step  # type: ignore[method-assign]


__all__ = ["no_tie_sum"]
