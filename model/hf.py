"""Names, layouts and settings to and from Hugging Face's GPT-2 and Llama.

A mapping only: no file is read or written, and ``transformers`` is not needed. Nothing is
computed either, since the formulas are the same: GELU in its tanh form, rotary pairs (i, i + k/2),
neighbouring query heads that share a key/value head. What one side cannot tell the other is an
error.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from megalite.errors import CheckpointError, ConfigError
from model.config import GPTConfig
from model.gpt import EMBEDDING, HEAD

Shape = tuple[int, ...]


# --- tensors -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class HfTensor:
    """One tensor of Hugging Face's: ours stacked along dim 0, then ``transposed`` or not.

    Attributes:
        parts: our global name -> shape, in the order of the stack.
    """

    name: str
    parts: Mapping[str, Shape]
    transposed: bool = False

    @property
    def rows(self) -> list[int]:
        return [shape[0] for shape in self.parts.values()]

    @property
    def shape(self) -> Shape:
        first = next(iter(self.parts.values()))
        whole = (sum(self.rows), *first[1:])
        return whole[::-1] if self.transposed else whole

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Theirs from ours; contiguous, and the same memory where nothing is to be done."""
        found = [tensors[name] for name in self.parts]
        whole = torch.cat(found) if len(found) > 1 else found[0]
        return (whole.t() if self.transposed else whole).contiguous()

    def views(self, tensor: Tensor) -> dict[str, Tensor]:
        """Ours from theirs, in the same memory."""
        whole = tensor.t() if self.transposed else tensor
        return dict(zip(self.parts, torch.split(whole, self.rows), strict=True))

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """Ours from theirs; contiguous, and no two of them in the same memory."""
        found = self.views(tensor)
        if len(found) == 1:
            return {name: view.contiguous() for name, view in found.items()}
        whole = torch.contiguous_format
        return {name: view.clone(memory_format=whole) for name, view in found.items()}


def hf_tensors(cfg: GPTConfig) -> list[HfTensor]:
    """Every tensor of the model as Hugging Face has it; a tied head is not listed.

    Raises:
        ConfigError: if the model is neither a GPT-2 nor a Llama.
    """
    check(cfg)
    llama = _family(cfg) is LLAMA
    embedding = {EMBEDDING: (cfg.vocab_size, cfg.hidden_size)}
    found = [
        HfTensor("model.embed_tokens.weight" if llama else "transformer.wte.weight", embedding)
    ]
    if not llama:
        positions = {"embedding.positions.weight": (cfg.seq_length, cfg.hidden_size)}
        found.append(HfTensor("transformer.wpe.weight", positions))
    for n in range(cfg.num_layers):
        found += (_llama_block if llama else _gpt2_block)(cfg, n)
    found += _norm(cfg, "model.norm" if llama else "transformer.ln_f", "final_norm")
    if not cfg.tied_embeddings:
        found.append(HfTensor("lm_head.weight", {HEAD: (cfg.vocab_size, cfg.hidden_size)}))
    return found


def _gpt2_block(cfg: GPTConfig, n: int) -> Iterator[HfTensor]:
    theirs, ours = f"transformer.h.{n}", f"layers.{n}"
    d, qkv = cfg.hidden_size, {f"{ours}.attention.{part}": cfg.hidden_size for part in "qkv"}
    yield from _norm(cfg, f"{theirs}.ln_1", f"{ours}.attention_norm")
    yield from _linear(cfg, f"{theirs}.attn.c_attn", qkv, d)
    yield from _linear(cfg, f"{theirs}.attn.c_proj", {f"{ours}.attention.out": d}, d)
    yield from _norm(cfg, f"{theirs}.ln_2", f"{ours}.mlp_norm")
    yield from _linear(cfg, f"{theirs}.mlp.c_fc", {f"{ours}.mlp.up": cfg.ffn}, d)
    yield from _linear(cfg, f"{theirs}.mlp.c_proj", {f"{ours}.mlp.down": d}, cfg.ffn)


