"""Runs a few steps of a small model in any layout and gathers what came out, by global name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from data.config import DataConfig
from launch.build import Training, build
from launch.config import Config, TrainConfig
from megalite.mesh import Mesh, Transport
from megalite.mesh_shape import MeshShape
from megalite.optim.config import OptimConfig
from megalite.parallel_config import ParallelConfig, mesh_shape
from megalite.pipeline.executor import Batch
from megalite.slices import Piece
from megalite.tensor_parallel.cross_entropy import IGNORE
from model.config import GPTConfig

GPT2 = GPTConfig(
    num_layers=4, hidden_size=32, num_heads=4, ffn_hidden_size=64, seq_length=16, vocab_size=65
)
LLAMA = replace(
    GPT2,
    num_kv_heads=2,
    norm="rmsnorm",
    activation="swiglu",
    position="rope",
    tied_embeddings=False,
    bias=False,
)
OPTIM = OptimConfig(lr=1e-2, warmup_steps=0, lr_schedule="constant", clip_grad_norm=1.0)
TRAIN = TrainConfig(global_batch_size=6, micro_batch_size=2, dtype="fp64", steps=3)


EOD = 5
BLANK = "blank"  # the name of a run whose every third row has no targets


def config(
    model: GPTConfig = GPT2,
    *,
    train: TrainConfig = TRAIN,
    reset_at_document: bool = False,
    **parallel: Any,
) -> Config:
    return Config(
        model=model,
        parallel=ParallelConfig(**parallel),
        data=DataConfig(reset_at_document=reset_at_document),
        optim=OPTIM,
        train=train,
    )


@dataclass
class Outcome:
    """What a run came to; ``grads`` are those of the first step, before clipping, ``weights``
    those of the first replica, ``others`` those of the rest. ``evaluated`` are losses of other
    rows, in the middle of training and at its end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    initial: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    others: list[dict[str, Tensor]] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)


Part = tuple[str, tuple[int, ...], tuple[int, ...], Tensor]


def parts(found: Iterable[Piece]) -> list[Part]:
    """Owned pieces as plain copies that can leave the process."""
    return [(p.name, p.shape, p.offset, p.tensor.clone()) for p in found if p.owner]


def assemble(ranks: Iterable[list[Part]]) -> dict[str, Tensor]:
    """Global tensors from the pieces of all ranks; fails if an element is missing or given
    twice."""
    whole: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for name, shape, offset, tensor in (part for rank in ranks for part in rank):
        at = tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape, strict=True))
        whole.setdefault(name, torch.zeros(shape, dtype=tensor.dtype))[at] = tensor
        seen.setdefault(name, torch.zeros(shape, dtype=torch.int8))[at] += 1
    for name, count in seen.items():
        assert bool((count == 1).all()), f"{name}: an element is not owned exactly once"
    return whole


def global_rows(cfg: Config, step: int) -> tuple[Tensor, Tensor]:
    """The (gbs, s) token ids and next tokens of a step; a few of the latter are ignored.

    Where documents count, about every eighth token ends one.
    """
    draw = torch.Generator().manual_seed(1000 + step)
    shape = (cfg.train.global_batch_size, cfg.model.seq_length + 1)
    rows = torch.randint(0, cfg.model.vocab_size, shape, generator=draw)
    if cfg.data.reset_at_document:
        rows[torch.rand(shape, generator=draw) < 0.12] = EOD
    targets = rows[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=draw) < 0.1] = IGNORE
    if cfg.run.name == BLANK:
        targets[2::3] = IGNORE
    return rows[:, :-1].contiguous(), targets


def batch_of(cfg: Config, step: int, dp_index: int, dp: int) -> Batch:
    """A replica's microbatches: row i is in microbatch i // (mbs dp) of rank (i // mbs) % dp."""
    tokens, targets = global_rows(cfg, step)
    mbs = cfg.train.micro_batch_size
    missing = -tokens.shape[0] % (mbs * dp)
    tokens = torch.cat([tokens, tokens.new_zeros(missing, tokens.shape[1])])
    targets = torch.cat([targets, targets.new_full((missing, targets.shape[1]), IGNORE)])
    cut = (-1, dp, mbs, tokens.shape[1])
    samples = step * cfg.train.global_batch_size + torch.arange(tokens.shape[0])
    return Batch(
        tokens.view(cut)[:, dp_index].contiguous(),
        targets.view(cut)[:, dp_index].contiguous(),
        samples.view(cut[:-1])[:, dp_index].contiguous(),
        step,
    )


Fault = Callable[[Training], None]
Rules = Callable[[], AbstractContextManager[None]]


def evaluate(training: Training, step: int) -> float:
    """The mean loss of rows that are not trained on."""
    dp = training.mesh.dp
    summed, count = training.losses(batch_of(training.cfg, step, dp.index, dp.size))
    return float(summed / count)


