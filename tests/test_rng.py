"""Random numbers: the words by another implementation, and values that know no layout."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from megalite import rng
from megalite.rng import initialize, normal, stream_key, uniform, words
from megalite.slices import Slice, set_slice
from model.config import GPTConfig
from tests.grid import hold
from tests.parity.harness import GPT2, LLAMA, assemble, config, parts

BITS = 1 << 64


def splitmix(seed: int, count: int) -> list[int]:
    """The first outputs of splitmix64, in Python's unbounded integers, state by state."""
    state, found = seed, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % BITS
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % BITS
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % BITS
        found.append(z ^ (z >> 31))
    return found


def unsigned(x: Tensor) -> list[int]:
    return [int(v) % BITS for v in x.flatten().tolist()]


def piece(shape: tuple[int, ...], offset: tuple[int, ...], extent: tuple[int, ...]) -> Slice:
    return Slice("layers.0.some.weight", shape, offset, extent, ("normal", 0.5))


def drawn(at: Slice, seed: int = 7, local: tuple[int, ...] | None = None) -> Tensor:
    """What ``initialize`` puts into a parameter of the slice."""
    param = nn.Parameter(torch.full(local or at.extent, torch.nan, dtype=torch.float64))
    initialize([set_slice(param, at)], seed)
    return param.detach()


def test_the_words_are_the_published_sequence() -> None:
    # Known outputs of the reference implementation for seed 1234567.
    assert unsigned(words(1234567, torch.arange(5))) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(st.integers(0, BITS - 1), st.integers(0, 50))
def test_the_words_of_any_key_equal_those_of_big_integers(key: int, first: int) -> None:
    index = torch.arange(first, first + 4).view(2, 2)
    assert unsigned(words(key, index)) == splitmix(key, first + 4)[first:]
    assert unsigned(words((key + 1) % BITS, index)) != splitmix(key, first + 4)[first:]


def test_a_stream_has_a_key_of_its_own() -> None:
    digest = hashlib.blake2b(b"7:layers.3.mlp.up.weight", digest_size=8).digest()
    assert stream_key(7, "layers.3.mlp.up.weight") == int.from_bytes(digest, "little")
    keys = {stream_key(s, n) for s in range(20) for n in ("a", "b", "layers.1", "layers.11")}
    assert len(keys) == 80


def test_uniform_is_the_upper_53_bits_and_never_zero() -> None:
    index = torch.arange(100)
    expected = [((w >> 11) + 0.5) * 2.0**-53 for w in splitmix(99, 100)]
    assert uniform(99, index).tolist() == expected
    many = uniform(5, torch.arange(100_000))
    assert 0.0 < float(many.min()) and float(many.max()) <= 1.0
    assert abs(float(many.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / 100_000)


def test_normal_has_the_moments_of_the_normal_distribution() -> None:
    count = 1 << 20
    x = normal(stream_key(1, "moments"), torch.arange(count))
    z = (x - x.mean()) / x.std()
    assert abs(float(x.mean())) < 4 / math.sqrt(count)
    assert abs(float(x.std()) - 1) < 4 / math.sqrt(2 * count)
    assert abs(float((z**3).mean())) < 4 * math.sqrt(6 / count)
    assert abs(float((z**4).mean()) - 3) < 4 * math.sqrt(24 / count)
    # Neighbours and the two uniforms of a pair share nothing.
    assert abs(float((x[1:] * x[:-1]).mean())) < 4 / math.sqrt(count)


def test_normal_of_one_index_is_box_and_muller_of_two_words() -> None:
    u = [((w >> 11) + 0.5) * 2.0**-53 for w in splitmix(3, 20)]
    expected = [
        math.sqrt(-2 * math.log(u[2 * i])) * math.cos(2 * math.pi * u[2 * i + 1]) for i in range(10)
    ]
    got = normal(3, torch.arange(10))
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-14)