def _llama_block(cfg: GPTConfig, n: int) -> Iterator[HfTensor]:
    theirs, ours = f"model.layers.{n}", f"layers.{n}"
    d, kv = cfg.hidden_size, cfg.kv_heads * cfg.head_dim
    yield from _norm(cfg, f"{theirs}.input_layernorm", f"{ours}.attention_norm")
    for part, rows in (("q", d), ("k", kv), ("v", kv)):
        name = f"{theirs}.self_attn.{part}_proj"
        yield from _linear(cfg, name, {f"{ours}.attention.{part}": rows}, d)
    yield from _linear(cfg, f"{theirs}.self_attn.o_proj", {f"{ours}.attention.out": d}, d)
    yield from _norm(cfg, f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm")
    for part, rows, columns in (("gate", cfg.ffn, d), ("up", cfg.ffn, d), ("down", d, cfg.ffn)):
        name = f"{theirs}.mlp.{part}_proj"
        yield from _linear(cfg, name, {f"{ours}.mlp.{part}": rows}, columns)


def _norm(cfg: GPTConfig, theirs: str, ours: str) -> Iterator[HfTensor]:
    for part in ("weight", "bias") if cfg.norm == "layernorm" else ("weight",):
        yield HfTensor(f"{theirs}.{part}", {f"{ours}.{part}": (cfg.hidden_size,)})


def _linear(cfg: GPTConfig, theirs: str, rows: dict[str, int], d_in: int) -> Iterator[HfTensor]:
    """A weight and its bias; GPT-2 keeps its weights as (in, out)."""
    weights: dict[str, Shape] = {f"{name}.weight": (n, d_in) for name, n in rows.items()}
    yield HfTensor(f"{theirs}.weight", weights, transposed=_family(cfg) is GPT2)
    if cfg.bias:
        yield HfTensor(f"{theirs}.bias", {f"{name}.bias": (n,) for name, n in rows.items()})


def to_hf(cfg: GPTConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of ``GPT2LMHeadModel`` or ``LlamaForCausalLM``, without a tied head.

    Args:
        tensors: global name -> whole tensor without padding: weights, or anything shaped like
            them, such as gradients.
    Returns:
        contiguous tensors of the same dtype, in the same memory where only the name differs.
    Raises:
        ConfigError: if the model is neither a GPT-2 nor a Llama.
        CheckpointError: for a tensor that is missing, unknown or of another shape.
    """
    listed = hf_tensors(cfg)
    shapes = {name: shape for entry in listed for name, shape in entry.parts.items()}
    _check_shapes(tensors, shapes)
    return {entry.name: entry.join(tensors) for entry in listed}


def from_hf(cfg: GPTConfig, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of ``to_hf``.

    Args:
        state_dict: of the model with its head, or of the headless model inside it (names without
            ``transformer.`` or ``model.``); constants that old files hold beside the weights are
            left out.
    Returns:
        global name -> contiguous tensor of the same dtype.
    Raises:
        ConfigError: if the model is neither a GPT-2 nor a Llama.
        CheckpointError: for a tensor that is missing, unknown or of another shape, and for a head
            that differs from the embedding it is tied to.
    """
    listed = hf_tensors(cfg)
    shapes = {entry.name: entry.shape for entry in listed}
    names = {name: full_name(cfg, name, shapes) for name in state_dict}
    found = {full: state_dict[name] for name, full in names.items() if full is not None}
    check_tie(cfg, found)
    _check_shapes(found, shapes)
    return {name: part for entry in listed for name, part in entry.split(found[entry.name]).items()}


_CONSTANTS = re.compile(r"(^|\.)(attn\.(masked_)?bias|rotary_emb\.inv_freq)$")


def full_name(cfg: GPTConfig, name: str, known: Container[str]) -> str | None:
    """A name with the prefix that a headless model leaves out; None for a constant."""
    if _CONSTANTS.search(name):
        return None
    full = _family(cfg).prefix + name
    return full if name not in known and full in known else name


def check_tie(cfg: GPTConfig, found: dict[str, Tensor]) -> None:
    """Take the head out of what was found if it is tied to the embedding.

    Raises:
        CheckpointError: if the two differ.
    """
    head = found.pop("lm_head.weight", None) if cfg.tied_embeddings else None
    name = hf_tensors(cfg)[0].name
    if head is not None and name in found and not torch.equal(head, found[name]):
        raise CheckpointError("lm_head.weight", f"differs from {name}, but the config ties them")


def _check_shapes(tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape]) -> None:
    for name in shapes:
        if name not in tensors:
            raise CheckpointError(name, "is missing")
    for name, tensor in tensors.items():
        if name not in shapes:
            raise CheckpointError(name, "has no place in a model of this config")
        if tuple(tensor.shape) != shapes[name]:
            raise CheckpointError(
                name, f"has shape {tuple(tensor.shape)}, but the config means {shapes[name]}"
            )


# --- settings ----------------------------------------------------------------------------------


REQUIRED = object()


@dataclass(frozen=True)
class Family:
    """What config.json says of one kind of model.

    Attributes:
        prefix: of the names of all tensors but the head.
        means: our fields that the kind of model implies.
        settings: their setting -> (our field, its value where the file leaves it out); several
            may be one field of ours. None means 4 x hidden_size, or a key/value head a head.
        only: settings that we have at these values alone, the first being written and assumed.
    """

    model_type: str
    architecture: str
    prefix: str
    means: dict[str, Any]
    settings: dict[str, tuple[str, Any]]
    only: dict[str, tuple[Any, ...]]


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    "transformer.",
    {"norm": "layernorm", "activation": "gelu", "position": "learned", "bias": True},
    {
        "vocab_size": ("vocab_size", REQUIRED),
        "n_positions": ("seq_length", REQUIRED),
        "n_embd": ("hidden_size", REQUIRED),
        "n_layer": ("num_layers", REQUIRED),
        "n_head": ("num_heads", REQUIRED),
        "n_inner": ("ffn_hidden_size", None),
        "layer_norm_epsilon": ("norm_eps", 1e-5),
        "initializer_range": ("init_std", 0.02),
        "tie_word_embeddings": ("tied_embeddings", True),
        "resid_pdrop": ("dropout", 0.1),
        "embd_pdrop": ("dropout", 0.1),
        "attn_pdrop": ("dropout", 0.1),
    },
    {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
    },
)

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    "model.",
    {"norm": "rmsnorm", "activation": "swiglu", "position": "rope"},
    {
        "vocab_size": ("vocab_size", REQUIRED),
        "max_position_embeddings": ("seq_length", REQUIRED),
        "hidden_size": ("hidden_size", REQUIRED),
        "num_hidden_layers": ("num_layers", REQUIRED),
        "num_attention_heads": ("num_heads", REQUIRED),
        "num_key_value_heads": ("num_kv_heads", None),
        "intermediate_size": ("ffn_hidden_size", REQUIRED),
        "rms_norm_eps": ("norm_eps", 1e-6),
        "rope_theta": ("rope_theta", 10000.0),
        "initializer_range": ("init_std", 0.02),
        "tie_word_embeddings": ("tied_embeddings", False),
        "attention_bias": ("bias", False),
        "mlp_bias": ("bias", False),
    },
    {"hidden_act": ("silu", "swish"), "attention_dropout": (0.0,)},
)

