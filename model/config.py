"""What the model is; sizes by name. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class GPTConfig:
    """A GPT-2 (the defaults) or a Llama (rmsnorm, swiglu, rope, no biases, untied), or a mix."""

    preset: str = ""
    """A named size (see PRESETS); every other field that is given overrides it."""
    num_layers: int = 4
    """Transformer blocks."""
    hidden_size: int = 256
    """Features of a token between blocks."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int = 0
    """Key/value heads (grouped-query attention); 0: as many as num_heads."""
    ffn_hidden_size: int = 0
    """Features inside the MLP; 0: 4 x hidden_size."""
    seq_length: int = 128
    """Tokens of a sample, and of the longest context."""
    vocab_size: int = 0
    """Tokens of the vocabulary; 0: the tokenizer's."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation before attention, MLP and head."""
    norm_eps: float = 1e-5
    """Added to the variance in norms."""
    activation: Literal["gelu", "swiglu"] = "gelu"
    """What the MLP puts between its products; swiglu has a gate."""
    position: Literal["learned", "rope"] = "learned"
    """How a token knows its place: a learned vector, or rotated queries and keys."""
    rope_theta: float = 10000.0
    """Base of the rotation's wave lengths."""
    tied_embeddings: bool = True
    """One matrix for the embedding and the head."""
    bias: bool = True
    """Biases in linear layers."""
    dropout: float = 0.0
    """Share of features dropped in training."""
    init_std: float = 0.02
    """Standard deviation of weights; projections into the residual stream: / sqrt(2 x layers)."""

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def ffn(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def explicit(self) -> GPTConfig:
        """The same model without names and zeros that stand for something."""
        return replace(self, preset="", num_kv_heads=self.kv_heads, ffn_hidden_size=self.ffn)

    def num_parameters(self) -> int:
        """Every element once, tied embeddings once, no padding."""
        d, kv = self.hidden_size, self.kv_heads * self.head_dim
        norm = d * (2 if self.norm == "layernorm" else 1)
        attention = 2 * d * d + 2 * d * kv + (2 * d + 2 * kv if self.bias else 0)
        ups = 2 if self.activation == "swiglu" else 1
        mlp = (ups + 1) * d * self.ffn + (ups * self.ffn + d if self.bias else 0)
        embedding = self.vocab_size * d * (1 if self.tied_embeddings else 2)
        positions = self.seq_length * d if self.position == "learned" else 0
        return embedding + positions + self.num_layers * (attention + mlp + 2 * norm) + norm


def _gpt3(
    layers: int, hidden: int, heads: int, seq: int = 2048, vocab: int = 50257
) -> dict[str, object]:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "seq_length": seq,
        "vocab_size": vocab,
    }


def _llama(
    layers: int, hidden: int, heads: int, kv: int, ffn: int, **more: object
) -> dict[str, object]:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv,
        "ffn_hidden_size": ffn,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "position": "rope",
        "tied_embeddings": False,
        "bias": False,
        **more,
    }


PRESETS: dict[str, dict[str, object]] = {
    "gpt-tiny": _gpt3(4, 256, 4, seq=128, vocab=0),
    # Radford et al. 2019, table 2
    "gpt2-124m": _gpt3(12, 768, 12, seq=1024),
    "gpt2-355m": _gpt3(24, 1024, 16, seq=1024),
    "gpt2-774m": _gpt3(36, 1280, 20, seq=1024),
    "gpt2-1.5b": _gpt3(48, 1600, 25, seq=1024),
    # Brown et al. 2020 (arXiv:2005.14165), table 2.1
    "gpt3-1.3b": _gpt3(24, 2048, 16),
    "gpt3-6.7b": _gpt3(32, 4096, 32),
    "gpt3-13b": _gpt3(40, 5120, 40),
    "gpt3-175b": _gpt3(96, 12288, 96),
    # Smith et al. 2022 (arXiv:2201.11990), section 3
    "gpt-530b": _gpt3(105, 20480, 128),
    # Touvron et al. 2023 (arXiv:2307.09288); Llama 3 (arXiv:2407.21783), table 3
    "llama2-7b": _llama(32, 4096, 32, 32, 11008, seq_length=4096, vocab_size=32000),
    "llama3-8b": _llama(
        32, 4096, 32, 8, 14336, seq_length=8192, vocab_size=128256, rope_theta=500000.0
    ),
    "llama3-70b": _llama(
        80, 8192, 64, 8, 28672, seq_length=8192, vocab_size=128256, rope_theta=500000.0
    ),
}
