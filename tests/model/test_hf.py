"""Our models are transformers' GPT-2 and Llama, to the last digits of float64.

transformers rounds to float32 in Llama's norms and rotary angles and in the loss, whatever the
model's dtype. ``Float64`` lifts just that from its own code, so that formulas are compared and not
roundings; ``test_transformers_untouched_...`` shows what it lifts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from einops import rearrange
from safetensors.torch import save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from launch.build import Training
from megalite.errors import CheckpointError, ConfigError
from megalite.mesh import Mesh
from megalite.slices import get_slice
from model.config import PRESETS, GPTConfig
from model.hf import config_from_hf, from_hf, hf_config, hf_tensors, to_hf
from tests.parity import harness
from tests.ranks import run_ranks

TRAIN = replace(harness.TRAIN, global_batch_size=4, micro_batch_size=2, steps=1)
GPT2 = replace(harness.GPT2, num_layers=2, ffn_hidden_size=48, norm_eps=1e-2)
LLAMA = replace(
    harness.LLAMA, num_layers=2, ffn_hidden_size=48, norm_eps=1e-2, rope_theta=500.0, init_std=0.1
)
MODELS = {
    "gpt2, tied": GPT2,
    "gpt2, untied": replace(GPT2, tied_embeddings=False, norm_eps=1e-5),
    "llama, untied, 2 kv heads of 4": LLAMA,
    "llama, tied, 1 kv head": replace(LLAMA, tied_embeddings=True, num_kv_heads=1),
    "llama, biases, as many kv heads": replace(LLAMA, bias=True, num_kv_heads=0, rope_theta=1e4),
}
TOLERANCE = 1e-10
Tensors = dict[str, Tensor]


class Float64(TorchFunctionMode):
    """Every float32 that the code inside asks for is a float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: object) -> object:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{k: wide(v) for k, v in (kwargs or {}).items()})


@dataclass
class Answer:
    """What a model says of one batch; gradients of the mean loss by transformers' names."""

    logits: Tensor
    loss: float
    grads: Tensors


def worst(got: Answer, expected: Answer) -> float:
    """Largest difference relative to a tensor's largest entry; of logits, loss, all gradients."""
    assert got.grads.keys() == expected.grads.keys()
    pairs = [(got.grads[name], grad) for name, grad in expected.grads.items()]
    pairs += [(got.logits, expected.logits), (torch.tensor(got.loss), torch.tensor(expected.loss))]
    assert all(a.shape == b.shape for a, b in pairs)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@cache
def weights(model: GPTConfig) -> Tensors:
    """By global name, float64; norms and biases are not at their initial values."""
    draw = torch.Generator().manual_seed(7)
    found = {}
    parts = [part for entry in hf_tensors(model) for part in entry.parts.items()]
    for name, shape in sorted(parts):
        found[name] = 0.2 * torch.randn(shape, generator=draw, dtype=torch.float64)
        if "norm.weight" in name:
            found[name] += 1.0
    return found


def load(tensors: Tensors, training: Training) -> None:
    """Overwrite what this rank holds of the global tensors."""
    for param in training.flat.parameters():
        at = get_slice(param)
        part = tensors[at.name]
        for dim, (start, size) in enumerate(zip(at.offset, at.extent, strict=True)):
            part = part.narrow(dim, start, size)
        at.valid(param.data).copy_(part)


@cache
def ours(model: GPTConfig) -> Answer:
    """One process of ours."""
    cfg = harness.config(model, train=TRAIN)
    tokens, _ = harness.global_rows(cfg, 0)
    logits: list[Tensor] = []

    @torch.no_grad()
    def begin(training: Training) -> None:
        load(weights(model), training)
        logits.append(training.gpt[0](tokens).transpose(0, 1))

    outcome = harness.join([harness.train(cfg, Mesh.single(), begin)])
    return Answer(logits[0], outcome.losses[0], to_hf(model, outcome.grads))


def peer(model: GPTConfig, **config: Any) -> Any:
    """An unfilled model of transformers in float64."""
    import transformers

    settings = transformers.AutoConfig.for_model(**hf_config(model), **config)
    return transformers.AutoModelForCausalLM.from_config(settings).double()


