"""The communication of tensor parallelism, differentiable and visible at the call.

Each function is the identity on an axis of size 1. ``copy_to`` and ``reduce_from`` are f and g of
Shoeybi et al. 2019 (arXiv:1909.08053, section 3), ``gather_from`` and ``scatter_to`` their
counterparts along the sequence of Korthikanti et al. 2022 (arXiv:2205.05198, section 4.2.2).
The sequence is dim 0 of every activation, so that gathering it copies nothing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from megalite.mesh import Axis, Work


def all_reduced(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ``axis``, in place."""
    axis.all_reduce(x).wait()
    return x


def start_gather(x: Tensor, axis: Axis) -> tuple[Tensor, Work]:
    """Begin to collect (s/n, ...) from every rank into (s, ...)."""
    x = x.contiguous()
    out = x.new_empty((x.shape[0] * axis.size, *x.shape[1:]))
    return out, axis.all_gather(out, x)


def start_reduce_scatter(x: Tensor, axis: Axis) -> tuple[Tensor, Work]:
    """Begin to sum (s, ...) over ranks, of which this rank keeps its (s/n, ...)."""
    x = x.contiguous()
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    return out, axis.reduce_scatter(out, x)


class _CopyTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduced(grad.clone(), ctx.axis), None


class _ReduceFrom(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduced(x.clone(), axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherFrom(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        out, work = start_gather(x, axis)
        work.wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out, work = start_reduce_scatter(grad, ctx.axis)
        work.wait()
        return out, None


class _ReduceScatterTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        out, work = start_reduce_scatter(x, axis)
        work.wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out, work = start_gather(grad, ctx.axis)
        work.wait()
        return out, None


class _ScatterTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.chunk(axis.size)[axis.index].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out, work = start_gather(grad, ctx.axis)
        work.wait()
        return out, None


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Identity; the gradient is summed over ``axis``."""
    return _CopyTo.apply(x, axis) if axis.size > 1 else x


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Sum over ``axis``; the gradient passes."""
    return _ReduceFrom.apply(x, axis) if axis.size > 1 else x


def gather_from(x: Tensor, axis: Axis) -> Tensor:
    """(s/n, ...) to (s, ...); the gradient is summed and cut again."""
    return _GatherFrom.apply(x, axis) if axis.size > 1 else x


def reduce_scatter_to(x: Tensor, axis: Axis) -> Tensor:
    """Sum of (s, ...) over ``axis``, cut to this rank's (s/n, ...); the gradient is gathered."""
    return _ReduceScatterTo.apply(x, axis) if axis.size > 1 else x


def scatter_to(x: Tensor, axis: Axis) -> Tensor:
    """This rank's (s/n, ...) of an x that is the same on every rank; the gradient is gathered."""
    return _ScatterTo.apply(x, axis) if axis.size > 1 else x
