"""Flat memory for the parameters and gradients of a rank, in buckets that are reduced at once.

Every bucket is also cut into equal shares, one a replica. A replica counts its share in the norm
and writes it to checkpoints; with ZeRO-1 (Rajbhandari et al. 2019, arXiv:1910.02054, section 5.1)
it is also all that it updates and has optimizer state for, and the weights are gathered again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megalite.mesh import Axis, Work
from megalite.slices import Piece, Slice, flat_pieces, get_slice
from megalite.trace import Trace

_SMALLEST, _LARGEST = 1 << 18, 1 << 23  # elements of a bucket
# Shares are whole vectors. A fused update on the CPU takes what is left of them by another path,
# which rounds otherwise: replicas that stand elsewhere would drift apart.
VECTOR = 64


def free(flat: Tensor) -> None:
    """Give back the memory of a tensor that is a whole storage; it and its views stay, empty.

    Where ``numpy()`` has pinned the storage, that comes with the end of its last tensor.
    """
    if flat.untyped_storage().resizable():
        flat.untyped_storage().resize_(0)


def allot(flat: Tensor) -> None:
    """Give a tensor that was freed memory again, all zero; its views are in it."""
    flat.untyped_storage().resize_(flat.nbytes)
    flat.zero_()


@dataclass
class Bucket:
    """Parameters of one stage that are treated alike, in one flat buffer each of weights and
    gradients; both in the order of ``params``.

    Attributes:
        late: why the gradient is complete only after the last backward ("partial" over tp,
            "tied" to a copy on another rank, "shared" by two uses here), or "".
        decay: weight decay applies. counted: this rank's copy enters the norm and the files.
        dp: the replicas among which it is cut. zero1: each updates its share only.
        bare: both buffers begin without memory, and so do the parameters: see ``allot``.
        waiting: gradients, one a parameter and microbatch, that the running step has yet to add.
    """

    stage: int
    late: str
    decay: bool
    counted: bool
    params: list[nn.Parameter]
    dp: Axis = field(default=Axis("dp"), repr=False)
    zero1: bool = False
    bare: bool = False
    weight: Tensor = field(init=False)
    grad: Tensor = field(init=False)
    waiting: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Move the parameters into the flat buffer and point ``main_grad`` into the other."""
        first = self.params[0]
        unit = VECTOR * self.dp.size
        total = -(-sum(p.numel() for p in self.params) // unit) * unit
        make = torch.empty if self.bare else torch.zeros
        self.weight = make(total, dtype=first.dtype, device=first.device)
        for param, view in self.views(self.weight):
            if not self.bare:
                view.copy_(param.detach())
            param.data = view
        if self.bare:
            free(self.weight)
        sum_dtype = torch.promote_types(first.dtype, torch.float32)
        self.grad = make(total, dtype=sum_dtype, device=first.device)
        for param, view in self.views(self.grad):
            param.main_grad = view  # type: ignore[attr-defined]
        if self.bare:
            free(self.grad)

    def views(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter with its part of a flat buffer of this bucket, in local shape."""
        start = 0
        for param in self.params:
            yield param, flat[start : start + param.numel()].view(param.shape)
            start += param.numel()

    def share(self, flat: Tensor) -> Tensor:
        """This replica's part of a flat buffer of this bucket; a buffer of that size is it."""
        size = self.weight.numel() // self.dp.size
        return flat if flat.numel() == size else flat.narrow(0, self.dp.index * size, size)

    def updated(self, flat: Tensor) -> Tensor:
        """The part of a flat buffer of this bucket that this replica's optimizer works on."""
        return self.share(flat) if self.zero1 else flat

    def pieces(self, flat: Tensor, prefix: str = "") -> Iterator[Piece]:
        """What a flat buffer of this bucket, or of this replica's share, has of global tensors."""
        whole = flat.numel() == self.weight.numel()
        start = 0 if whole else self.dp.index * flat.numel()
        at = -start
        for param in self.params:
            first, stop = max(at, 0), min(at + param.numel(), flat.numel())
            if first < stop:
                yield from flat_pieces(param, flat[first:stop], first - at, prefix)
            at += param.numel()


class FlatParameters:
    """All parameters of this rank's stages in buckets, in the order in which a backward pass
    completes them.

    Args:
        stages: stage -> its parameters in forward order. A parameter that two stages share
            belongs to the first.
        dp: the replicas of these stages.
        zero1: each replica updates its share of every bucket; ``gather`` completes the weights.
        bare: the buckets begin without memory.
    """

    def __init__(
        self,
        stages: Mapping[int, Iterable[nn.Parameter]],
        dp: Axis | None = None,
        zero1: bool = False,
        trace: Trace | None = None,
        bare: bool = False,
    ) -> None:
        self.dp, self.trace = dp or Axis("dp"), trace or Trace()
        self.zero1 = zero1 and self.dp.size > 1
        cut = (self.dp, self.zero1, bare)
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
                self.buckets.append(Bucket(*key, open_.pop(key), *cut))
        self.buckets += [Bucket(*key, members, *cut) for key, members in open_.items()]
        self.bucket_of = {id(p): b for b in self.buckets for p in b.params}
        uses = {key: n for n, key in enumerate(unique)}
        self._by_use = sorted(self.buckets, key=lambda b: uses[id(b.params[-1])])
        self._gathers: dict[int, Work] = {}

    def parameters(self) -> Iterator[nn.Parameter]:
        return (p for b in self.buckets for p in b.params)

    def weight_pieces(self, share: bool = False) -> Iterator[Piece]:
        """The weights by name, once they are current; or this replica's share of them only."""
        self.current()
        return (
            piece
            for b in self.buckets
            for piece in b.pieces(b.share(b.weight) if share else b.weight)
        )

    def grad_pieces(self, share: bool = False) -> Iterator[Piece]:
        """What this rank has of the reduced gradients: all, with ZeRO-1 its share; or that only."""
        return (
            piece
            for b in self.buckets
            for piece in b.pieces(b.share(b.grad) if share else b.updated(b.grad))
        )

    def gather(self) -> None:
        """Start to collect the weights of which each replica has updated its share, in the order
        in which a forward pass needs them. Without ZeRO-1 there is nothing to do."""
        self.current()
        if self.zero1:
            for b in self._by_use:
                self._gathers[id(b)] = self.dp.all_gather(b.weight, b.share(b.weight))

    def current(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Wait until the weights are those of the last update: all, or those of some buckets.

        Whatever reads weights calls this first; where nothing is under way it costs nothing.
        """
        if not self._gathers:
            return
        asked = self.buckets if buckets is None else buckets
        works = [self._gathers.pop(id(b)) for b in asked if id(b) in self._gathers]
        if works:
            with self.trace.span("gather"):
                for work in works:
                    work.wait()

    def wait_before(self, module: nn.Module, params: Iterable[nn.Parameter]) -> None:
        """Have each forward of ``module`` wait for these parameters, and for no others."""
        if not self.zero1:
            return
        buckets = list({id(b): b for b in (self.bucket_of[id(p)] for p in params)}.values())

        def wait(*_: object) -> None:
            if self._gathers:
                self.current(buckets)

        module.register_forward_pre_hook(wait)


def _late(at: Slice) -> str:
    if at.partial:
        return "partial"
    return {"": "", "shared": "shared", "owner": "tied", "copy": "tied"}[at.tied]
