"""The one reduction of a step: loss, tokens and the gradient norm over all axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
            to the mean, without the loss scale, and clipped.
        finite: 1 where loss and norm are finite, else 0.
        bad_losses, bad_grads: how many ranks had a loss, or gradients, that are not finite.
        stops: how many ranks ask the run to end.
        requests: how many know of a request to the run, such as for another layout.
        scale: of the loss in this step.
        replays: how often the step was computed again.
    """

    loss: Tensor
    tokens: Tensor
    grad_norm: Tensor
    factor: Tensor
    finite: Tensor
    bad_losses: Tensor
    bad_grads: Tensor
    stops: Tensor
    requests: Tensor
    scale: Tensor
    replays: int = 0

    def stacked(self) -> Tensor:
        """(8,) what the host is told of a step, in the order of ``Told``."""
        return torch.stack([getattr(self, name) for name in Told._fields])


class Told(NamedTuple):
    """``StepTotals.stacked`` on the host."""

    loss: float
    tokens: float
    grad_norm: float
    finite: float
    bad_losses: float
    stops: float
    requests: float
    scale: float


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
    scale: Tensor | None = None,
    stop: bool = False,
    request: bool = False,
) -> StepTotals:
    """Reduce a step over all ranks, with one message: loss, tokens, square sum, ranks with a bad
    loss, ranks with bad gradients, ranks that ask to stop, ranks that know of a request.

    Args:
        loss_sum: summed loss of this replica on the rank of the last stage, else None.
        num_tokens: 0-d count of this replica's tokens that are not ignored.
        constant: the token count by which backward has divided.
        clip: largest gradient norm; 0 switches clipping off.
        scale: 0-d factor by which backward has multiplied.
        stop: this rank asks the run to end.
        request: this rank knows of a request to the run.
    """
    counts_loss = loss_sum is not None and mesh.tp.index == 0
    zero = torch.zeros((), dtype=torch.float64, device=num_tokens.device)
    loss = loss_sum.double() if loss_sum is not None and counts_loss else zero
    tokens = num_tokens.double() if counts_loss else zero
    squares = square_sum(flat) if flat.buckets else zero
    bad = [(~part.isfinite()).double() for part in (loss, squares)]
    asked = [torch.full_like(zero, float(asks)) for asks in (stop, request)]
    vector = torch.stack([loss, tokens, squares, *bad, *asked])
    mesh.world.all_reduce(vector).wait()
    loss, tokens, squares, bad_losses, bad_grads, stops, requests = vector
    one = torch.ones_like(zero)
    scale = one if scale is None else scale.double()  # a copy: it changes after the step
    tokens = tokens.clamp(min=1.0)
    to_mean = constant / (tokens * scale)
    norm = squares.sqrt() * to_mean
    factor = to_mean * (clip / (norm + 1e-6)).clamp(max=1.0) if clip > 0 else to_mean
    loss = loss / tokens
    finite = (loss.isfinite() & norm.isfinite()).double()
    counts = (bad_losses, bad_grads, stops, requests)
    return StepTotals(loss, vector[1], norm, factor, finite, *counts, scale)
