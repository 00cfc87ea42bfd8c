"""The model on several ranks: replicas and ties stay equal, padding is unseen, messages counted."""

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

from launch.build import Training, build, make_plan
from launch.config import Config
from megalite.mesh import Axis, Mesh, Transport
from megalite.mesh_shape import MeshShape
from megalite.parallel_config import mesh_shape
from megalite.pipeline.p2p import Channels
from megalite.slices import get_slice
from megalite.tensor_parallel.cross_entropy import IGNORE
from megalite.tensor_parallel.linear import Layout
from model.config import GPTConfig
from model.gpt import GPTStage, rope, rotate
from tests.counting import CountingTransport
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
    dtype: str = "fp64"

    @property
    def cfg(self) -> Config:
        train = replace(TRAIN, steps=self.steps, dtype=self.dtype, global_batch_size=4)
        return config(self.model, train=train, **self.layout)


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
    size, where = worst(assemble(rank.owned for rank in ranks), assemble([alone.owned]))
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
    for model in (GPT2, LLAMA):
        for layout in ({"tp": 4}, {"tp": 4, **SP}, {"tp": 2, "pp": 2}):
            cfg = config(model, **layout)
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


# --- how many messages -------------------------------------------------------------------------


@dataclass
class Counts:
    """Operations of one step, by axis; the number of buckets; those summed late over dp."""

    tp: Counter[str]
    dp: Counter[str]
    tie: Counter[str]
    world: Counter[str]
    buckets: int


def count(transport: Transport, cfgs: list[Config]) -> list[Counts]:
    found = []
    for cfg in cfgs:
        counting = CountingTransport(transport)
        mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), counting)
        training = build(cfg, mesh)
        batch = batch_of(cfg, 0, mesh.dp.index, mesh.dp.size)
        training.step(batch, 1e-3)
        counting.reset()
        training.step(batch, 1e-3)
        axes = {}
        for name in ("tp", "dp", "tie", "world"):
            axis = getattr(mesh, name)
            records = counting.select(ranks=axis.ranks) if axis.size > 1 else []
            axes[name] = Counter(r.op for r in records if r.op not in ("send", "recv"))
        found.append(Counts(**axes, buckets=len(training.flat.buckets)))
        mesh.close()
    return found


def counted(model: GPTConfig, layers: int, m: int, dp: int, **layout: Any) -> Config:
    train = replace(TRAIN, global_batch_size=m * dp, micro_batch_size=1)
    return config(replace(model, num_layers=layers), train=train, **layout)


MODELS = {"gpt2": GPT2, "llama": LLAMA}
COUNTED = [
    (model, cut, layers, m)
    for model in MODELS
    for cut in (False, True)
    for layers, m in ((1, 1), (3, 1), (3, 2))
]


@pytest.fixture(scope="module")
def counts() -> dict[tuple[str, bool, int, int], list[Counts]]:
    """Of tp 2 x dp 2."""
    cfgs = [
        counted(MODELS[model], layers, m, 2, tp=2, sequence_parallel=cut)
        for model, cut, layers, m in COUNTED
    ]
    ranks = run_ranks(4, count, cfgs)
    return {key: [rank[n] for rank in ranks] for n, key in enumerate(COUNTED)}


@pytest.mark.parametrize("model", MODELS)
def test_a_block_and_microbatch_costs_two_and_two_all_reduces(
    model: str, counts: dict[tuple[str, bool, int, int], list[Counts]]
) -> None:
    for one, three in zip(counts[model, False, 1, 1], counts[model, False, 3, 1], strict=True):
        per_block = {op: (n - one.tp[op]) / 2 for op, n in three.tp.items()}
        assert per_block == {"all_reduce": 4}
        # Besides: the embedding, the input gradient of the head, and two of the cross-entropy.
        assert one.tp == {"all_reduce": 4 + 1 + 1 + 2}


@pytest.mark.parametrize("model", MODELS)
def test_with_a_cut_sequence_it_costs_gathers_and_reduce_scatters(
    model: str, counts: dict[tuple[str, bool, int, int], list[Counts]]
) -> None:
    for one, three in zip(counts[model, True, 1, 1], counts[model, True, 3, 1], strict=True):
        per_block = {op: (n - one.tp[op]) / 2 for op, n in three.tp.items()}
        # Two of the gathers are those of the inputs, once more for their weight gradients.
        assert per_block == {"all_gather": 4 + 2, "reduce_scatter": 4, "all_reduce": 0}
        # Besides: the embedding forward and back; the head's input, again for its weight, and
        # its gradient; two of the cross-entropy; and one for all partial gradients.
        assert one.tp == {"all_gather": 6 + 1 + 2, "reduce_scatter": 4 + 1 + 1, "all_reduce": 3}


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_what_a_step_costs_once_does_not_grow_with_microbatches(
    model: str, cut: bool, counts: dict[tuple[str, bool, int, int], list[Counts]]
) -> None:
    for one, two in zip(counts[model, cut, 3, 1], counts[model, cut, 3, 2], strict=True):
        for step in (one, two):
            assert step.world == {"all_reduce": 1}
            assert step.dp == {"all_reduce": step.buckets}
            assert step.buckets < 6
        once = 1 if cut else 0  # the sum of partial gradients
        assert two.tp["all_reduce"] - once == 2 * (one.tp["all_reduce"] - once)
        assert two.tp["all_gather"] == 2 * one.tp["all_gather"]


