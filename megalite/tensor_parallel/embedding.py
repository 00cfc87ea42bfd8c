"""Token embedding with the vocabulary cut over tp (arXiv:1909.08053, section 3)."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.autograd import Function

from megalite.slices import Slice, get_slice, set_slice
from megalite.tensor_parallel.linear import Layout


def vocab_weight(layout: Layout, name: str, vocab: int, d: int, std: float) -> nn.Parameter:
    """The (ceil(vocab / tp), d) rows of a (vocab, d) matrix that this tp rank holds.

    The last ranks' rows past ``vocab`` are padding: zero, without gradient, never written.
    """
    rows = -(-vocab // layout.tp.size)
    start = min(layout.tp.index * rows, vocab)
    piece = Slice(
        name,
        (vocab, d),
        (start, 0),
        (min(rows, vocab - start), d),
        ("normal", std),
        decay=True,
    )
    return set_slice(layout.empty(rows, d), piece)


class _Lookup(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, layout: Layout, weight: Tensor) -> Tensor:
        local, foreign = tokens, None
        if layout.tp.size > 1:
            local = tokens - layout.tp.index * weight.shape[0]
            foreign = (local < 0) | (local >= weight.shape[0])
            local = local.masked_fill(foreign, 0)
        ctx.layout, ctx.weight, ctx.local, ctx.foreign = layout, weight, local, foreign
        x = nn.functional.embedding(local, weight)
        if foreign is None:
            return x
        x.masked_fill_(foreign.unsqueeze(-1), 0.0)
        return layout.summed(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        layout: Layout = ctx.layout
        grad = layout.gathered(grad)
        if ctx.foreign is not None:
            grad = grad.masked_fill(ctx.foreign.unsqueeze(-1), 0.0)
        layout.sink.add_rows(ctx.weight, ctx.local.flatten(), grad.flatten(0, 1))
        return None, None, None


def vocab_parallel_embedding(
    tokens: Int64[Tensor, "s b"], layout: Layout, weight: Float[Tensor, "v_local d"]
) -> Float[Tensor, "s_out b d"]:
    """Rows of a vocabulary-parallel matrix.

    Args:
        tokens: (s, b) int64 ids in the full vocabulary, the same on every tp rank.
        weight: this rank's rows, as ``vocab_weight`` makes them.
    Returns:
        (s, b, d), the same on every tp rank; (s/tp, b, d) where the sequence is cut.
    """
    assert len(get_slice(weight).shape) == 2
    out: Tensor = _Lookup.apply(tokens, layout, weight)
    return out


class _AddRows(Function):
    """x plus a position's vector for each token; their gradients go straight to the sum, where
    many that meet in one row lose nothing to a narrow type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, positions: LearnedPositions) -> Tensor:
        # The weight is no input of this Function: autograd would have a gradient for its hook.
        ctx.positions, ctx.index = positions, index
        return x + nn.functional.embedding(index, positions.weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        positions: LearnedPositions = ctx.positions
        sink, index = positions.layout.sink, ctx.index.flatten()
        sink.add_rows(positions.weight, index, grad.flatten(0, 1))
        return grad, None, None


class LearnedPositions(nn.Module):
    """A learned vector for each position (Radford et al. 2018)."""

    def __init__(self, layout: Layout, name: str, seq_length: int, d: int, std: float) -> None:
        super().__init__()
        self.layout = layout
        shape = (seq_length, d)
        self.weight = layout.sink.watch(layout.replicated(name, shape, ("normal", std)))

    def forward(
        self, x: Float[Tensor, "s b d"], places: Int64[Tensor, "s_all b"] | None = None
    ) -> Float[Tensor, "s b d"]:
        """Add its position's vector to each of (s, b, d); s may be cut.

        Args:
            places: positions of the whole sequence, if they are not 0, 1, 2, ... in each row.
        """
        first = self.layout.first_place(x)
        if places is None:
            return x + self.weight[first : first + x.shape[0]].unsqueeze(1)
        index = places[first : first + x.shape[0]]
        return _AddRows.apply(x, index, self)  # type: ignore[no-any-return]


class Norm(nn.Module):
    """LayerNorm (with bias) or RMSNorm over the last dim, on as much of s as this rank has."""

    def __init__(self, layout: Layout, name: str, kind: str, d: int, eps: float) -> None:
        super().__init__()
        self.shape, self.eps = (d,), eps
        watch = layout.sink.watch
        self.weight = watch(layout.replicated(f"{name}.weight", (d,), ("constant", 1.0)))
        self.bias = None
        if kind == "layernorm":
            self.bias = watch(layout.replicated(f"{name}.bias", (d,), ("constant", 0.0)))

    def forward(self, x: Float[Tensor, "*any d"]) -> Float[Tensor, "*any d"]:
        if self.bias is None:
            return nn.functional.rms_norm(x, self.shape, self.weight, self.eps)
        return nn.functional.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


def padded_rows(weight: Tensor) -> int:
    """How many rows at the end of a vocabulary-parallel weight are padding."""
    return weight.shape[0] - get_slice(weight).extent[0]
