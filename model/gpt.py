"""One GPT that is GPT-2 or Llama by its config, on megalite's parallel layers.

Activations are (s, b, d), s the sequence: cut to s/tp between the linears under sequence
parallelism. Letters as in the rest of the project: h heads, v vocabulary, k head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from megalite.dropout import Draw, dropout
from megalite.rows import Rows
from megalite.slices import get_slice, set_slice
from megalite.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megalite.tensor_parallel.embedding import (
    LearnedPositions,
    Norm,
    padded_rows,
    vocab_parallel_embedding,
    vocab_weight,
)
from megalite.tensor_parallel.linear import (
    ColumnParallelLinear,
    Layout,
    RowParallelLinear,
    vocab_logits,
)
from model.config import GPTConfig
from model.documents import document_mask, document_starts, places

Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class About:
    """What the blocks of a stage are told about a microbatch.

    Attributes:
        rotation: of queries and keys, or None: positions are learned.
        mask: (b, 1, s, s) to add to the scores, or None: each token sees all before it.
        draw: of dropout's masks, or None: nothing is dropped.
        places: (s, b) positions of tokens that are parts of texts, or None.
    """

    rotation: Rotation | None = None
    mask: Tensor | None = None
    draw: Draw | None = None
    places: Tensor | None = None


def rotate(x: Float[Tensor, "s b h k"], rotation: Rotation) -> Float[Tensor, "s b h k"]:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864), pairs (i, i + k/2)."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rope(cfg: GPTConfig, places: Int64[Tensor, "s b"], layout: Layout) -> Rotation:
    """(s, b, 1, k/2) cosines and sines of position times theta^(-2i/k)."""
    dtype = torch.promote_types(layout.dtype, torch.float32)
    pair = torch.arange(0, cfg.head_dim, 2, dtype=dtype, device=layout.device)
    frequency = cfg.rope_theta ** (-pair / cfg.head_dim)
    angles = places.to(dtype)[:, :, None, None] * frequency
    return angles.cos().to(layout.dtype), angles.sin().to(layout.dtype)


def split_heads(
    q: Float[Tensor, "s b q_local"],
    k: Float[Tensor, "s b kv_local"],
    v: Float[Tensor, "s b kv_local"],
    head_dim: int,
    rotation: Rotation | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(b, h, s, k) each, queries and keys rotated."""
    q, k, v = (rearrange(t, "s b (h k) -> s b h k", k=head_dim) for t in (q, k, v))
    if rotation is not None:
        q, k = rotate(q, rotation), rotate(k, rotation)
    q, k, v = (rearrange(t, "s b h k -> b h s k") for t in (q, k, v))
    return q, k, v


def attend(
    q: Float[Tensor, "s b q_local"],
    k: Float[Tensor, "s b kv_local"],
    v: Float[Tensor, "s b kv_local"],
    head_dim: int,
    about: About,
) -> Float[Tensor, "s b q_local"]:
    """Attention of each head, from what its products give to what the next one takes."""
    q, k, v = split_heads(q, k, v, head_dim, about.rotation)
    y = scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=about.mask,
        is_causal=about.mask is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return rearrange(y, "b h s k -> s b (h k)")


class Attention(nn.Module):
    """Causal self-attention; queries, keys and values cut by head over tp.

    ``core`` is all between the products, which alone may be computed again in the backward pass,
    or see the keys and values of earlier passes (``model.generate``).
    """

    core: Callable[..., Tensor]

    def __init__(self, cfg: GPTConfig, layout: Layout, name: str) -> None:
        super().__init__()
        self.head_dim, self.core = cfg.head_dim, attend
        d, kv = cfg.hidden_size, cfg.kv_heads * cfg.head_dim
        outputs = {
            "q": (d, cfg.num_heads),
            "k": (kv, cfg.kv_heads),
            "v": (kv, cfg.kv_heads),
        }
        self.qkv = ColumnParallelLinear(layout, name, d, outputs, bias=cfg.bias, std=cfg.init_std)
        self.out = RowParallelLinear(
            layout, f"{name}.out", d, d, bias=cfg.bias, std=residual_std(cfg)
        )

    def forward(self, x: Float[Tensor, "s b d"], about: About) -> Float[Tensor, "s b d"]:
        out: Tensor = self.out(self.core(*self.qkv(x), self.head_dim, about))
        return out


