"""Documents in one row: borders from tokens, and a row of several equals each of them alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from launch.build import Training, build
from launch.config import Config
from megalite.mesh import Mesh
from megalite.pipeline.executor import Batch
from megalite.tensor_parallel.cross_entropy import IGNORE
from model.config import GPTConfig
from model.documents import document_mask, document_starts, places
from tests.parity.harness import EOD, GPT2, LLAMA, TRAIN, config

FAMILIES = pytest.mark.parametrize("base", [GPT2, LLAMA], ids=["gpt2", "llama"])


def borders(row: list[int]) -> list[int]:
    """Where documents start, and the end, token by token."""
    return [0, *(i + 1 for i, token in enumerate(row[:-1]) if token == EOD), len(row)]


@given(st.lists(st.lists(st.sampled_from([2, EOD, 9]), min_size=7, max_size=7), min_size=1))
def test_an_end_token_ends_its_document(rows: list[list[int]]) -> None:
    tokens = torch.tensor(rows)
    starts = document_starts(tokens, EOD)
    mask, place = document_mask(starts, torch.float64), places(starts)
    for r, row in enumerate(rows):
        seen = torch.zeros(7, 7)
        for start, stop in pairwise(borders(row)):
            assert starts[r, start:stop].tolist() == [start] * (stop - start)
            assert place[start:stop, r].tolist() == list(range(stop - start))
            seen[start:stop, start:stop] = torch.ones(stop - start, stop - start).tril()
        assert torch.equal(mask[r, 0] == 0, seen == 1)
        assert bool(torch.isneginf(mask[r, 0][seen == 0]).all())


def test_rows_of_one_token_and_of_ends_only() -> None:
    assert document_starts(torch.tensor([[EOD], [3]]), EOD).tolist() == [[0], [0]]
    assert document_starts(torch.full((1, 4), EOD), EOD).tolist() == [[0, 1, 2, 3]]


# --- a packed row beside its documents ---------------------------------------------------------

LENGTHS = (5, 1, 7, 3)  # of 16; the last document goes on


def packed(model: GPTConfig) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(4)
    row = torch.randint(6, model.vocab_size, (17,), generator=draw)
    for end in torch.tensor(LENGTHS).cumsum(0)[:-1] - 1:
        row[end] = EOD
    return row[:-1], row[1:].clone()


def run(cfg: Config, rows: list[tuple[Tensor, Tensor]]) -> tuple[float, dict[str, Tensor]]:
    """Summed loss and gradients of rows, each a microbatch of its own length."""
    training: Training = build(cfg, Mesh.single(), eod=EOD)
    total = 0.0
    training.reducer.zero(1)
    for tokens, targets in rows:
        batch = Batch(tokens.view(1, 1, -1), targets.view(1, 1, -1))
        loss = training.executor.run(training.plan, batch)
        assert loss is not None
        total += float(loss)
    return total, {p.name: p.tensor.clone() for p in training.flat.grad_pieces()}


def config_of(base: GPTConfig, reset: bool) -> Config:
    train = replace(TRAIN, global_batch_size=1, micro_batch_size=1)
    return config(base, train=train, reset_at_document=reset)


@FAMILIES
def test_a_packed_row_is_its_documents_each_alone(base: GPTConfig) -> None:
    tokens, targets = packed(base)
    parts = list(zip(tokens.split(LENGTHS), targets.split(LENGTHS), strict=True))
    loss, grads = run(config_of(base, True), [(tokens, targets)])
    alone, expected = run(config_of(base, False), parts)
    assert loss == pytest.approx(alone, rel=1e-12)
    for name, want in expected.items():
        error = float((grads[name] - want).abs().max())
        assert error < 1e-10 * max(1e-3, float(want.abs().max())), name
    crossing, _ = run(config_of(base, False), [(tokens, targets)])
    assert abs(crossing - alone) > 1e-4 * alone, "there was nothing to see"


@FAMILIES
def test_a_token_is_not_changed_by_another_document(base: GPTConfig) -> None:
    tokens, _ = packed(base)
    other = tokens.clone()
    other[0] = (other[0] + 1 - 6) % (base.vocab_size - 6) + 6
    found = {}
    for reset in (True, False):
        training = build(config_of(base, reset), Mesh.single(), eod=EOD)
        a, b = (training.forward(Batch(t.view(1, 1, -1), None)) for t in (tokens, other))
        assert a is not None and b is not None
        found[reset] = [bool((x != y).any()) for x, y in zip(a, b, strict=True)]
    assert found[True] == [i < LENGTHS[0] for i in range(16)]
    assert all(found[False])


def test_documents_without_a_border_between_them_are_an_error() -> None:
    with pytest.raises(AssertionError, match="no border between documents"):
        build(config_of(GPT2, True), Mesh.single())


def test_an_end_token_still_predicts_the_first_of_the_next_document() -> None:
    tokens, targets = packed(GPT2)
    ends = tokens == EOD
    assert int(ends.sum()) == 3
    silent = torch.where(ends, IGNORE, targets)
    losses = [run(config_of(GPT2, True), [(tokens, t)])[0] for t in (targets, silent)]
    assert losses[0] - losses[1] > 3.0