def train(
    cfg: Config, mesh: Mesh, fault: Fault | None = None, rules: Rules = nullcontext
) -> dict[str, Any]:
    """``cfg.train.steps`` steps, an evaluation between the second and the third and one at the
    end; a rank's share of an Outcome.

    ``rules`` is entered around all that a step does on the device.
    """
    training = build(cfg, mesh, eod=EOD)
    if fault is not None:
        fault(training)
    out: dict[str, Any] = {"losses": [], "norms": [], "evaluated": [], "replica": mesh.dp.index}
    out["initial"] = parts(training.flat.weight_pieces()) if mesh.dp.index == 0 else []
    totals = None
    for step in range(cfg.train.steps):
        batch = batch_of(cfg, step, mesh.dp.index, mesh.shape.dp)
        if step == 2 and totals is not None:
            with rules():
                training.optimizer.step(cfg.optim.lr, totals.factor, totals.finite)
            out["evaluated"].append(evaluate(training, 98))
            totals = None
        with rules():
            if totals is not None:  # gathers of an update run into the next step
                training.optimizer.step(cfg.optim.lr, totals.factor, totals.finite)
            totals = training.gradients(batch)
        if step == 0:
            scale = totals.tokens / (cfg.train.global_batch_size * cfg.model.seq_length)
            out["grads"] = [
                (n, s, o, t / scale) for n, s, o, t in parts(training.flat.grad_pieces(share=True))
            ]
        out["losses"].append(float(totals.loss))
        out["norms"].append(float(totals.grad_norm))
    assert totals is not None
    with rules():
        training.optimizer.step(cfg.optim.lr, totals.factor, totals.finite)
        training.flat.current()
    out["weights"] = parts(training.flat.weight_pieces())
    out["evaluated"].append(evaluate(training, 99))
    return out


def body(transport: Transport, cfg: Config, fault: Fault | None = None) -> dict[str, Any]:
    """One rank of ``train``; also the name by which faults are told their rank."""
    shape: MeshShape = mesh_shape(cfg.parallel, transport.world_size)
    mesh = Mesh.create(shape, transport)
    try:
        return train(cfg, mesh, fault)
    finally:
        mesh.close()


def join(ranks: list[dict[str, Any]], agreed: bool = True) -> Outcome:
    """The outcome of all ranks: where ``agreed``, it must be the same on each."""
    first = ranks[0]
    for other in ranks[1:] if agreed else []:
        for key in ("losses", "norms", "evaluated"):
            assert other[key] == first[key], f"ranks disagree on {key}"
    weights = [
        assemble(r["weights"] for r in ranks if r["replica"] == n)
        for n in sorted({r["replica"] for r in ranks})
    ]
    return Outcome(
        first["losses"],
        first["norms"],
        assemble(r["initial"] for r in ranks),
        assemble(r["grads"] for r in ranks),
        weights[0],
        weights[1:],
        first["evaluated"],
    )


@cache
def _one_process(cfg: Config) -> Outcome:
    return join([train(cfg, Mesh.single())])


def one_process(cfg: Config) -> Outcome:
    """The same run without a layout."""
    return _one_process(replace(cfg, parallel=ParallelConfig()))


def serial(
    model: GPTConfig, train_config: TrainConfig = TRAIN, reset_at_document: bool = False
) -> Outcome:
    """The one-process run of a model."""
    return one_process(config(model, train=train_config, reset_at_document=reset_at_document))


def worst(
    got: dict[str, Tensor], expected: dict[str, Tensor], floor: float = 1e-3
) -> tuple[float, str]:
    """Largest |a - b| / max(the tensor's largest entry, floor x the largest of all), and where.

    The floor is for gradients that are zero in exact arithmetic, such as a key bias's.
    """
    assert got.keys() == expected.keys()
    largest = max(float(t.abs().max()) for t in expected.values())
    found = []
    for name, want in expected.items():
        assert got[name].shape == want.shape, name
        bound = max(float(want.abs().max()), floor * largest)
        found.append((float((got[name] - want).abs().max()) / bound, name))
    return max(found)


def apart(a: list[float], b: list[float]) -> tuple[float, str]:
    """The largest relative difference of two lists, and where."""
    assert len(a) == len(b)
    return max(
        (abs(x - y) / abs(y), f"number {i}") for i, (x, y) in enumerate(zip(a, b, strict=True))
    )


def differences(got: Outcome, expected: Outcome) -> dict[str, tuple[float, str]]:
    """Worst relative difference of each part of two outcomes."""
    return {
        "initial": worst(got.initial, expected.initial),
        "loss": apart(got.losses, expected.losses),
        "norm": apart(got.norms, expected.norms),
        "grads": worst(got.grads, expected.grads),
        "weights": max(worst(w, expected.weights) for w in [got.weights, *got.others]),
        "eval": apart(got.evaluated, expected.evaluated),
    }
