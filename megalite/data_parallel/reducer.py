"""Sums gradients over replicas, once a step and bucket, while the last backward still runs.

Most buckets are summed over dp as soon as their last gradient is there. Those whose gradient is
first a part of a sum (over tp under sequence parallelism or shared key/value heads, over the two
ends of the pipeline for a tied embedding) wait for the end of the schedule: one sum over tp, one
over the tie, then dp. With ZeRO-1 the sum over dp leaves each replica its share of it only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megalite.data_parallel.bucket import Bucket, FlatParameters
from megalite.mesh import Axis, Mesh, Work
from megalite.slices import get_slice
from megalite.trace import Trace


class GradReducer:
    """Owns the gradients of one rank between ``zero`` and ``finish``.

    All replicas issue the same operations on dp in the same order, the weights' gathers included:
    those of a step are issued before its successor begins.
    """

    def __init__(self, flat: FlatParameters, mesh: Mesh, trace: Trace | None = None) -> None:
        self.flat, self.mesh, self.trace = flat, mesh, trace or Trace()
        self.on_complete: Callable[[Bucket], None] | None = None  # before replicas are summed
        self._works: list[Work] = []
        self._early: dict[int, list[Bucket]] = {}
        for bucket in flat.buckets:
            if not bucket.late:
                self._early.setdefault(bucket.stage, []).append(bucket)
        self._next: dict[int, int] = {}
        late = [p for b in flat.buckets if b.late for p in b.params]
        self._tie_grads = [b.grad for b in flat.buckets if b.late == "tied"]
        self._partial, self._slots, self._targets = _partial_buffer(late)

    def zero(self, num_microbatches: int) -> None:
        """Begin a step: every sum is zero, and each parameter waits for a gradient a microbatch."""
        if self.flat.buckets:
            torch._foreach_zero_([b.grad for b in self.flat.buckets])
        if self._partial is not None:
            self._partial.zero_()
        self._next.clear()
        for bucket in self.flat.buckets:
            bucket.waiting = num_microbatches * len(bucket.params)

    def grad_ready(self, param: Tensor) -> None:
        """A microbatch has added to the gradient of ``param``; reduce what is complete."""
        bucket = self.flat.bucket_of[id(param)]
        bucket.waiting -= 1
        if bucket.late or bucket.waiting:
            return
        # In a fixed order, so that every replica starts the same reductions alike.
        ready = self._early[bucket.stage]
        at = self._next.get(bucket.stage, 0)
        while at < len(ready) and ready[at].waiting == 0:
            self._works.append(self._sum_replicas(ready[at]))
            at += 1
        self._next[bucket.stage] = at

    def started(self, stage: int) -> None:
        """Assert that all of a stage's reductions run, or are left for ``finish``."""
        missing = self._early.get(stage, [])[self._next.get(stage, 0) :]
        assert not missing, f"stage {stage}: no gradient for {_names(missing)}"

    def finish(self) -> None:
        """Sum what had to wait, and wait for all; the gradients are then those of the batch, in
        what ``Bucket.updated`` gives of them."""
        missing = [b for b in self.flat.buckets if b.waiting > 0]
        assert not missing, f"no gradient for {_names(missing)}"
        if self._partial is not None:
            self._sum("tp", self.mesh.tp, self._partial).wait()
            torch._foreach_copy_(self._targets, self._slots)
        for work in [self._sum("tie", self.mesh.tie, g) for g in self._tie_grads]:
            work.wait()
        self._works += [self._sum_replicas(b) for b in self.flat.buckets if b.late]
        for work in self._works:
            work.wait()
        self._works.clear()

    def _sum(self, name: str, axis: Axis, grad: Tensor) -> Work:
        """Start to sum ``grad`` over an axis."""
        return self._traced(name, axis, axis.all_reduce(grad))

    def _sum_replicas(self, bucket: Bucket) -> Work:
        """Start to sum a bucket over dp; what is not this replica's to update may be left out."""
        axis, grad = self.mesh.dp, bucket.grad
        if self.on_complete is not None:
            self.on_complete(bucket)
        if not bucket.zero1:
            return self._sum("dp", axis, grad)
        return self._traced("dp", axis, axis.reduce_scatter(bucket.share(grad), grad))

    def _traced(self, name: str, axis: Axis, work: Work) -> Work:
        return self.trace.reduction(name, work) if axis.size > 1 else work


def _names(buckets: list[Bucket]) -> str:
    return ", ".join(get_slice(p).name for b in buckets if b.waiting for p in b.params)


def _partial_buffer(
    late: list[nn.Parameter],
) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
    """One flat buffer for all gradients that are partial over tp.

    A parameter that is cut over tp as well as replicated gets room for each of its slots, of
    which a rank fills its own, so that one sum over the whole axis serves all. They stand in the
    order of their names: that of buckets depends on what a rank counts, which differs over tp.
    Returns the buffer, this rank's slot of each such parameter, and where the sum goes.
    """
    partial = [p for p in late if get_slice(p).partial]
    partial.sort(key=lambda p: get_slice(p).name)
    if not partial:
        return None, [], []
    sizes = [get_slice(p).slot[1] * p.numel() for p in partial]
    targets = [p.main_grad for p in partial]  # type: ignore[attr-defined]
    buffer = torch.zeros(sum(sizes), dtype=targets[0].dtype, device=targets[0].device)
    slots = []
    for param, room in zip(partial, buffer.split(sizes), strict=True):
        index, count = get_slice(param).slot
        view = room.view(count, *param.shape)[index]
        param.main_grad = view  # type: ignore[attr-defined]
        slots.append(view)
    return buffer, slots, targets