def theirs(model: GPTConfig, state: Tensors, *, untouched: bool = False, **config: Any) -> Answer:
    """transformers' model on the same batch, in its float64 form unless ``untouched``."""
    tokens, targets = harness.global_rows(harness.config(model, train=TRAIN), 0)
    with nullcontext() if untouched else Float64():
        module = peer(model, **config)
        found = module.load_state_dict(state, strict=False)
        tied = ["lm_head.weight"] if model.tied_embeddings else []
        assert (found.missing_keys, found.unexpected_keys) == (tied, [])
        out = module(input_ids=tokens, labels=targets, shift_labels=targets)
        out.loss.backward()
    grads = {name: param.grad for name, param in module.named_parameters()}
    return Answer(out.logits.detach(), float(out.loss.detach()), grads)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_loss_and_all_gradients_are_transformers(name: str, attention: str) -> None:
    model = MODELS[name]
    expected = theirs(model, to_hf(model, weights(model)), attn_implementation=attention)
    assert worst(ours(model), expected) < TOLERANCE


@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_transformers_untouched_differs_by_its_float32_roundings_only(model: GPTConfig) -> None:
    untouched = theirs(model, to_hf(model, weights(model)), untouched=True)
    assert TOLERANCE < worst(untouched, ours(model)) < 1e-5
    if model is GPT2:
        # Only its loss is rounded.
        expected = ours(model).logits
        assert (untouched.logits - expected).abs().max() < TOLERANCE * expected.abs().max()


def swapped(first: str, second: str) -> Callable[[Tensors], Tensors]:
    """Exchange the tensors whose names differ in one word."""

    def change(state: Tensors) -> Tensors:
        words = {first: second, second: first}
        return {
            ".".join(words.get(word, word) for word in name.split(".")): tensor
            for name, tensor in state.items()
        }

    return change


def transposed(state: Tensors) -> Tensors:
    name = next(n for n in state if n.endswith(("attn.c_proj.weight", "o_proj.weight")))
    return {**state, name: state[name].t().contiguous()}


def query_and_value_exchanged(state: Tensors) -> Tensors:
    name = "transformer.h.1.attn.c_attn.weight"
    return {**state, name: torch.cat(state[name].chunk(3, dim=1)[::-1], dim=1)}


def neighbours_paired(state: Tensors) -> Tensors:
    """Rows of q in the order of rotary pairs (2i, 2i + 1), as Meta's files have them."""
    name = "model.layers.0.self_attn.q_proj.weight"
    return {**state, name: rearrange(state[name], "(h two k) d -> (h k two) d", two=2, k=4)}


@pytest.mark.parametrize(
    ("model", "change"),
    [
        (GPT2, transposed),
        (GPT2, query_and_value_exchanged),
        (GPT2, swapped("ln_1", "ln_2")),
        (LLAMA, transposed),
        (LLAMA, swapped("k_proj", "v_proj")),
        (LLAMA, swapped("gate_proj", "up_proj")),
        (LLAMA, neighbours_paired),
    ],
)
def test_a_wrong_tensor_shows(model: GPTConfig, change: Callable[[Tensors], Tensors]) -> None:
    assert worst(theirs(model, change(to_hf(model, weights(model)))), ours(model)) > 1e-3


@pytest.mark.parametrize(
    "wrong",
    [replace(GPT2, norm_eps=1e-5), replace(LLAMA, norm_eps=1e-5), replace(LLAMA, rope_theta=1e4)],
)
def test_a_wrong_setting_shows(wrong: GPTConfig) -> None:
    right = GPT2 if wrong.position == "learned" else LLAMA
    assert worst(theirs(wrong, to_hf(right, weights(right))), ours(right)) > 1e-4


@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_two_by_two_ranks_have_the_gradients_of_transformers(model: GPTConfig) -> None:
    state = to_hf(model, weights(model))
    cfg = harness.config(model, train=TRAIN, tp=2, pp=2, sequence_parallel=True)
    outcome = harness.join(run_ranks(4, harness.body, cfg, partial(load, weights(model))))
    assert all(torch.equal(outcome.initial[n], t) for n, t in weights(model).items())
    expected = theirs(model, state)
    # Ranks give no logits.
    got = Answer(expected.logits, outcome.losses[0], to_hf(model, outcome.grads))
    assert worst(got, expected) < TOLERANCE
    back = to_hf(model, outcome.initial)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_there_and_back_is_bit_equal(model: GPTConfig) -> None:
    assert sum(t.numel() for t in weights(model).values()) == model.num_parameters()
    state = to_hf(model, weights(model))
    back = from_hf(model, state)
    assert back.keys() == weights(model).keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in weights(model).items())
    again = to_hf(model, back)
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_files_are_complete_to_transformers(model: GPTConfig, tmp_path: Path) -> None:
    import transformers

    state = to_hf(model, weights(model))
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(hf_config(model)))
    module, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, output_loading_info=True
    )
    assert not any(report.values()), report
    back = from_hf(config_from_hf(module.config.to_dict()), module.state_dict())
    assert all(torch.equal(back[name], tensor) for name, tensor in weights(model).items())
    head, embedding = module.lm_head.weight, module.get_input_embeddings().weight
    assert (head.data_ptr() == embedding.data_ptr()) is model.tied_embeddings
    assert head.shape[0] == module.config.vocab_size == model.vocab_size


