"""What a model is, in the numbers that time and memory depend on; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.parallel_config import ModelFacts


@dataclass(frozen=True)
class ModelShape:
    """A dense GPT-2 (the defaults) or a Llama (gated, rmsnorm, rope, no biases, untied).

    Attributes:
        kv_heads: key/value heads; 0: as many as heads.
        ffn: features inside the MLP; 0: 4 x hidden.
        gated: the MLP has a gate (three matrices instead of two).
        learned_positions: a vector a position is added to the embedding.
        dropout: masks are made, written and read.
        fused_attention: scores are never written (FlashAttention); else scores, softmax and
            dropout are kernels of their own.
        vocab_multiple: the vocabulary is padded to a multiple of this x tp.
    """

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    kv_heads: int = 0
    ffn: int = 0
    gated: bool = False
    tied: bool = True
    bias: bool = True
    rmsnorm: bool = False
    learned_positions: bool = True
    dropout: bool = False
    fused_attention: bool = True
    vocab_multiple: int = 1

    @property
    def kv(self) -> int:
        return self.kv_heads or self.heads

    @property
    def wide(self) -> int:
        """Features inside the MLP."""
        return self.ffn or 4 * self.hidden

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def ups(self) -> int:
        """Matrices into the MLP."""
        return 2 if self.gated else 1

    def rows(self, tp: int) -> int:
        """Rows of the embedding that a tp rank holds, padding included."""
        unit = self.vocab_multiple * tp
        return -(-self.vocab // unit) * unit // tp

    def widths(self, tp: int) -> tuple[int, int, int]:
        """A tp rank's features of queries, of keys, and of the MLP."""
        kv = max(self.kv // tp, 1) * self.head_dim
        return self.heads * self.head_dim // tp, kv, self.wide // tp

    def layer_elements(self, tp: int = 1) -> int:
        """Parameters of a layer that a tp rank holds."""
        d, (q, kv, ffn) = self.hidden, self.widths(tp)
        biases = q + 2 * kv + self.ups * ffn + 2 * d if self.bias else 0
        return d * (2 * q + 2 * kv + (self.ups + 1) * ffn) + biases + 2 * self.norm_elements

    @property
    def norm_elements(self) -> int:
        return self.hidden * (1 if self.rmsnorm else 2)

    def embedding_elements(self, tp: int = 1) -> int:
        positions = self.seq * self.hidden if self.learned_positions else 0
        return self.rows(tp) * self.hidden + positions

    def head_elements(self, tp: int = 1) -> int:
        """The final norm and the head's matrix."""
        return self.rows(tp) * self.hidden + self.norm_elements

    def num_parameters(self) -> int:
        """Every element once, tied embeddings once, no padding."""
        d = self.hidden
        positions = self.seq * d if self.learned_positions else 0
        matrices = self.vocab * d * (1 if self.tied else 2)
        return matrices + positions + self.layers * self.layer_elements() + self.norm_elements

    def model_flops(self, sequences: int) -> float:
        """Of forward and backward of so many sequences, without recomputation; the score matrix
        counts whole. Source: Korthikanti et al. 2022 (arXiv:2205.05198), appendix A: for a GPT-2
        72 B L s h^2 (1 + s / 6h + V / 12hL)."""
        d, (q, kv, ffn) = self.hidden, self.widths(1)
        matrices = d * (2 * q + 2 * kv + (self.ups + 1) * ffn)
        layer = 2.0 * matrices + 4.0 * self.seq * q
        return 3.0 * sequences * self.seq * (self.layers * layer + 2.0 * d * self.vocab)

    def facts(self) -> ModelFacts:
        return ModelFacts(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_heads=self.heads,
            num_kv_heads=self.kv,
            ffn=self.wide,
            seq_length=self.seq,
            vocab_size=self.vocab,
            tied=self.tied,
        )
