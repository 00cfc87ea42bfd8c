"""Where a step stopped being finite: rank, stage, layer and microbatch.

Every layer's output, and in the backward pass the gradient that arrives there, leaves its sum in a
buffer on the device; so does each bucket of gradients before replicas are summed. A sum is not
finite where an element is not. Nothing is read back before a step is known to be bad, and by then
the next one runs: there is room for two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megalite.data_parallel.bucket import Bucket
from megalite.data_parallel.reducer import GradReducer
from megalite.pipeline.stage import Stage
from megalite.slices import get_slice

_STEPS = 2  # have room at a time, in turn; and behind them the first times of those computed again
_FORWARD, _BACKWARD, _SUM = range(3)


class Place(NamedTuple):
    """Where something is not finite. The least is the first: forward before backward before the
    sums of gradients, then by microbatch, then in the order in which layers are passed.

    ``microbatch`` is -1 for a sum of gradients. ``others``: further ranks on which it is the same.
    """

    phase: int
    microbatch: int
    order: tuple[int, int]
    rank: int
    name: str
    others: tuple[int, ...] = ()

    @property
    def stage(self) -> int:
        return abs(self.order[0])

    def __str__(self) -> str:
        ranks = ", ".join(map(str, (self.rank, *self.others)))
        who = f"rank{'s' * bool(self.others)} {ranks} (stage {self.stage})"
        where = "before the sum over replicas" if self.phase == _SUM else ""
        return f"{who}: {self.name}, {where or f'microbatch {self.microbatch}'}"


class FiniteWatch:
    """Watches the stages and the gradients of a rank.

    Args:
        layers: stage -> its layers by global name, in the order of the forward pass.
    """

    def __init__(
        self,
        rank: int,
        stages: Mapping[int, Stage],
        layers: Mapping[int, Mapping[str, nn.Module]],
        reducer: GradReducer,
        num_microbatches: int,
    ) -> None:
        self.rank, self._now = rank, 0
        self._sites: list[tuple[int, int, tuple[str, str]]] = []
        for s, stage in stages.items():
            self._attach(stage, list(layers[s].items()))
        buckets = reducer.flat.buckets
        self._names = [_name(bucket) for bucket in buckets]
        self._slot = {id(bucket): n for n, bucket in enumerate(buckets)}
        wide = buckets[0].grad if buckets else torch.empty(0)
        room: dict[str, Any] = {"dtype": wide.dtype, "device": wide.device}
        self._sums = torch.zeros(2 * _STEPS, 2, len(self._sites), num_microbatches, **room)
        self._grads = torch.zeros(2 * _STEPS, len(buckets), **room)
        if reducer.mesh.dp.size > 1:  # a pass over the gradients, which one replica needs not
            reducer.on_complete = self._bucket

    def _attach(self, stage: Stage, layers: Sequence[tuple[str, nn.Module]]) -> None:
        module = stage.module
        assert isinstance(module, nn.Module)
        begins = layers[0][1] if stage.first and layers else module
        if layers or not stage.first:
            before = f"stage {stage.index - 1}"
            comes = f"the output of {before}, as it came here"
            goes = f"the gradient that {layers[0][0] if layers else 'it'} gives back to {before}"
            if stage.first:
                comes, goes = _words("the embedding")
            site = self._site(stage.index, (comes, goes))
            begins.register_forward_pre_hook(lambda _, args: self._pass(stage, site, args[0]))
        for name, layer in layers:
            self._follow(stage, name, layer)
        if stage.last or not layers:  # else it is what the last layer gives
            self._follow(stage, "the loss" if stage.last else "the stage", module)

    def _follow(self, stage: Stage, name: str, layer: nn.Module) -> None:
        site = self._site(stage.index, _words(name))
        layer.register_forward_hook(lambda _, __, out: self._pass(stage, site, out))

    def _site(self, stage: int, words: tuple[str, str]) -> int:
        self._sites.append((stage, len(self._sites), words))
        return len(self._sites) - 1

    def _pass(self, stage: Stage, site: int, x: Tensor) -> None:
        """Note what passes here now, and what gradient will."""
        if not torch.is_grad_enabled():
            return
        slots = self._sums[self._now, :, site, stage.microbatch]
        _add_up(x.detach(), slots[_FORWARD])
        if x.requires_grad:
            x.register_hook(lambda grad: _add_up(grad, slots[_BACKWARD]))

    def _bucket(self, bucket: Bucket) -> None:
        _add_up(bucket.grad, self._grads[self._now, self._slot[id(bucket)]])

    def begin(self, step: int) -> None:
        """From here on sums are those of a step."""
        self._now = step % _STEPS

    def keep(self) -> None:
        """The step is to be computed again: put away what its first time left."""
        for sums in (self._sums, self._grads):
            sums[_STEPS + self._now].copy_(sums[self._now])

    def first(self, step: int, share: Callable[[str], list[str]], kept: bool) -> Place | None:
        """The first place on all ranks in one of the last two steps, or in its first time.

        Collective, and waits for the device.
        """
        at = step % _STEPS + (_STEPS if kept else 0)
        mine = min([*self._passes(at), *self._totals(at)], default=None)
        told = share("" if mine is None else json.dumps(mine[:5]))
        read = (json.loads(text) for text in told if text)
        found = sorted(Place(p, m, (o[0], o[1]), r, n) for p, m, o, r, n in read)
        same = [place for place in found if place[:3] == found[0][:3]]
        return same[0]._replace(others=tuple(p.rank for p in same[1:])) if same else None

    def _passes(self, at: int) -> list[Place]:
        found = []
        for phase, site, microbatch in (~self._sums[at].isfinite()).nonzero().tolist():
            stage, order, words = self._sites[site]
            way, name = (1 if phase == _FORWARD else -1), words[phase]
            found.append(Place(phase, microbatch, (way * stage, way * order), self.rank, name))
        return found

    def _totals(self, at: int) -> list[Place]:
        found = []
        for n in (~self._grads[at].isfinite()).nonzero().flatten().tolist():
            stage, name = self._names[n]
            what = f"the gradients of {name}"
            found.append(Place(_SUM, -1, (-stage, n), self.rank, what))
        return found


def _words(name: str) -> tuple[str, str]:
    """What passes at the end of a layer, forward and back."""
    return f"the output of {name}", f"the gradient at the output of {name}"


def _add_up(x: Tensor, slot: Tensor) -> None:
    torch.sum(x, tuple(range(x.dim())), dtype=slot.dtype, out=slot)


def _name(bucket: Bucket) -> tuple[int, str]:
    first, last = get_slice(bucket.params[-1]).name, get_slice(bucket.params[0]).name
    return bucket.stage, first if first == last else f"{first} to {last}"
