"""Generation: with the cache as without, as transformers, and as the probabilities say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from launch.build import Training, build
from launch.sample import decoder, one_batch
from megalite.mesh import Mesh
from model import generate as module
from model.config import GPTConfig
from model.generate import Decoder, Sampling, generate
from model.hf import to_hf
from tests.model.test_hf import MODELS, load, peer, weights
from tests.parity.harness import EOD, TRAIN, config

PROMPTS = [[7, 11, 2], [40, 41, 42, 43, 44, 45, 46], [9], [3] * 20]
GREEDY = Sampling(temperature=0)


def training_of(model: GPTConfig, *, dtype: str = "fp32", reset: bool = False) -> Training:
    train = replace(TRAIN, dtype=dtype)
    cfg = config(model, train=train, reset_at_document=reset)  # type: ignore[arg-type]
    training = build(cfg, Mesh.single(), eod=EOD)
    load(weights(model), training)
    return training


def decoder_of(training: Training, *, keeps: bool = True) -> Decoder:
    def forward(tokens: Tensor, places: Tensor | None) -> Tensor | None:
        return training.forward(one_batch(tokens, places))

    length = training.cfg.model.seq_length
    return decoder(forward, training.gpt, training.mesh, training.plan, length, keeps=keeps)


def longhand(training: Training, prompt: Sequence[int], added: int) -> list[int]:
    """The likeliest tokens, each from a pass over all that the model can see."""
    text = list(prompt)
    for _ in range(added):
        window = torch.tensor([text[-training.cfg.model.seq_length :]])
        with torch.no_grad():
            text.append(int(training.gpt[0](window)[-1, 0].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("name", ["gpt2, tied", "llama, untied, 2 kv heads of 4"])
def test_the_cache_changes_no_token_for_prompts_of_any_length_and_past_the_context(
    name: str,
) -> None:
    training = training_of(MODELS[name])
    expected = [longhand(training, prompt, 32) for prompt in PROMPTS]
    assert generate(decoder_of(training), PROMPTS, 32, GREEDY) == expected
    assert generate(decoder_of(training, keeps=False), PROMPTS, 32, GREEDY) == expected
    assert len({tuple(e) for e in expected}) == len(PROMPTS) and len(set(expected[0])) > 3
    drawn = Sampling(0.9, top_k=20, top_p=0.8, seed=5)
    kept = generate(decoder_of(training), PROMPTS, 12, drawn)
    assert kept == generate(decoder_of(training, keeps=False), PROMPTS, 12, drawn)
    for number, prompt in enumerate(PROMPTS):
        alone = generate(decoder_of(training), [prompt], 12, drawn, numbers=[number])
        assert alone == [kept[number]]


def test_the_blocks_are_as_before_afterwards() -> None:
    training = training_of(MODELS["gpt2, tied"])
    cores = [block.attention.core for block in training.gpt[0].blocks]  # type: ignore[union-attr]
    generate(decoder_of(training), PROMPTS, 2, GREEDY)
    after = [block.attention.core for block in training.gpt[0].blocks]  # type: ignore[union-attr]
    assert after == cores


@pytest.mark.parametrize("fault", ["places", "mask", "memory"])
@pytest.mark.parametrize("name", ["gpt2, tied", "llama, untied, 2 kv heads of 4"])
def test_a_wrong_cache_is_seen(name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    training = training_of(MODELS[name])
    expected = [longhand(training, prompt, 8) for prompt in PROMPTS[:3]]
    model = decoder_of(training)
    if fault == "places":
        forward = model.forward

        def shifted(tokens: Tensor, places: Tensor | None) -> Tensor | None:
            assert places is not None
            return forward(tokens, places + (1 if tokens.shape[1] == 1 else 0))

        model.forward = shifted
    elif fault == "mask":
        real = module.scaled_dot_product_attention

        def open_(*args: Any, attn_mask: Tensor, **more: Any) -> Tensor:
            return real(*args, attn_mask=torch.ones_like(attn_mask), **more)

        monkeypatch.setattr(module, "scaled_dot_product_attention", open_)
    else:
        split = module.split_heads

        def others_values(*args: Any) -> Any:
            q, k, v = split(*args)
            return q, k, v.flip(0) if v.shape[2] == 1 else v

        monkeypatch.setattr(module, "split_heads", others_values)
    assert generate(model, PROMPTS[:3], 8, GREEDY) != expected


@pytest.mark.parametrize("name", MODELS)
def test_transformers_generates_the_same(name: str) -> None:
    model = MODELS[name]
    theirs = peer(model).float()
    theirs.load_state_dict(to_hf(model, weights(model)), strict=False)
    training = training_of(model)
    for prompt in PROMPTS[:3]:
        ids = torch.tensor([prompt])
        out = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=9,
            do_sample=False,
            pad_token_id=0,
        )
        assert generate(decoder_of(training), [prompt], 9, GREEDY) == [
            out[0, len(prompt) :].tolist()
        ]


def test_attention_and_positions_start_anew_after_a_document_in_the_prompt() -> None:
    model = MODELS["gpt2, tied"]
    training = training_of(model, reset=True)
    prompts = [[7, 8, EOD, 4, 5], [1, 2, EOD], [EOD], [EOD, 3, EOD, EOD, 6]]
    alone = [[4, 5], [1, 2, EOD], [EOD], [6]]
    got = generate(decoder_of(training), prompts, 10, GREEDY)
    assert got == generate(decoder_of(training), alone, 10, GREEDY)
    assert got == generate(decoder_of(training, keeps=False), prompts, 10, GREEDY)
    for text, prompt in zip(got, prompts, strict=True):
        batch = one_batch(torch.tensor([prompt]), None)
        with torch.no_grad():
            logits = training.gpt[0](batch.tokens[0], None, batch.rows(0))
        assert text[0] == int(logits[-1, 0].argmax())
    other = training_of(model)
    assert generate(decoder_of(other), prompts[:1], 10, GREEDY) != got[:1]


def test_each_text_stops_at_its_own_place() -> None:
    training = training_of(MODELS["gpt2, tied"])
    free = generate(decoder_of(training), PROMPTS, 12, GREEDY)
    stops = {free[0][3], free[1][7]}
    got = generate(decoder_of(training), PROMPTS, 12, GREEDY, stop=lambda token: token in stops)
    for text, whole in zip(got, free, strict=True):
        at = next((i for i, token in enumerate(whole) if token in stops), 12)
        assert text == whole[:at]
    assert len({len(text) for text in got}) > 1
    assert generate(decoder_of(training), PROMPTS, 0, GREEDY) == [[], [], [], []]
    assert generate(decoder_of(training), [], 5, GREEDY) == []


LOGITS = torch.tensor([2.0, 1.0, 1.5, -1.0, 3.0, 0.0, 9.0])
IDS = 6  # the last is padding


def frequencies(sampling: Sampling, draws: int = 2000) -> Tensor:
    found = torch.zeros(len(LOGITS), dtype=torch.float64)
    for place in range(draws):
        found[sampling.choose(LOGITS, 0, place)] += 1
    return found / draws


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(num_ids=IDS), [0, 1, 2, 3, 4, 5]),
        (Sampling(0.7, num_ids=IDS, seed=1), [0, 1, 2, 3, 4, 5]),
        (Sampling(1.3, top_k=3, num_ids=IDS), [4, 0, 2]),
        (Sampling(top_p=0.85, num_ids=IDS), [4, 0, 2]),
        (Sampling(top_k=4, top_p=0.95, num_ids=IDS), [4, 0, 2, 1]),
        (Sampling(top_p=1e-9, num_ids=IDS), [4]),
        (Sampling(top_k=99, num_ids=IDS), [0, 1, 2, 3, 4, 5]),
        (Sampling(0.0, num_ids=IDS), [4]),
    ],
)
def test_tokens_are_drawn_as_often_as_their_probabilities_say(
    sampling: Sampling, kept: list[int]
) -> None:
    expected = torch.zeros(len(LOGITS), dtype=torch.float64)
    expected[kept] = torch.softmax(LOGITS[kept].double() / (sampling.temperature or 1.0), 0)
    got = frequencies(sampling)
    assert got[expected == 0].sum() == 0
    # four standard deviations of a share in 2000 draws are below 0.045
    assert float((got - expected).abs().max()) < 0.045
    if len(kept) > 1:
        assert float((got - expected.flip(0)).abs().max()) > 0.045


def test_a_draw_depends_on_seed_text_and_place_and_hardly_on_the_last_bits() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(5000, generator=draw)
    near = logits * (1 + 1e-6 * torch.randn(5000, generator=draw))
    sampling = Sampling(seed=3)
    got = [sampling.choose(logits, 0, place) for place in range(300)]
    assert got == [sampling.choose(logits, 0, place) for place in range(300)]
    assert got == [sampling.choose(near, 0, place) for place in range(300)]
    for other in (Sampling(seed=4).choose(logits, 0, 0), sampling.choose(logits, 1, 0), got[1]):
        assert other != got[0]


def test_of_equal_logits_the_lowest_ids_count() -> None:
    flat = torch.zeros(8)
    assert Sampling(0.0).choose(flat, 0, 0) == 0
    drawn = {Sampling(top_k=2).choose(flat, 0, place) for place in range(50)}
    assert drawn == {0, 1}
