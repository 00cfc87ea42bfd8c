"""Cross-entropy from logits whose vocabulary is cut over tp."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd import Function

from megalite.mesh import Axis

IGNORE = -100


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, tp: Axis, valid: int) -> Tensor:
        width = logits.shape[-1]
        dtype = torch.promote_types(logits.dtype, torch.float32)
        real = logits[..., :valid] if valid else logits.new_full((*targets.shape, 1), -torch.inf)
        highest = real.amax(-1).to(dtype)
        tp.all_reduce(highest, "max").wait()
        exp = logits - highest.unsqueeze(-1)
        exp[..., valid:] = -torch.inf
        local = targets - tp.index * width
        mine = (local >= 0) & (local < width)
        local = local.masked_fill(~mine, 0).unsqueeze(-1)
        target = exp.gather(-1, local).squeeze(-1).masked_fill(~mine, 0.0)
        exp.exp_()
        sums = torch.stack([exp.sum(-1), target])
        tp.all_reduce(sums).wait()
        total, target = sums
        ignored = targets == IGNORE
        # The one saved buffer becomes the gradient in place; a second backward finds it gone.
        ctx.exp, ctx.dtype = exp, logits.dtype
        ctx.save_for_backward(total, local, mine, ignored)
        loss: Tensor = total.log() - target
        return loss.masked_fill(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        total, local, mine, ignored = ctx.saved_tensors
        if ctx.exp is None:
            raise RuntimeError("vocab_parallel_cross_entropy can go backward only once")
        softmax, ctx.exp = ctx.exp, None
        grad = grad.masked_fill(ignored, 0.0)
        softmax *= (grad / total).unsqueeze(-1)
        softmax.scatter_add_(-1, local, -(grad * mine).unsqueeze(-1))
        return softmax.to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits: Float[Tensor, "*tokens v_local"],
    targets: Int64[Tensor, "*tokens"],
    tp: Axis,
    valid: int | None = None,
) -> Float[Tensor, "*tokens"]:
    """Per-token cross-entropy from logits whose vocabulary is split over ``tp``.

    Args:
        logits: (..., v/tp) this rank's contiguous slice of the vocabulary, any float dtype.
        targets: (...) int64 ids in the full vocabulary, the same on every tp rank; tokens with
            ``IGNORE`` (-100) have loss 0 and no gradient.
        valid: how many of this rank's columns exist; the rest is padding, which enters neither
            the loss nor the gradient. All by default.
    Returns:
        (...) losses in nats, float32 (float64 for float64 logits), the same on every tp rank.
    Raises:
        ValueError: if logits and targets differ in their leading dims.
    Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits {tuple(logits.shape)} do not fit targets {tuple(targets.shape)}")
    valid = logits.shape[-1] if valid is None else valid
    return _CrossEntropy.apply(logits, targets, tp, valid)  # type: ignore[no-any-return]
