"""Linears whose weight is cut over the tp axis (Shoeybi et al. 2019, arXiv:1909.08053, section 3).

Activations are (s, b, d). With sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198)
they are cut along s outside the matrix products: a column-parallel linear gathers its input, a
row-parallel one reduce-scatters its output. At tp = 1 both are a plain linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import Function

from megalite.collectives import start_gather, start_reduce_scatter
from megalite.grads import GradSink, WeightProduct
from megalite.mesh import DONE, Axis
from megalite.slices import Slice, get_slice, set_slice


@dataclass(frozen=True)
class Layout:
    """What every layer of one stage is told: its tp axis, dtype, device and gradient sink.

    ``bare``: parameters are made without memory.
    """

    tp: Axis
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device
    sink: GradSink
    bare: bool = False

    @property
    def cut_sequence(self) -> bool:
        return self.sequence_parallel and self.tp.size > 1

    def first_place(self, x: Tensor) -> int:
        """Position in the whole sequence of x[0], which may be cut along it."""
        return self.tp.index * x.shape[0] if self.cut_sequence else 0

    def gathered(self, x: Tensor) -> Tensor:
        """The whole sequence of an x that may be cut along it."""
        if not self.cut_sequence:
            return x
        whole, work = start_gather(x, self.tp)
        work.wait()
        return whole

    def summed(self, x: Tensor) -> Tensor:
        """The sum of x over tp (in place), or this rank's part of it where the sequence is cut."""
        if self.cut_sequence:
            x, work = start_reduce_scatter(x, self.tp)
        else:
            work = self.tp.all_reduce(x)
        work.wait()
        return x

    def empty(self, *shape: int) -> nn.Parameter:
        made = nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device))
        if self.bare:
            made.untyped_storage().resize_(0)
        return made

    def replicated(
        self, name: str, shape: tuple[int, ...], init: tuple[str, float]
    ) -> nn.Parameter:
        """A parameter that every tp rank holds whole, without weight decay.

        Where the sequence is cut, each rank sees a part of it and so has a partial gradient.
        """
        piece = Slice(
            name,
            shape,
            (0,) * len(shape),
            shape,
            init,
            replica=self.tp.index,
            partial=self.cut_sequence,
        )
        return set_slice(self.empty(*shape), piece)


def _flat(x: Tensor) -> Tensor:
    return rearrange(x, "s b d -> (s b) d")


