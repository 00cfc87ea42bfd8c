"""Sizes by name, and the number of parameters: published, by formula, and as they are held."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from model.config import PRESETS, GPTConfig
from tests.grid import hold
from tests.parity.harness import config

# Counted in the published checkpoints.
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
}
# In billions, as their papers name them.
NAMED = {"gpt3-1.3b": 1.3, "gpt3-6.7b": 6.7, "gpt3-13b": 13, "gpt3-175b": 175, "gpt-530b": 530}


def preset(name: str, **changes: Any) -> GPTConfig:
    return GPTConfig(**{**PRESETS[name], **changes})


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    assert preset(name).num_parameters() == PUBLISHED[name]


@pytest.mark.parametrize("name", NAMED)
def test_a_preset_has_about_as_many_parameters_as_its_name_says(name: str) -> None:
    assert preset(name).num_parameters() / 1e9 == pytest.approx(NAMED[name], rel=0.03)


def test_every_preset_is_checked_here() -> None:
    assert {*PUBLISHED, *NAMED, "gpt-tiny"} == set(PRESETS)


def tiny(name: str) -> GPTConfig:
    """The preset's kind of model and its proportions, small."""
    big = preset(name)
    kv = 2 if big.kv_heads < big.num_heads else 0
    return replace(
        big,
        num_layers=4,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=kv,
        ffn_hidden_size=48 if big.ffn_hidden_size else 0,
        seq_length=16,
        vocab_size=65,
    )


MIXED = [
    GPTConfig(num_layers=3, hidden_size=24, num_heads=4, vocab_size=33, bias=False),
    GPTConfig(num_layers=2, hidden_size=24, num_heads=4, vocab_size=33, norm="rmsnorm"),
    GPTConfig(num_layers=2, hidden_size=24, num_heads=4, vocab_size=33, position="rope"),
    GPTConfig(num_layers=2, hidden_size=24, num_heads=4, vocab_size=33, activation="swiglu"),
    GPTConfig(num_layers=2, hidden_size=24, num_heads=4, vocab_size=33, tied_embeddings=False),
    GPTConfig(num_layers=2, hidden_size=24, num_heads=4, num_kv_heads=1, vocab_size=33),
    GPTConfig(num_layers=2, hidden_size=24, num_heads=4, ffn_hidden_size=20, vocab_size=33),
]
LAYOUTS: list[dict[str, Any]] = [{}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"tp": 4}]


@pytest.mark.parametrize(
    "model", [*map(tiny, PRESETS), *MIXED], ids=[*PRESETS, *map(str, range(7))]
)
def test_the_formula_counts_what_is_held_in_every_layout(model: GPTConfig) -> None:
    for layout in LAYOUTS:
        world_size = layout.get("tp", 1) * layout.get("pp", 1)
        pieces = [
            piece
            for rank in hold(config(model, **layout), world_size)
            for piece in rank.flat.weight_pieces()
            if piece.owner
        ]
        assert sum(p.tensor.numel() for p in pieces) == model.num_parameters(), layout


def test_tied_and_untied_differ_by_one_matrix() -> None:
    for name in ("gpt2-124m", "llama3-8b"):
        tied, untied = (preset(name, tied_embeddings=t).num_parameters() for t in (True, False))
        model = preset(name)
        assert untied - tied == model.vocab_size * model.hidden_size


def test_what_is_not_given_follows_from_the_rest() -> None:
    model = GPTConfig(hidden_size=96, num_heads=6)
    assert (model.kv_heads, model.ffn, model.head_dim) == (6, 384, 16)
    model = replace(model, num_kv_heads=2, ffn_hidden_size=100)
    assert (model.kv_heads, model.ffn) == (2, 100)
