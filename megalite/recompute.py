"""Computes a part of a layer a second time in the backward pass, instead of keeping what it made
(Chen et al. 2016, arXiv:1604.06174; selective: Korthikanti et al. 2022, arXiv:2205.05198, 5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class _Recompute(Function):
    """Keeps the inputs. The backward pass runs the part again, then backward through it, where
    parameters' gradients and products put off to W go the way that they always go."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], *args: Any) -> Tensor:
        needed = ctx.needs_input_grad[1:]
        ctx.run, ctx.needed = run, needed
        ctx.save_for_backward(*(a for a, n in zip(args, needed, strict=True) if n))
        ctx.rest = [None if n else a for a, n in zip(args, needed, strict=True)]
        return run(*args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        turn = iter(inputs)
        args = [next(turn) if n else a for a, n in zip(ctx.rest, ctx.needed, strict=True)]
        with torch.enable_grad():
            out = ctx.run(*args)
        torch.autograd.backward([out], [grad])
        return None, *(a.grad if n else None for a, n in zip(args, ctx.needed, strict=True))


def recomputed(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``run``, of which only the inputs are kept from F on.

    Args:
        run: gives one tensor; must come to the same bits again, and may hold parameters. At
            least one argument must need a gradient, or none of its parameters gets one.
    """

    def call(*args: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return run(*args)
        return _Recompute.apply(run, *args)  # type: ignore[no-any-return]

    return call