class _Column(Function):
    """y_i = x W_i^T + b_i for several weights at once.

    One Function owns the sum of dL/dx over tp and the weight products, so that the first hides
    behind the second, or the second is put off to W.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layout: Layout, biased: bool, *params: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *params)
        ctx.layout, ctx.biased = layout, biased
        weights, biases = _split(params, biased)
        x = layout.gathered(x)
        return tuple(nn.functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *params = ctx.saved_tensors
        layout: Layout = ctx.layout
        weights, biases = _split(params, ctx.biased)
        sink, tp, cut = layout.sink, layout.tp, layout.cut_sequence
        put_off = sink.queue is not None
        full, gathered = start_gather(x, tp) if cut and not put_off else (x, DONE)
        dys = tuple(_flat(g) for g in grads)
        dx = dys[0] @ weights[0]
        for dy, weight in zip(dys[1:], weights[1:], strict=True):
            dx.addmm_(dy, weight)
        dx = dx.view(*grads[0].shape[:2], -1)
        gathered.wait()
        dx, reduced = start_reduce_scatter(dx, tp) if cut else (dx, tp.all_reduce(dx))
        for bias, dy in zip(biases, dys, strict=True):
            if bias is not None:
                sink.add(bias, dy.sum(0, dtype=_sum_dtype(dy)))
        gather = tp if cut and put_off else None
        sink.add_product(WeightProduct(tuple(weights), dys, _flat(full), gather))
        reduced.wait()
        return (dx, None, None, *([None] * len(params)))


class _Row(Function):
    """y = sum over tp of x W^T, without the bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layout = layout
        return layout.summed(nn.functional.linear(x, weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layout: Layout = ctx.layout
        grad = layout.gathered(grad)
        dx = grad @ weight
        layout.sink.add_product(WeightProduct((weight,), (_flat(grad),), _flat(x)))
        return dx, None, None


class _AddBias(Function):
    """y + b, once, after the sum over tp; the gradient of b goes to the sink."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, layout: Layout, bias: Tensor) -> Tensor:
        ctx.layout, ctx.bias = layout, bias
        return y + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.layout.sink.add(ctx.bias, _flat(grad).sum(0, dtype=_sum_dtype(grad)))
        return grad, None, None


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _split(params: Sequence[Tensor], biased: bool) -> tuple[list[Tensor], list[Tensor | None]]:
    """Weights and biases from the flat argument list (weights first)."""
    if not biased:
        return list(params), [None] * len(params)
    half = len(params) // 2
    return list(params[:half]), list(params[half:])


@dataclass(frozen=True)
class Cut:
    """Which rows of a (d_out, d_in) weight a tp rank holds.

    ``start`` is the global row, ``rows`` how many; where there are fewer parts than ranks,
    ``copies`` ranks hold the same rows, this one as number ``replica``, and ``slot`` is
    (index, count) of these rows among the parts.
    """

    start: int
    rows: int
    copies: int = 1
    replica: int = 0
    slot: tuple[int, int] = (0, 1)

    @classmethod
    def of(cls, d_out: int, parts: int, tp: Axis) -> Cut:
        """Cut d_out rows, made of ``parts`` equal indivisible parts (heads), over tp.

        Either tp divides parts, or parts divides tp and each part is on tp / parts ranks.
        """
        if parts % tp.size == 0:
            rows = d_out // tp.size
            return cls(tp.index * rows, rows)
        if tp.size % parts:
            raise ValueError(f"{parts} parts cannot be spread over tp={tp.size}")
        rows, copies = d_out // parts, tp.size // parts
        part, replica = divmod(tp.index, copies)
        return cls(part * rows, rows, copies, replica, (part, parts))

    def weight(self, name: str, d_out: int, d_in: int, std: float) -> Slice:
        return Slice(
            f"{name}.weight",
            (d_out, d_in),
            (self.start, 0),
            (self.rows, d_in),
            ("normal", std),
            decay=True,
            replica=self.replica,
            partial=self.copies > 1,
            slot=self.slot,
        )

    def bias(self, name: str, d_out: int) -> Slice:
        return Slice(
            f"{name}.bias",
            (d_out,),
            (self.start,),
            (self.rows,),
            replica=self.replica,
            partial=self.copies > 1,
            slot=self.slot,
        )


class ColumnParallelLinear(nn.Module):
    """Several linears of one input, the output features of each cut over tp.

    Args:
        d_in: input features.
        outputs: name -> (output features, number of indivisible parts), such as heads.
        prefix: global name before each output's name.
    """

    def __init__(
        self,
        layout: Layout,
        prefix: str,
        d_in: int,
        outputs: dict[str, tuple[int, int]],
        *,
        bias: bool,
        std: float,
    ) -> None:
        super().__init__()
        self.layout, self.biased = layout, bias
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for name, (d_out, parts) in outputs.items():
            cut, full = Cut.of(d_out, parts, layout.tp), f"{prefix}.{name}"
            weight = layout.empty(cut.rows, d_in)
            self.weights.append(set_slice(weight, cut.weight(full, d_out, d_in, std)))
            if bias:
                self.biases.append(set_slice(layout.empty(cut.rows), cut.bias(full, d_out)))

    def forward(self, x: Float[Tensor, "s_in b d_in"]) -> tuple[Float[Tensor, "s b _"], ...]:
        """(s, b, d_in), or (s/tp, b, d_in) where the sequence is cut, to (s, b, d_out/tp) each."""
        params = (*self.weights, *self.biases)
        return _Column.apply(x, self.layout, self.biased, *params)  # type: ignore[no-any-return]


class RowParallelLinear(nn.Module):
    """A linear whose input features are cut over tp; the bias is added once, after the sum."""

    def __init__(
        self, layout: Layout, name: str, d_in: int, d_out: int, *, bias: bool, std: float
    ) -> None:
        super().__init__()
        self.layout = layout
        columns = d_in // layout.tp.size
        piece = Slice(
            f"{name}.weight",
            (d_out, d_in),
            (0, layout.tp.index * columns),
            (d_out, columns),
            ("normal", std),
            decay=True,
        )
        self.weight = set_slice(layout.empty(d_out, columns), piece)
        self.bias = layout.replicated(f"{name}.bias", (d_out,), ("constant", 0.0)) if bias else None

    def forward(self, x: Float[Tensor, "s b d_local"]) -> Float[Tensor, "s_out b d_out"]:
        """(s, b, d_in/tp) to (s, b, d_out), or (s/tp, b, d_out) where the sequence is cut."""
        y: Tensor = _Row.apply(x, self.layout, self.weight)
        if self.bias is None:
            return y
        return _AddBias.apply(y, self.layout, self.bias)  # type: ignore[no-any-return]


def vocab_logits(
    x: Float[Tensor, "s_in b d"], layout: Layout, weight: Float[Tensor, "v_local d"]
) -> Float[Tensor, "s b v_local"]:
    """(s, b, d) hidden states to (s, b, v/tp) logits, with the sequence gathered where cut."""
    assert get_slice(weight).shape[-1] == x.shape[-1]
    (logits,) = _Column.apply(x, layout, False, weight)
    return logits  # type: ignore[no-any-return]