# Settings that do not change what the model computes.
_NO_MATTER = frozenset(
    "architectures bos_token_id chunk_size_feed_forward dtype eos_token_id gradient_checkpointing "
    "id2label is_encoder_decoder label2id model_type n_ctx name_or_path output_attentions "
    "output_hidden_states pad_token_id pretraining_tp problem_type return_dict "
    "summary_activation summary_first_dropout summary_proj_to_labels summary_type "
    "summary_use_proj task_specific_params torch_dtype transformers_version use_cache".split()
)


def check(cfg: GPTConfig) -> None:
    """Raise unless all of ``cfg`` can be told to Hugging Face's GPT-2 or Llama.

    Raises:
        ConfigError: names our field.
    """
    if cfg.vocab_size < 1:
        raise ConfigError(
            "model.vocab_size",
            f"{cfg.vocab_size} leaves the size of the vocabulary open",
            "Resolve it from the tokenizer first",
        )
    family, given = _family(cfg), cfg.explicit()
    understood = config_from_hf(_written(family, given))
    for field in fields(GPTConfig):
        mine, theirs = getattr(given, field.name), getattr(understood, field.name)
        if mine != theirs:
            raise ConfigError(
                f"model.{field.name}",
                f"{mine} cannot be told to Hugging Face's {family.model_type}, which has {theirs}",
                f"Only models with model.{field.name}={theirs} can be converted",
            )


def hf_config(cfg: GPTConfig) -> dict[str, Any]:
    """The content of config.json, for ``transformers`` 4 and 5.

    Names no special tokens and no dtype: those are the tokenizer's and the file's to say.

    Raises:
        ConfigError: names the field of ours that has no counterpart.
    """
    check(cfg)
    return _written(_family(cfg), cfg.explicit())