@given(st.data())
def test_a_slice_has_the_bits_of_the_whole(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(37, 23), (64, 16), (5, 3, 7), (101,)]))
    whole = drawn(piece(shape, (0,) * len(shape), shape))
    offset = tuple(data.draw(st.integers(0, size)) for size in shape)
    extent = tuple(
        data.draw(st.integers(0, size - start)) for size, start in zip(shape, offset, strict=True)
    )
    got = drawn(piece(shape, offset, extent))
    at = tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))
    assert torch.equal(got, whole[at])


@pytest.mark.parametrize("chunk", [1, 10, 23, 100, 1 << 22])
def test_the_size_of_a_chunk_changes_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, column = piece((37, 23), (0, 0), (37, 23)), piece((37, 23), (5, 4), (30, 11))
    expected = drawn(whole), drawn(column)
    monkeypatch.setattr(rng, "_CHUNK", chunk)
    assert torch.equal(drawn(whole), expected[0])
    assert torch.equal(drawn(column), expected[1])


def test_seed_name_and_place_each_change_the_values() -> None:
    at = piece((8, 8), (0, 0), (4, 8))
    first = drawn(at)
    assert not torch.equal(first, drawn(at, seed=8))
    assert not torch.equal(first, drawn(replace(at, name="layers.1.some.weight")))
    assert not torch.equal(first, drawn(piece((8, 8), (4, 0), (4, 8))))
    # The name alone tells streams apart: equal (seed, index) in two tensors are unrelated.
    other = drawn(replace(at, name="layers.1.some.weight"))
    assert abs(float(torch.corrcoef(torch.stack([first.flatten(), other.flatten()]))[0, 1])) < 0.5


def test_what_a_slice_does_not_have_is_zero() -> None:
    at = piece((5, 4), (4, 0), (1, 4))
    padded = drawn(at, local=(2, 4))
    assert torch.equal(padded[:1], drawn(piece((5, 4), (0, 0), (5, 4)))[4:])
    assert not padded[1:].any()
    assert not drawn(piece((5, 4), (5, 0), (0, 4)), local=(2, 4)).any()


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2}),
    (4, {"tp": 4}),
    (2, {"pp": 2}),
    (4, {"pp": 4}),
]
LAYOUTS += [(8, {"tp": 2, "pp": 4}), (4, {"tp": 2, "pp": 2, "sequence_parallel": True})]


@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_initial_weights_do_not_know_the_layout(model: GPTConfig) -> None:
    (alone,) = hold(config(model), 1)
    expected = assemble([parts(alone.flat.weight_pieces())])
    for world_size, layout in LAYOUTS:
        ranks = hold(config(model, **layout), world_size)
        got = assemble(parts(rank.flat.weight_pieces()) for rank in ranks)
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(got[name], tensor), f"{name} at {layout}"


@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_every_matrix_has_the_deviation_of_the_specification(model: GPTConfig) -> None:
    wide = replace(model, hidden_size=128, ffn_hidden_size=384, vocab_size=401, seq_length=128)
    for tp in (1, 4):
        ranks = hold(config(wide, tp=tp), tp)
        whole = assemble(parts(rank.flat.weight_pieces()) for rank in ranks)
        matrices = {n: t for n, t in whole.items() if t.ndim == 2}
        assert len(matrices) > 6 * model.num_layers
        for name, tensor in matrices.items():
            small = name.endswith((".out.weight", ".down.weight"))
            std = 0.02 / math.sqrt(2 * model.num_layers) if small else 0.02
            assert float(tensor.std()) == pytest.approx(std, rel=0.02), name
            assert abs(float(tensor.mean())) < 4 * std / math.sqrt(tensor.numel()), name
        vectors = {n: t for n, t in whole.items() if t.ndim == 1}
        for name, tensor in vectors.items():
            assert torch.equal(tensor, torch.full_like(tensor, float("norm.weight" in name))), name


def test_the_padded_rows_of_the_vocabulary_are_zero() -> None:
    ranks = hold(config(GPT2, tp=4), 4)  # 65 tokens: 17 rows on each of 4 ranks
    embeddings = [rank.gpt[0].embedding for rank in ranks]
    rows = torch.cat([e.detach() for e in embeddings if e is not None])
    assert rows.shape[0] == 68
    assert not rows[65:].any()
    assert bool(rows[:65].any(-1).all())
