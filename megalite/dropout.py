"""Dropout that does not know the layout: whether an element is kept depends on (seed, step, site,
sample) and on its position and feature in the whole sequence.

The words are those of ``megalite.rng``: a site's stream, keyed by (seed, step, name), has a word
for each sample number; this word keys the sample's own stream, whose word number
``position x ceil(d / 4) + feature // 4`` decides for four features, 16 bits each, the lowest first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.autograd import Function

from megalite.rng import steps, stir, stream_key, words

_LEVELS = 1 << 16  # an element's share of a word is compared with the rate
_LANES = 4


@dataclass(frozen=True)
class Draw:
    """What the masks of a microbatch are drawn from; ``samples`` are (b,) int64 global numbers."""

    seed: int
    step: int
    samples: Int64[Tensor, " b"]

    def keys(self, name: str) -> Int64[Tensor, " b"]:
        """The key of each row at the site ``name``."""
        return words(stream_key(self.seed, f"dropout.{self.step}.{name}"), self.samples)


def levels(p: float) -> int:
    """How many of 65536 levels are dropped: the rate that is really drawn, below 1."""
    return min(round(p * _LEVELS), _LEVELS - 1)


def keep_mask(
    keys: Int64[Tensor, " b"], first: int, shape: tuple[int, int], dropped: int
) -> Bool[Tensor, "s b d"]:
    """What is kept of (s, b, d) features, from position ``first`` of the whole sequence on.

    Args:
        keys: a key for each row.
        shape: (s, d).
        dropped: of 65536 levels.
    """
    s, d = shape
    width = -(-d // _LANES)
    position = torch.arange(first, first + s, device=keys.device).unsqueeze(1)
    # A state is a sum: one of two small tensors takes the place of a product of a large one.
    row = keys + steps(position * width + 1)
    x = row.unsqueeze(-1) + steps(torch.arange(width, device=keys.device))
    return stir(x).view(torch.int16)[..., :d] >= dropped - _LEVELS // 2


class _Dropout(Function):
    """The mask, a byte an element, is kept for the backward pass: to draw it again costs more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return torch.where(keep, x, 0.0).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return torch.where(keep, grad, 0.0).mul_(ctx.scale), None, None


def dropout(
    x: Float[Tensor, "s b d"], p: float, draw: Draw | None, name: str, first: int = 0
) -> Float[Tensor, "s b d"]:
    """x with a share ``p`` of its elements set to zero and the others scaled by 1 / (1 - p).

    Args:
        x: features, the same on every tp rank, or a part of the sequence.
        p: the rate, 0 <= p < 1, rounded to a multiple of 2^-16.
        draw: None to drop nothing.
        name: global name of the site.
        first: position in the whole sequence of x[0].
    """
    dropped = levels(p)
    if draw is None or not dropped:
        return x
    keep = keep_mask(draw.keys(name), first, (x.shape[0], x.shape[-1]), dropped)
    out: Tensor = _Dropout.apply(x, keep, _LEVELS / (_LEVELS - dropped))
    return out