def _written(family: Family, cfg: GPTConfig) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{theirs: getattr(cfg, ours) for theirs, (ours, _) in family.settings.items()},
        **{name: values[0] for name, values in family.only.items()},
        # Left out, they would be tokens of the vocabulary that the family was published with.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family is LLAMA:
        raw["head_dim"] = cfg.head_dim
        # Version 4 reads rope_theta beside it and does not know this name.
        raw["rope_parameters"] = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    return raw


def config_from_hf(raw: Mapping[str, Any]) -> GPTConfig:
    """The model that a config.json means, with every size spelt out.

    Args:
        raw: as written by ``transformers`` 4 or 5.
    Raises:
        ConfigError: names the setting that is missing, malformed, unknown or that our model
            does not have.
    """
    family = {f.model_type: f for f in (GPT2, LLAMA)}.get(raw.get("model_type", ""))
    if family is None:
        raise ConfigError(
            "model_type", f"{raw.get('model_type')!r} is not supported", "Use a gpt2 or a llama"
        )
    rest = {k: v for k, v in raw.items() if not k.startswith("_") and k not in _NO_MATTER}
    if family is LLAMA:
        rest["rope_theta"] = _rope_theta(rest)
    head_dim = rest.pop("head_dim", None) if family is LLAMA else None
    for name, values in family.only.items():
        if (value := rest.pop(name, values[0])) not in values:
            raise _unsupported(name, value, values)
    found = _fields(family, rest)
    for name in rest:
        if name not in family.settings:
            raise ConfigError(
                name,
                f"{rest[name]!r}: the setting is not known for a {family.model_type}",
                "If the model does not depend on it, take it out of config.json",
            )
    cfg = GPTConfig(**found).explicit()
    if cfg.hidden_size % cfg.num_heads:
        raise ConfigError(
            "num_attention_heads" if family is LLAMA else "n_head",
            f"{cfg.num_heads} does not divide the hidden size {cfg.hidden_size}",
            "Such a model cannot be loaded by transformers either",
        )
    if head_dim not in (None, cfg.head_dim):
        raise _unsupported("head_dim", head_dim, (cfg.head_dim,))
    return cfg


def _fields(family: Family, rest: Mapping[str, Any]) -> dict[str, Any]:
    """Our fields, by name, from their settings."""
    found, source = dict(family.means), dict[str, str]()
    for theirs, (ours, absent) in family.settings.items():
        value = rest.get(theirs, absent)
        if value is REQUIRED:
            raise ConfigError(theirs, "is missing", "Add it to config.json")
        value = 0 if value is None and absent is None else _typed(theirs, ours, value)
        if ours in source and found[ours] != value:
            raise ConfigError(
                theirs,
                f"{value!r}, while {source[ours]} is {found[ours]!r}; model.{ours} is both",
                "Only equal values are supported",
            )
        found[ours], source[ours] = value, theirs
    return found


def _typed(theirs: str, ours: str, value: Any) -> Any:
    """The value if it has our field's type; a float may be whole, a size is above 0."""
    kind = type(getattr(GPTConfig, ours))
    if kind is float and type(value) in (int, float):
        return float(value)
    if type(value) is not kind or (kind is int and value < 1):
        what = "a whole number above 0" if kind is int else f"a {kind.__name__}"
        raise ConfigError(theirs, f"{value!r} is not {what}", "Correct config.json")
    return value


def _rope_theta(rest: dict[str, Any]) -> Any:
    """Take the base of the rotation out of the places where versions 4 and 5 keep it."""
    found = {"rope_theta": rest.pop("rope_theta")} if "rope_theta" in rest else {}
    for where in ("rope_parameters", "rope_scaling"):
        for name, value in (rest.pop(where, None) or {}).items():
            if name == "rope_theta":
                found[f"{where}.{name}"] = value
            elif value != {"rope_type": "default", "type": "default"}.get(name, 1.0):
                raise _unsupported(f"{where}.{name}", value, ("the unscaled rotation",))
    theta, *others = found.values() or [LLAMA.settings["rope_theta"][1]]
    if any(other != theta for other in others):
        listed = " but ".join(f"{name} is {value}" for name, value in found.items())
        raise ConfigError("rope_theta", listed, "Leave the true one")
    return theta


def _unsupported(name: str, value: Any, values: tuple[Any, ...]) -> ConfigError:
    listed = " or ".join(map(str, values))
    return ConfigError(name, f"{value!r} is not supported", f"Our model has {listed} only")


def _family(cfg: GPTConfig) -> Family:
    return LLAMA if cfg.position == "rope" else GPT2