def test_a_tie_over_two_ranks_costs_one_sum_and_only_where_there_is_one() -> None:
    untied = replace(GPT2, tied_embeddings=False)
    cfgs = [counted(model, 4, 3, 1, pp=2, tp=2) for model in (GPT2, untied)]
    for tied, loose in run_ranks(4, count, cfgs):
        assert tied.tie == {"all_reduce": 1}
        assert loose.tie == {}
        assert tied.world == loose.world == {"all_reduce": 1}
        assert tied.dp == loose.dp == {}


def test_shared_key_value_heads_cost_one_sum_a_step() -> None:
    cfgs = [counted(LLAMA, 2, m, 1, tp=4) for m in (1, 3)]
    for one, three in run_ranks(4, count, cfgs):
        assert one.tp == {"all_reduce": 2 * 4 + 4 + 1}
        assert three.tp == {"all_reduce": 3 * (2 * 4 + 4) + 1}


# --- two models in one job ---------------------------------------------------------------------

PIPED = config(GPT2, pp=2)
CUT = config(LLAMA, train=replace(TRAIN, seed=99), tp=2, sequence_parallel=True)
Result = tuple[list[float], list[Part]]


def outcome(training: Training, steps: range) -> Result:
    cfg, dp = training.cfg, training.mesh.dp
    losses = [
        float(training.step(batch_of(cfg, s, dp.index, dp.size), cfg.optim.lr).loss) for s in steps
    ]
    owned = parts([*training.flat.weight_pieces(), *grads_of(training)])
    return losses, owned if dp.index == 0 else []


def grads_of(training: Training) -> Iterable[Any]:
    return [replace(p, name=f"grad of {p.name}") for p in training.flat.grad_pieces()]


def apart(transport: Transport) -> Result:
    """PIPED on ranks 0 and 1, CUT on ranks 2 and 3."""
    first = Mesh.create(MeshShape(pp=2), transport)
    second = Mesh.create(MeshShape(tp=2), transport, first_rank=2)
    if transport.rank < 2:
        result = outcome(build(PIPED, first), range(3))
    else:
        Channels(first, make_plan(PIPED, 1))  # its groups are made by all ranks of the job
        result = outcome(build(CUT, second), range(3))
    for mesh in (first, second):
        mesh.close()
    return result


def only(transport: Transport, cfg: Config) -> Result:
    mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
    result = outcome(build(cfg, mesh), range(3))
    mesh.close()
    return result


def same(a: Result, b: Result) -> bool:
    return a[0] == b[0] and all(
        x[:3] == y[:3] and torch.equal(x[3], y[3]) for x, y in zip(a[1], b[1], strict=True)
    )


def test_two_models_on_ranks_of_their_own_train_as_if_alone() -> None:
    together = run_ranks(4, apart)
    piped, cut = run_ranks(2, only, PIPED), run_ranks(2, only, CUT)
    for got, expected in zip(together, [*piped, *cut], strict=True):
        assert len(got[1]) > 20
        assert same(got, expected)
    assert not same((together[0][0], []), (together[2][0], []))


def in_turn(transport: Transport) -> dict[str, list[Result]]:
    """Two layouts over the same ranks, a step of one and then of the other."""
    cfgs = {
        "a": config(GPT2, tp=2, pp=2),
        "b": replace(CUT, parallel=replace(CUT.parallel, rank_order="pp,tp,dp")),
    }
    meshes = {n: Mesh.create(mesh_shape(c.parallel, 4), transport) for n, c in cfgs.items()}
    trainings = {n: build(c, meshes[n]) for n, c in cfgs.items()}
    found: dict[str, list[Result]] = {n: [] for n in cfgs}
    for step in range(3):
        for name, training in trainings.items():
            found[name].append(outcome(training, range(step, step + 1)))
    for mesh in meshes.values():
        mesh.close()
    return found


def test_two_models_on_the_same_ranks_do_not_meet() -> None:
    ranks = run_ranks(4, in_turn)
    for name, cfg in (("a", config(GPT2)), ("b", replace(CUT, parallel=config().parallel))):
        losses, owned = outcome(build(cfg, Mesh.single()), range(3))
        got = assemble(rank[name][-1][1] for rank in ranks)
        size, where = worst(got, assemble([owned]))
        assert size < 1e-10, f"{where} differs by {size:.1e}"
        for rank in ranks:
            steps = [loss for result in rank[name] for loss in result[0]]
            assert steps == pytest.approx(losses, rel=1e-12)


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
    layout = Layout(Axis("tp"), False, torch.float64, torch.device("cpu"), None)  # type: ignore[arg-type]
    model = replace(LLAMA, hidden_size=64)
    rotation = rope(model, 12, layout)
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
