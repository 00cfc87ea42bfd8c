"""The same GPT in a page of plain PyTorch: what a loop without an engine reaches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from model.config import GPTConfig


class PlainBlock(nn.Module):
    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        d = cfg.hidden_size
        self.num_heads = cfg.num_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, cfg.ffn), nn.Linear(cfg.ffn, d)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        heads = self.qkv(self.attention_norm(x)).view(b, s, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, d))
        hidden = nn.functional.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
        return x + self.down(hidden)  # type: ignore[no-any-return]


class PlainGPT(nn.Module):
    """GPT-2 with a tied head, as ``model.gpt`` is by default; gives the mean loss."""

    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.positions = nn.Embedding(cfg.seq_length, cfg.hidden_size)
        self.blocks = nn.ModuleList(PlainBlock(cfg) for _ in range(cfg.num_layers))
        self.norm = nn.LayerNorm(cfg.hidden_size)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0.0, cfg.init_std)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = nn.functional.linear(self.norm(x), self.tokens.weight)
        return cross_entropy(logits.flatten(0, 1), targets.flatten())


Step = Callable[[Tensor, Tensor], object]


def plain_step(model: nn.Module, sync: Callable[[bool], None] = lambda last: None) -> Step:
    """A training step: gradients summed over microbatches, clipped, AdamW.

    ``sync(last)`` is called before each backward: whether replicas reduce now.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> object:
        for m, (ids, wanted) in enumerate(zip(tokens, targets, strict=True)):
            sync(m == len(tokens) - 1)
            (model(ids, wanted) / len(tokens)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return None

    return step