class Mlp(nn.Module):
    """GELU(x U) D (tanh form), or SwiGLU (Shazeer 2020, arXiv:2002.05202): (SiLU(x G) * x U) D."""

    def __init__(self, cfg: GPTConfig, layout: Layout, name: str) -> None:
        super().__init__()
        self.gated = cfg.activation == "swiglu"
        # An output feature of the MLP stands alone: as many parts as features.
        outputs = {n: (cfg.ffn, cfg.ffn) for n in (("gate", "up") if self.gated else ("up",))}
        self.up = ColumnParallelLinear(
            layout, name, cfg.hidden_size, outputs, bias=cfg.bias, std=cfg.init_std
        )
        self.down = RowParallelLinear(
            layout,
            f"{name}.down",
            cfg.ffn,
            cfg.hidden_size,
            bias=cfg.bias,
            std=residual_std(cfg),
        )

    def forward(self, x: Float[Tensor, "s b d"]) -> Float[Tensor, "s b d"]:
        if self.gated:
            gate, up = self.up(x)
            hidden = silu(gate) * up
        else:
            (up,) = self.up(x)
            hidden = gelu(up, approximate="tanh")
        out: Tensor = self.down(hidden)
        return out


def residual_std(cfg: GPTConfig) -> float:
    """Projections into the residual stream start smaller (Radford et al. 2019, section 2.3)."""
    return cfg.init_std / math.sqrt(2 * cfg.num_layers)


def mark_tied(weight: nn.Parameter, role: str) -> None:
    """Say where the other use of the parameter is."""
    set_slice(weight, replace(get_slice(weight), tied=role))


class Block(nn.Module):
    """Pre-norm transformer block; in training, dropout before each sum (Radford et al. 2019)."""

    def __init__(self, cfg: GPTConfig, layout: Layout, name: str) -> None:
        super().__init__()
        self.layout, self.name, self.dropout = layout, name, cfg.dropout
        norm = (cfg.norm, cfg.hidden_size, cfg.norm_eps)
        self.attention_norm = Norm(layout, f"{name}.attention_norm", *norm)
        self.attention = Attention(cfg, layout, f"{name}.attention")
        self.mlp_norm = Norm(layout, f"{name}.mlp_norm", *norm)
        self.mlp = Mlp(cfg, layout, f"{name}.mlp")

    def forward(self, x: Float[Tensor, "s b d"], about: About) -> Float[Tensor, "s b d"]:
        y = x + self._dropped(self.attention(self.attention_norm(x), about), "attention", about)
        return y + self._dropped(self.mlp(self.mlp_norm(y)), "mlp", about)

    def _dropped(self, x: Tensor, site: str, about: About) -> Tensor:
        first = self.layout.first_place(x)
        return dropout(x, self.dropout, about.draw, f"{self.name}.{site}", first)


EMBEDDING, HEAD = "embedding.tokens.weight", "head.weight"


