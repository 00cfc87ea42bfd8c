"""Flat memory for the parameters and gradients of a rank, in buckets that are reduced at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megalite.slices import Piece, Slice, flat_pieces, get_slice

_SMALLEST, _LARGEST = 1 << 18, 1 << 23  # elements of a bucket
# Buckets are filled up to whole vectors. A fused update on the CPU takes what is left of them by
# another path, which rounds otherwise: replicas that stand elsewhere would drift apart.
VECTOR = 64


@dataclass
class Bucket:
    """Parameters of one stage that are treated alike, in one flat buffer each of weights and
    gradients; both in the order of ``params``.

    Attributes:
        late: why the gradient is complete only after the last backward ("partial" over tp,
            "tied" to a copy on another rank, "shared" by two uses here), or "".
        decay: weight decay applies. counted: this rank's copy enters the norm and the files.
        waiting: gradients, one a parameter and microbatch, that the running step has yet to add.
    """

    stage: int
    late: str
    decay: bool
    counted: bool
    params: list[nn.Parameter]
    weight: Tensor = field(init=False)
    grad: Tensor = field(init=False)
    waiting: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Move the parameters into the flat buffer and point ``main_grad`` into the other."""
        first = self.params[0]
        total = -(-sum(p.numel() for p in self.params) // VECTOR) * VECTOR
        self.weight = torch.zeros(total, dtype=first.dtype, device=first.device)
        sum_dtype = torch.promote_types(first.dtype, torch.float32)
        self.grad = torch.zeros(total, dtype=sum_dtype, device=first.device)
        for param, view in self.views(self.weight):
            view.copy_(param.detach())
            param.data = view
        for param, view in self.views(self.grad):
            param.main_grad = view  # type: ignore[attr-defined]

    def views(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter with its part of a flat buffer of this bucket, in local shape."""
        start = 0
        for param in self.params:
            yield param, flat[start : start + param.numel()].view(param.shape)
            start += param.numel()

    def pieces(self, flat: Tensor, prefix: str = "") -> Iterator[Piece]:
        """What this bucket holds of global tensors, in a flat buffer laid out like it."""
        for param, view in self.views(flat):
            yield from flat_pieces(param, view.reshape(-1), 0, prefix)


class FlatParameters:
    """All parameters of this rank's stages in buckets, in the order in which a backward pass
    completes them.

    Args:
        stages: stage -> its parameters in forward order. A parameter that two stages share
            belongs to the first.
    """

    def __init__(self, stages: dict[int, Iterable[nn.Parameter]]) -> None:
        unique: dict[int, tuple[int, nn.Parameter]] = {}
        for stage, params in stages.items():
            for param in params:
                unique.setdefault(id(param), (stage, param))
        self.num_elements = sum(p.numel() for _, p in unique.values())
        limit = min(_LARGEST, max(_SMALLEST, self.num_elements // 8))
        self.buckets: list[Bucket] = []
        open_: dict[tuple[int, str, bool, bool], list[nn.Parameter]] = {}
        for stage, param in reversed(list(unique.values())):
            at = get_slice(param)
            key = (stage, _late(at), at.decay, at.counted)
            members = open_.setdefault(key, [])
            members.append(param)
            if sum(p.numel() for p in members) >= limit:
                self.buckets.append(Bucket(*key, open_.pop(key)))
        self.buckets += [Bucket(*key, members) for key, members in open_.items()]
        self.bucket_of = {id(p): b for b in self.buckets for p in b.params}

    def parameters(self) -> Iterator[nn.Parameter]:
        return (p for b in self.buckets for p in b.params)

    def weight_pieces(self) -> Iterator[Piece]:
        return (piece for b in self.buckets for piece in b.pieces(b.weight))

    def grad_pieces(self) -> Iterator[Piece]:
        return (piece for b in self.buckets for piece in b.pieces(b.grad))


def _late(at: Slice) -> str:
    if at.partial:
        return "partial"
    return {"": "", "shared": "shared", "owner": "tied", "copy": "tied"}[at.tied]
