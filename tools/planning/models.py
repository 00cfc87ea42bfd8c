"""A model by name or file, as the planner sees it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from launch.config import expand_preset
from megalite.config import suggest
from megalite.errors import ConfigError
from megalite.planner.hardware import read_yaml
from megalite.planner.shape import ModelShape
from model.config import PRESETS, GPTConfig

USUAL_VOCAB = 50257
"""Of a model that leaves its vocabulary to the tokenizer."""


def find_model(name: str) -> GPTConfig:
    """A preset, or a YAML file: a training configuration, or its model section alone.

    Raises:
        ConfigError: for an unknown name or field.
    """
    if name in PRESETS:
        return _built({"preset": name}, name)
    if name.endswith((".yaml", ".yml")):
        found = read_yaml(Path(name))
        section = found.get("model", found)
        if not isinstance(section, dict):
            raise ConfigError(name, "has no fields of a model", "Write model: {num_layers: ...}")
        return _built(section, name)
    raise ConfigError(
        "--model",
        f"there is no model {name!r}",
        f"{suggest(name, list(PRESETS))}, or a YAML file with a model section",
    )


def _built(section: dict[str, Any], name: str) -> GPTConfig:
    known = [f.name for f in fields(GPTConfig)]
    for key in section:
        if key not in known:
            raise ConfigError(f"{name}: model.{key}", "is no field", suggest(key, known))
    preset = expand_preset(str(section.get("preset", "")))
    values = {key.removeprefix("model."): value for key, value in preset.items()}
    try:
        cfg = GPTConfig(**{**values, **section})
        if min(cfg.num_layers, cfg.hidden_size, cfg.num_heads, cfg.seq_length) < 1:
            raise ValueError("a size is less than 1")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name}: model", str(error), "Give whole numbers of 1 or more"
        ) from error
    return cfg


def shape_of(model: GPTConfig, fused_attention: bool = True) -> ModelShape:
    return ModelShape(
        layers=model.num_layers,
        hidden=model.hidden_size,
        heads=model.num_heads,
        seq=model.seq_length,
        vocab=model.vocab_size or USUAL_VOCAB,
        kv_heads=model.num_kv_heads,
        ffn=model.ffn_hidden_size,
        gated=model.activation == "swiglu",
        tied=model.tied_embeddings,
        bias=model.bias,
        rmsnorm=model.norm == "rmsnorm",
        learned_positions=model.position == "learned",
        dropout=model.dropout > 0,
        fused_attention=fused_attention,
    )
