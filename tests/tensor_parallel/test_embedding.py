"""The embedding of a cut vocabulary, positions and norms against dense ones, in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megalite.grads import main_grad
from megalite.mesh import Axis, Transport
from megalite.slices import get_slice
from megalite.tensor_parallel.embedding import (
    LearnedPositions,
    Norm,
    padded_rows,
    vocab_parallel_embedding,
    vocab_weight,
)
from megalite.tensor_parallel.linear import Layout
from tests.ranks import run_ranks
from tests.tensor_parallel.dense import (
    Differences,
    drawn,
    fill,
    grad,
    layout_of,
    leaf,
    meshes,
    part,
    summed_grad,
    take,
)

S, B, D, LONGEST = 4, 3, 6, 5
VOCABS = (13, 16, 5)  # 13: padded at tp 2 and 4; 5 at tp 4: one rank has a single row, one none
NORMS = ("layernorm", "rmsnorm")


def tokens_of(vocab: int) -> Tensor:
    draw = torch.Generator().manual_seed(vocab)
    tokens = torch.randint(0, vocab, (S, B), generator=draw)
    tokens[0, 0], tokens[1, 1] = vocab - 1, 0
    tokens[2, :2] = vocab - 1  # one token several times
    return tokens


def embedding(layout: Layout, vocab: int) -> Differences:
    tp, cut, found = layout.tp, layout.cut_sequence, Differences()
    held, whole = vocab_weight(layout, "e", vocab, D, 1.0), leaf("e", vocab, D)
    fill(held)
    with torch.no_grad():
        held[get_slice(held).extent[0] :] = 1e4  # padding that is not zero may not be seen either
    tokens, dy = tokens_of(vocab), drawn("dy", S, B, D)
    expected = nn.functional.embedding(tokens, whole)
    expected.backward(dy)
    y = vocab_parallel_embedding(tokens, layout, held)
    y.backward(take(dy, tp) if cut else dy)
    rows = get_slice(held).extent[0]
    found.add("y", y, take(expected, tp) if cut else expected)
    found.add("dw", main_grad(held)[:rows], part(held, grad(whole)))
    found.add("padding", main_grad(held)[rows:], torch.zeros(padded_rows(held), D))
    return found


def positions(layout: Layout) -> Differences:
    tp, cut, found = layout.tp, layout.cut_sequence, Differences()
    module = LearnedPositions(layout, "p", LONGEST, D, 1.0)
    fill(module.weight)
    weight, x, dy = leaf("p", LONGEST, D), leaf("x", S, B, D), drawn("dy", S, B, D)
    expected = x + weight[:S].unsqueeze(1)
    expected.backward(dy)
    y = module(take(x, tp) if cut else x.detach())
    y.backward(take(dy, tp) if cut else dy)
    found.add("y", y, take(expected, tp) if cut else expected)
    found.add("dw", summed_grad(module.weight, tp), grad(weight))
    return found


def norm(layout: Layout, kind: str) -> Differences:
    tp, cut, found = layout.tp, layout.cut_sequence, Differences()
    module = Norm(layout, "n", kind, D, 1e-5)
    fill(*module.parameters())
    x, dy = leaf("x", S, B, D), drawn("dy", S, B, D)
    weight, bias = leaf("n.weight", D), leaf("n.bias", D)
    centred = x - x.mean(-1, keepdim=True) if kind == "layernorm" else x
    scaled = centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
    expected = scaled + bias if kind == "layernorm" else scaled
    expected.backward(dy)
    local = (take(x, tp) if cut else x.detach().clone()).requires_grad_()
    y = module(local)
    y.backward(take(dy, tp) if cut else dy)
    found.add("y", y, take(expected, tp) if cut else expected)
    found.add("dx", grad(local), take(grad(x), tp) if cut else grad(x))
    found.add("dw", summed_grad(module.weight, tp), grad(weight))
    assert (module.bias is None) == (kind == "rmsnorm")
    if module.bias is not None:
        found.add("db", summed_grad(module.bias, tp), grad(bias))
    return found


Measured = dict[tuple[str, int, bool], Differences]


def measure(transport: Transport | None) -> Measured:
    found = Measured()
    made = meshes(transport)
    for mesh in made:
        for cut in (False, True):
            for vocab in VOCABS:
                found[f"embedding of {vocab}", mesh.tp.size, cut] = embedding(
                    layout_of(mesh.tp, cut), vocab
                )
            found["positions", mesh.tp.size, cut] = positions(layout_of(mesh.tp, cut))
            for kind in NORMS:
                found[kind, mesh.tp.size, cut] = norm(layout_of(mesh.tp, cut), kind)
    for mesh in made:
        mesh.close()
    return found


@pytest.fixture(scope="module")
def measured() -> list[Measured]:
    return [measure(None), *run_ranks(4, measure)]


@pytest.mark.parametrize("cut", [False, True], ids=["whole-sequence", "cut-sequence"])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("layer", [*(f"embedding of {v}" for v in VOCABS), "positions", *NORMS])
def test_a_layer_is_a_dense_one(layer: str, tp: int, cut: bool, measured: list[Measured]) -> None:
    found = [rank[layer, tp, cut] for rank in measured if (layer, tp, cut) in rank]
    assert len(found) == (1 if tp == 1 else 4)
    for differences in found:
        for what, size in differences.items():
            assert size <= 1e-12, f"{what} differs by {size:.1e}"


def test_a_token_of_another_rank_is_zero_here() -> None:
    layout = layout_of(Axis("tp", 1, 2), False)  # no group: this rank's part of the sum
    weight = vocab_weight(layout, "e", 13, D, 1.0)
    fill(weight)
    part_of_sum = vocab_parallel_embedding(torch.tensor([[6, 7]]), layout, weight)
    assert not part_of_sum[0, 0].any()
    torch.testing.assert_close(part_of_sum[0, 1].detach(), drawn("e", 13, D)[7])


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("vocab", [1, 5, 13, 64, 65])
def test_the_rows_of_all_ranks_are_the_vocabulary_once_and_padding(vocab: int, tp: int) -> None:
    weights = [
        vocab_weight(layout_of(Axis("tp", i, tp), False), "e", vocab, D, 1.0) for i in range(tp)
    ]
    rows = [
        row
        for at in map(get_slice, weights)
        for row in range(at.offset[0], at.offset[0] + at.extent[0])
    ]
    assert rows == list(range(vocab))
    assert len({w.shape for w in weights}) == 1
    assert sum(map(padded_rows, weights)) == tp * weights[0].shape[0] - vocab
    assert all(get_slice(w).shape == (vocab, D) and get_slice(w).decay for w in weights)