def test_converted_tensors_are_contiguous_and_share_no_memory() -> None:
    for tensors in (to_hf(GPT2, weights(GPT2)), from_hf(GPT2, to_hf(GPT2, weights(GPT2)))):
        assert all(tensor.is_contiguous() for tensor in tensors.values())
        starts = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
        assert len(starts) == len(tensors)


def test_old_gpt2_files_without_prefix_and_with_masks_are_read() -> None:
    state = to_hf(GPT2, weights(GPT2))
    old = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    old |= {"h.0.attn.bias": torch.ones(1, 1, 16, 16), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    back = from_hf(GPT2, old)
    assert all(torch.equal(back[name], tensor) for name, tensor in weights(GPT2).items())


def test_a_tied_head_is_read_only_if_it_is_the_embedding() -> None:
    tied = replace(LLAMA, tied_embeddings=True)
    state = to_hf(tied, weights(tied))
    embedding = state["model.embed_tokens.weight"]
    assert from_hf(tied, {**state, "lm_head.weight": embedding}).keys() == weights(tied).keys()
    with pytest.raises(CheckpointError, match="lm_head.weight: differs from model.embed_tokens"):
        from_hf(tied, {**state, "lm_head.weight": embedding + 1e-9})
    with pytest.raises(CheckpointError, match="lm_head.weight: is missing"):
        from_hf(LLAMA, state)
    untied = from_hf(LLAMA, to_hf(LLAMA, weights(LLAMA)))
    assert not torch.equal(untied["head.weight"], untied["embedding.tokens.weight"])


def test_a_tensor_that_does_not_fit_is_named() -> None:
    state = to_hf(LLAMA, weights(LLAMA))
    name = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(CheckpointError, match=r"k_proj.weight: has shape \(32, 32\).*\(16, 32\)"):
        from_hf(LLAMA, {**state, name: torch.zeros(32, 32)})
    with pytest.raises(CheckpointError, match="layers.1.self_attn.k_proj.weight: is missing"):
        from_hf(LLAMA, {n: t for n, t in state.items() if n != name})
    with pytest.raises(CheckpointError, match="layers.2.mlp.up_proj.weight: has no place"):
        from_hf(LLAMA, {**state, "model.layers.2.mlp.up_proj.weight": torch.zeros(1)})


def test_a_padded_vocabulary_is_refused() -> None:
    padded = {**weights(GPT2), "embedding.tokens.weight": torch.zeros(66, 32)}
    with pytest.raises(CheckpointError, match=r"embedding.tokens.weight: has shape \(66, 32\)"):
        to_hf(GPT2, padded)


OTHER: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 48,
    "num_heads": 8,
    "num_kv_heads": 2,
    "ffn_hidden_size": 100,
    "seq_length": 24,
    "vocab_size": 77,
    "norm": "rmsnorm",
    "norm_eps": 3e-7,
    "activation": "swiglu",
    "position": "rope",
    "rope_theta": 777.5,
    "tied_embeddings": False,
    "bias": False,
    "dropout": 0.25,
    "init_std": 0.03,
}
LOST = {
    "gpt2": {"num_kv_heads", "norm", "activation", "position", "rope_theta", "bias"},
    "llama": {"norm", "activation", "position", "dropout"},
}


@pytest.mark.parametrize("kind", LOST)
@pytest.mark.parametrize("name", [f.name for f in fields(GPTConfig) if f.name != "preset"])
def test_each_field_survives_the_round_trip_or_is_refused(kind: str, name: str) -> None:
    base = GPTConfig(vocab_size=65)
    if kind == "llama":
        base = replace(base, norm="rmsnorm", activation="swiglu", position="rope")
    value = OTHER[name]
    if value == getattr(base, name):
        value = getattr(GPTConfig(), name)
    model = replace(base, **{name: value})
    if name in LOST[kind]:
        with pytest.raises(ConfigError, match=r"^model\.\w+: .* cannot be told to Hugging Face's"):
            hf_config(model)
        return
    back = config_from_hf(json.loads(json.dumps(hf_config(model))))
    assert getattr(back, name) == value
    assert back == replace(model, num_kv_heads=model.kv_heads, ffn_hidden_size=model.ffn)
    assert getattr(back, name) != getattr(config_from_hf(hf_config(base)), name)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_can_be_converted(preset: str) -> None:
    sizes: dict[str, Any] = PRESETS[preset]
    model = GPTConfig(preset, **{**sizes, "vocab_size": sizes["vocab_size"] or 2048})
    back = config_from_hf(hf_config(model))
    assert back.num_parameters() == model.num_parameters()
    assert back.rope_theta == model.rope_theta and back.tied_embeddings == model.tied_embeddings


