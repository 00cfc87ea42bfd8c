"""The one reduction of a step: loss, tokens and the gradient norm over all axes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.data_parallel.bucket import VECTOR, FlatParameters
from megalite.mesh import Mesh


@dataclass
class StepTotals:
    """What a step came to, on the device (0-d float64 each); the same on every rank.

    Attributes:
        loss: mean over the batch's tokens that are not ignored, nats.
        tokens: how many those were.
        grad_norm: of the gradient of that mean, before clipping.
        factor: what the gradient sums must be multiplied by: from sums over ``constant`` tokens
            to the mean, and clipped.
        finite: 1 where loss and norm are finite, else 0.
    """

    loss: Tensor
    tokens: Tensor
    grad_norm: Tensor
    factor: Tensor
    finite: Tensor

    def stacked(self) -> Tensor:
        return torch.stack([self.loss, self.tokens, self.grad_norm, self.finite])


def square_sum(flat: FlatParameters) -> Tensor:
    """Sum of squares of the gradients that this rank counts, float64: of its replica's share of
    the buckets, also where it has the others'. So the sums are the same with and without ZeRO-1.

    Only short runs are summed in fp32: over a whole bucket that is off by up to 1 % on a CPU.
    """
    rows = [b.share(b.grad).view(-1, VECTOR) for b in flat.buckets if b.counted]
    if not rows:
        device = flat.buckets[0].grad.device if flat.buckets else None
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = [torch.linalg.vector_norm(r, dim=1).double() for r in rows]
    return torch.stack([n.square().sum() for n in norms]).sum()


def step_totals(
    flat: FlatParameters,
    loss_sum: Tensor | None,
    num_tokens: Tensor,
    mesh: Mesh,
    *,
    constant: float,
    clip: float,
) -> StepTotals:
    """Reduce a step over all ranks, with one message.

    Args:
        loss_sum: summed loss of this replica on the rank of the last stage, else None.
        num_tokens: 0-d count of this replica's tokens that are not ignored.
        constant: the token count by which backward has divided.
        clip: largest gradient norm; 0 switches clipping off.
    """
    counts_loss = loss_sum is not None and mesh.tp.index == 0
    zero = torch.zeros((), dtype=torch.float64, device=num_tokens.device)
    loss = loss_sum.double() if loss_sum is not None and counts_loss else zero
    tokens = num_tokens.double() if counts_loss else zero
    squares = square_sum(flat) if flat.buckets else zero
    vector = torch.stack([loss, tokens, squares])
    mesh.world.all_reduce(vector).wait()
    loss, tokens, squares = vector
    tokens = tokens.clamp(min=1.0)
    to_mean = constant / tokens
    norm = squares.sqrt() * to_mean
    factor = to_mean * (clip / (norm + 1e-6)).clamp(max=1.0) if clip > 0 else to_mean
    loss = loss / tokens
    finite = (loss.isfinite() & norm.isfinite()).double()
    return StepTotals(loss, vector[1], norm, factor, finite)