class GPTStage(nn.Module):
    """The layers ``layers`` of the model, with the embedding if first and norm, head and loss if
    last. Parameters keep their global names on any stage.

    Args:
        layers: global numbers of the blocks; may be empty.
        shared_embedding: the first stage's token embedding where that stage is on this rank too,
            so that a tied head is the same Parameter.
        split_tie: the tied embedding and head are on different ranks; the reducer keeps the
            two copies equal.
        seed: of dropout.
        eod: the end-of-document token at which attention and positions start anew, if they do.
    """

    def __init__(
        self,
        cfg: GPTConfig,
        layers: range,
        layout: Layout,
        *,
        first: bool,
        last: bool,
        shared_embedding: nn.Parameter | None = None,
        split_tie: bool = False,
        seed: int = 0,
        eod: int | None = None,
    ) -> None:
        super().__init__()
        self.cfg, self.layout, self.first, self.last = cfg, layout, first, last
        self.seed, self.eod = seed, eod
        d, std = cfg.hidden_size, cfg.init_std
        self.embedding: nn.Parameter | None = None
        self.positions: LearnedPositions | None = None
        if first:
            self.embedding = vocab_weight(layout, EMBEDDING, cfg.vocab_size, d, std)
            if split_tie:
                mark_tied(self.embedding, "owner")
            if cfg.position == "learned":
                name = "embedding.positions.weight"
                self.positions = LearnedPositions(layout, name, cfg.seq_length, d, std)
        self.blocks = nn.ModuleList(Block(cfg, layout, f"layers.{n}") for n in layers)
        self.norm: Norm | None = None
        self.head: nn.Parameter | None = None
        if last:
            self.norm = Norm(layout, "final_norm", cfg.norm, d, cfg.norm_eps)
            tied = self.embedding if shared_embedding is None else shared_embedding
            if cfg.tied_embeddings and tied is not None:
                self.head = tied
                mark_tied(tied, "shared")
            else:
                name = EMBEDDING if cfg.tied_embeddings else HEAD
                self.head = vocab_weight(layout, name, cfg.vocab_size, d, std)
                if split_tie:
                    mark_tied(self.head, "copy")

    def hidden_shape(self, micro_batch_size: int, seq_length: int) -> tuple[int, int, int]:
        """Of what stages hand on: (s, b, d), or (s/tp, b, d) where the sequence is cut."""
        cut = self.layout.tp.size if self.layout.cut_sequence else 1
        return seq_length // cut, micro_batch_size, self.cfg.hidden_size

    def forward(self, x: Tensor, targets: Tensor | None = None, rows: Rows | None = None) -> Tensor:
        """One microbatch through the stage.

        Args:
            x: (b, s) token ids on the first stage, else the hidden states of the stage before.
            targets: (b, s) next tokens, on the last stage; -100 is ignored.
            rows: what dropout and document borders follow from, and where the tokens of parts of
                texts stand; without it there are none, and rows are whole.
        Returns:
            hidden states; on the last stage the summed loss in nats, or, without targets, the
            (s, b, v/tp) logits of this rank's slice of the vocabulary.
        """
        draw = None
        if rows is not None and rows.samples is not None:
            draw = Draw(self.seed, rows.step, rows.samples)
        starts = None
        at = None if rows is None or rows.places is None else rows.places.t()
        if at is None and rows is not None and self.eod is not None:
            starts = document_starts(rows.tokens, self.eod)
            at = places(starts)
        if self.embedding is not None and self.first:
            length = x.shape[1]
            x = vocab_parallel_embedding(x.t().contiguous(), self.layout, self.embedding)
            if self.positions is not None:
                x = self.positions(x, at)
            x = dropout(x, self.cfg.dropout, draw, "embedding", self.layout.first_place(x))
        else:
            length = x.shape[0] * (self.layout.tp.size if self.layout.cut_sequence else 1)
        about = self._about(length, at, starts, draw)
        for block in self.blocks:
            x = block(x, about)
        if self.norm is None or self.head is None:
            return x
        logits = vocab_logits(self.norm(x), self.layout, self.head)
        if targets is None:
            return logits
        return self.token_losses(logits, targets).sum()

    def token_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(s, b) losses in nats of this rank's (s, b, v/tp) logits and (b, s) targets."""
        assert self.head is not None
        valid = logits.shape[-1] - padded_rows(self.head)
        return vocab_parallel_cross_entropy(logits, targets.t().contiguous(), self.layout.tp, valid)

    def _about(
        self, length: int, at: Tensor | None, starts: Tensor | None, draw: Draw | None
    ) -> About:
        if not len(self.blocks):
            return About()
        rotation = None
        if self.cfg.position == "rope":
            whole = torch.arange(length, device=self.layout.device).unsqueeze(1)
            rotation = rope(self.cfg, whole if at is None else at, self.layout)
        mask = None if starts is None else document_mask(starts, self.layout.dtype)
        return About(rotation, mask, draw, at)