def test_an_open_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="model.vocab_size: 0 leaves"):
        hf_config(GPTConfig())


def test_what_transformers_writes_by_default_is_read() -> None:
    import transformers

    gpt2 = config_from_hf(transformers.GPT2Config().to_dict())
    assert gpt2.num_parameters() == 124439808 and gpt2.dropout == 0.1 and gpt2.tied_embeddings
    assert config_from_hf(json.loads(transformers.GPT2Config().to_json_string())) == gpt2
    llama = config_from_hf(json.loads(transformers.LlamaConfig().to_json_string()))
    assert llama.num_parameters() == 6738415616 and llama.norm_eps == 1e-6
    assert llama.rope_theta == 10000.0 and not llama.tied_embeddings and not llama.bias


def test_a_setting_left_out_is_what_transformers_takes_it_for() -> None:
    import transformers

    for full in (hf_config(GPT2), hf_config(LLAMA)):
        sizes = {
            name: value
            for name, value in full.items()
            if type(value) is int and name not in ("n_inner", "num_key_value_heads", "head_dim")
        }
        short = {"model_type": full["model_type"], **sizes}
        filled = transformers.AutoConfig.for_model(**short).to_dict()
        assert config_from_hf(short) == config_from_hf(filled)


@pytest.mark.parametrize("other", ["rope_theta", "rope_parameters"])
def test_rotary_settings_are_written_for_both_generations(other: str) -> None:
    import transformers

    raw = hf_config(LLAMA)
    del raw[other]
    assert config_from_hf(raw) == config_from_hf(hf_config(LLAMA))
    assert transformers.AutoConfig.for_model(**raw).rope_parameters["rope_theta"] == 500.0


def test_both_generations_of_rotary_settings_are_read() -> None:
    now = hf_config(LLAMA)
    bare = {k: v for k, v in now.items() if k not in ("rope_theta", "rope_parameters")}
    nested = {"rope_theta": 500.0, "rope_type": "default", "partial_rotary_factor": 1.0}
    for rope in (
        {"rope_theta": 500},
        {"rope_theta": 500.0, "rope_scaling": None},
        {"rope_parameters": nested},
    ):
        assert config_from_hf({**bare, **rope}).rope_theta == 500.0
    assert config_from_hf(bare).rope_theta == 10000.0
    with pytest.raises(ConfigError, match="rope_theta is 500.0 but rope_parameters.rope_theta is"):
        config_from_hf({**now, "rope_parameters": {**nested, "rope_theta": 9.0}})


@pytest.mark.parametrize(
    ("model", "change", "field"),
    [
        (GPT2, {"model_type": "gpt_neox"}, "model_type"),
        (GPT2, {"activation_function": "gelu"}, "activation_function"),
        (GPT2, {"scale_attn_weights": False}, "scale_attn_weights"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (GPT2, {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention"),
        (GPT2, {"attn_pdrop": 0.5}, "attn_pdrop"),
        (GPT2, {"n_head": 5}, "n_head"),
        (GPT2, {"n_layer": "12"}, "n_layer"),
        (GPT2, {"n_layer": 0}, "n_layer"),
        (GPT2, {"tie_word_embeddings": None}, "tie_word_embeddings"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
        (LLAMA, {"attention_dropout": 0.1}, "attention_dropout"),
        (LLAMA, {"attention_bias": True}, "mlp_bias"),
        (LLAMA, {"head_dim": 16}, "head_dim"),
        (LLAMA, {"sliding_window": 64}, "sliding_window"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type"),
        (
            LLAMA,
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0}},
            "rope_parameters.rope_type",
        ),
    ],
)
def test_what_our_model_does_not_have_is_named(
    model: GPTConfig, change: dict[str, Any], field: str
) -> None:
    raw = hf_config(model)
    config_from_hf(raw)
    with pytest.raises(ConfigError) as caught:
        config_from_hf({**raw, **change})
    assert caught.value.field == field


def test_a_missing_size_is_named() -> None:
    raw = hf_config(LLAMA)
    del raw["intermediate_size"]
    with pytest.raises(ConfigError, match="intermediate_size: is missing"):
        config_from_hf(raw)
