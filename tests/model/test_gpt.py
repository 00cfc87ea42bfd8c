"""The model: on several ranks its replicas and ties stay equal and its padding is unseen."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from launch.build import Training, build
from launch.config import Config
from megalite.grads import GradSink
from megalite.mesh import Axis, Mesh, Transport
from megalite.parallel_config import mesh_shape
from megalite.slices import get_slice
from megalite.tensor_parallel.cross_entropy import IGNORE
from megalite.tensor_parallel.linear import Layout
from model.config import GPTConfig
from model.gpt import GPTStage, rope, rotate
from tests.grid import hold
from tests.parity.faults import no_partial_sum, no_tie_sum
from tests.parity.harness import (
    GPT2,
    LLAMA,
    TRAIN,
    Fault,
    Part,
    assemble,
    batch_of,
    config,
    parts,
    worst,
)
from tests.ranks import run_ranks

SP = {"sequence_parallel": True}

# --- replicas and ties -------------------------------------------------------------------------


@dataclass
class Copies:
    """What one rank holds after its steps: name, offset and value of every piece, owned or not."""

    pieces: list[tuple[str, tuple[int, ...], Tensor]] = field(default_factory=list)
    owned: list[Part] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


@dataclass
class Case:
    model: GPTConfig
    layout: dict[str, Any]
    steps: int
    copied: str  # a part of the names of what several ranks hold
    fault: Fault
    dtype: Any = "fp64"

    @property
    def cfg(self) -> Config:
        train = replace(TRAIN, steps=self.steps, dtype=self.dtype, global_batch_size=4)
        model = replace(self.model, num_layers=max(2, self.layout.get("pp", 1)))
        return config(model, train=train, **self.layout)


SHARED_KV = replace(LLAMA, num_heads=8, num_kv_heads=2)
# An odd hidden size: parameters end inside a vector of the processor.
ODD = replace(GPT2, hidden_size=36, ffn_hidden_size=60)
TIED_LLAMA = replace(LLAMA, tied_embeddings=True)
CASES = {
    "shared heads": Case(SHARED_KV, {"tp": 4}, 3, "attention.k", no_partial_sum),
    "shared heads, cut sequence": Case(
        SHARED_KV, {"tp": 4, **SP}, 3, "attention.v", no_partial_sum
    ),
    "norms": Case(GPT2, {"tp": 2, **SP}, 5, "norm.weight", no_partial_sum),
    "norms in fp32": Case(ODD, {"tp": 2, **SP}, 5, "norm.bias", no_partial_sum, "fp32"),
    "row biases": Case(ODD, {"tp": 4, **SP}, 5, "down.bias", no_partial_sum),
    "whole sequence in fp32": Case(ODD, {"tp": 4}, 5, "norm.weight", no_partial_sum, "fp32"),
    "tied, pp 2": Case(GPT2, {"pp": 2}, 10, "tokens", no_tie_sum),
    "tied, pp 4": Case(TIED_LLAMA, {"pp": 4}, 10, "tokens", no_tie_sum),
    "tied, tp 2 x pp 2": Case(GPT2, {"tp": 2, "pp": 2, **SP}, 5, "tokens", no_tie_sum),
}
# Where nothing is partial, nothing can be left out.
WITHOUT_FAULT = ("whole sequence in fp32",)


def train_copies(cfg: Config, mesh: Mesh, fault: Fault | None = None) -> Copies:
    training = build(cfg, mesh)
    if fault is not None:
        fault(training)
    found = Copies()
    for step in range(cfg.train.steps):
        totals = training.step(batch_of(cfg, step, mesh.dp.index, mesh.dp.size), cfg.optim.lr)
        found.losses.append(float(totals.loss))
    pieces = list(training.flat.weight_pieces())
    found.pieces = [(p.name, p.offset, p.tensor.clone()) for p in pieces]
    found.owned = parts(pieces) if mesh.dp.index == 0 else []
    return found


def all_cases(transport: Transport) -> dict[tuple[str, bool], Copies]:
    found = {}
    for name, case in CASES.items():
        mesh = Mesh.create(mesh_shape(case.cfg.parallel, transport.world_size), transport)
        found[name, False] = train_copies(case.cfg, mesh)
        if name not in WITHOUT_FAULT:
            found[name, True] = train_copies(case.cfg, mesh, case.fault)
        mesh.close()
    return found


@pytest.fixture(scope="module")
def copies() -> list[dict[tuple[str, bool], Copies]]:
    return run_ranks(4, all_cases)


def differing(ranks: Iterable[Copies]) -> tuple[set[str], Counter[str]]:
    """Names of pieces whose copies are not bit-equal; how many ranks hold each name's most held
    piece."""
    seen: dict[tuple[str, tuple[int, ...]], list[Tensor]] = {}
    for rank in ranks:
        for name, offset, tensor in rank.pieces:
            seen.setdefault((name, offset), []).append(tensor)
    held: Counter[str] = Counter()
    for (name, _), tensors in seen.items():
        held[name] = max(held[name], len(tensors))
    unequal = {n for (n, _), ts in seen.items() if not all(torch.equal(t, ts[0]) for t in ts)}
    return unequal, held


@pytest.mark.parametrize("name", CASES)
def test_copies_stay_bit_equal_and_are_those_of_one_process(
    name: str, copies: list[dict[tuple[str, bool], Copies]]
) -> None:
    case, ranks = CASES[name], [rank[name, False] for rank in copies]
    unequal, held = differing(ranks)
    assert not unequal
    dp = 4 // (case.layout.get("tp", 1) * case.layout.get("pp", 1))
    copied = [n for n in held if case.copied in n]
    assert copied
    assert all(held[n] >= 2 * dp for n in copied)

    alone = train_copies(replace(case.cfg, parallel=config().parallel), Mesh.single())
    bound = 1e-10 if case.dtype == "fp64" else 1e-3
    for rank in ranks:
        assert rank.losses == pytest.approx(alone.losses, rel=bound)
    got, expected = assemble(rank.owned for rank in ranks), assemble([alone.owned])
    for unmoved in [n for n in expected if n.endswith("attention.k.bias")]:
        # It shifts all scores of a query alike: its gradient is rounding, which Adam scales up.
        assert float((got.pop(unmoved) - expected.pop(unmoved)).abs().max()) < 1e-3
    size, where = worst(got, expected)
    assert size < bound, f"{where} differs by {size:.1e}"


@pytest.mark.parametrize("name", [n for n in CASES if n not in WITHOUT_FAULT])
def test_a_sum_that_is_left_out_makes_copies_drift_apart(
    name: str, copies: list[dict[tuple[str, bool], Copies]]
) -> None:
    unequal, _ = differing(rank[name, True] for rank in copies)
    assert any(CASES[name].copied in n for n in unequal)


# --- padding -----------------------------------------------------------------------------------


def padding_of(training: Training) -> list[tuple[Tensor, Tensor]]:
    """Weight and gradient of the rows that do not exist, of the embedding and the head."""
    found = []
    for param in training.flat.parameters():
        at = get_slice(param)
        if at.shape[0] == training.cfg.model.vocab_size:
            rows = at.extent[0]
            found.append((param.detach()[rows:], param.main_grad[rows:]))  # type: ignore[attr-defined]
    return found


def with_padding(transport: Transport) -> list[dict[str, Any]]:
    found = []
    train = replace(TRAIN, global_batch_size=2)
    for model in (GPT2, LLAMA):
        for layout in ({"tp": 4}, {"tp": 4, **SP}, {"tp": 2, "pp": 2}):
            cfg = config(replace(model, num_layers=2), train=train, **layout)
            mesh = Mesh.create(mesh_shape(cfg.parallel, 4), transport)
            training = build(cfg, mesh)
            runs = []
            for value in (0.0, 1e4, -1e4):
                for weight, _ in padding_of(training):
                    weight.fill_(value)
                batch = batch_of(cfg, 0, 0, 1)
                totals = training.gradients(batch)
                grads = [p.tensor.clone() for p in training.flat.grad_pieces()]
                runs.append([totals.loss, totals.grad_norm, training.losses(batch), *grads])
            found.append(
                {
                    "rows": sum(w.shape[0] for w, _ in padding_of(training)),
                    "same": all(all(map(torch.equal, runs[0], run)) for run in runs[1:]),
                    "zero": not any(bool(g.any()) for _, g in padding_of(training)),
                }
            )
            mesh.close()
    return found


def test_padded_rows_change_nothing_and_get_no_gradient() -> None:
    ranks = run_ranks(4, with_padding)
    for rank in ranks:
        for case in rank:
            assert case["same"] and case["zero"]
    # 65 tokens on 4 ranks are 3 rows of padding; the untied model has two such matrices.
    assert [sum(rank[n]["rows"] for rank in ranks) for n in (0, 3)] == [3, 6]


# --- the model itself --------------------------------------------------------------------------


def alone(model: GPTConfig) -> GPTStage:
    return hold(config(model), 1)[0].gpt[0]


@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_the_loss_is_that_of_the_logits_and_a_token_sees_only_the_past(model: GPTConfig) -> None:
    module, batch = alone(model), batch_of(config(model), 0, 0, 1)
    tokens, targets = batch.tokens[0], batch.targets
    assert targets is not None
    with torch.no_grad():
        logits, loss = module(tokens), module(tokens, targets[0])
        assert logits.shape == (16, 2, 65)
        flat = logits.transpose(0, 1).flatten(0, 1)
        expected = cross_entropy(flat, targets[0].flatten(), ignore_index=IGNORE, reduction="sum")
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        mean = float(loss) / int((targets[0] != IGNORE).sum())
        assert mean == pytest.approx(math.log(65), rel=0.02), "before training all are as likely"
        changed = tokens.clone()
        changed[:, 9] = (changed[:, 9] + 1) % 65
        other = module(changed)
    assert torch.equal(other[:9], logits[:9])
    assert bool((other[9:] != logits[9:]).any(-1).all())


def test_a_rotated_query_and_key_meet_by_their_distance() -> None:
    layout = Layout(Axis("tp"), False, torch.float64, torch.device("cpu"), GradSink())
    model = replace(LLAMA, hidden_size=64)
    rotation = rope(model, torch.arange(12).unsqueeze(1), layout)
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, model.head_dim, generator=draw, dtype=torch.float64)
    qs, ks = (rotate(t.expand(12, 1, 1, -1), rotation)[:, 0, 0] for t in (q, k))
    dots = qs @ ks.t()
    for distance in range(-11, 12):
        same = dots.diagonal(distance)
        torch.testing.assert_close(same, same[:1].expand_as(same), rtol=0, atol=1e-12)
    assert float((dots[0] - dots[0, 0]).abs().max()) > 0.1
    # Pairs (i, i + k/2) are complex numbers, turned by position x theta^(-2i/k).
    half = model.head_dim // 2
    angle = torch.arange(12.0, dtype=torch.float64)[:, None] * torch.tensor(
        [model.rope_theta ** (-2 * i / model.head_dim) for i in range(half)], dtype=torch.float64
    )
    z = torch.complex(q[0, 0, :, :half], q[0, 0, :, half:]) * torch.exp(1j * angle)
    torch.testing.assert_close(qs, torch.cat([z.real, z.imag], -1), rtol=0, atol=1e-12)


def test_names_do_not_know_the_stage() -> None:
    whole = {get_slice(p).name for p in alone(GPT2).parameters()}
    stages = [held.gpt for held in hold(config(GPT2, pp=2), 2)]
    names = [{get_slice(p).name for m in gpt.values() for p in m.parameters()} for gpt in stages]
    assert names[0] | names[1] == whole
    assert names[0] & names[1] == {"embedding.tokens.weight"}
    assert "layers.2.mlp.up.weight" in names[1]


@pytest.mark.parametrize("cut", [False, True])
def test_what_stages_hand_on_has_the_shape_that_they_say(cut: bool) -> None:
    (first, *_) = hold(config(GPT2, tp=2, pp=2, sequence_parallel=cut), 4)
    assert first.gpt[0].hidden_shape(3, 16) == ((8 if cut else 16), 3, 32)
    (one, *_) = hold(config(GPT2, pp=2, sequence_parallel=cut), 2)
    tokens = batch_of(config(GPT2), 0, 0, 1).tokens[0]
    with torch.no_grad():
        assert one.gpt[0](tokens).shape == one.gpt[0].hidden_shape(*tokens.shape)
