"""Bytes that each pipeline rank holds, from its stages' layers and the plan's peaks. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megalite.planner.constants import Framework
from megalite.planner.cost import Split
from megalite.planner.pipeline import peaks
from megalite.planner.shape import ModelShape

_ADAM = 8  # bytes of two fp32 moments
_MASTER = 4
_LOGIT_WORK = 3  # copies of the logits in fp32 that the loss has at once


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank.

    Attributes:
        weights, gradients, optimizer: of its stages' parameters.
        activations: kept from F to the end of B, at the worst moment.
        work: what one layer's backward needs for a moment: a recomputed layer, the logits.
        buffers: messages on their way, and what collectives gather into.
        reserve: what the framework and the device's runtime take beside all that.
    """

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    work: float = 0.0
    buffers: float = 0.0
    reserve: float = 0.0

    @property
    def allocated(self) -> float:
        """Without the reserve."""
        state = self.weights + self.gradients + self.optimizer
        return state + self.activations + self.work + self.buffers

    @property
    def total(self) -> float:
        return self.allocated + self.reserve


@dataclass(frozen=True)
class MemoryModel:
    """What memory depends on besides the plan."""

    shape: ModelShape
    split: Split
    framework: Framework
    sequences: int
    element_bytes: int
    zero1: bool
    dp: int
    reserve_bytes: float = 0.0

    @property
    def tokens(self) -> int:
        return self.sequences * self.shape.seq

    @property
    def _masks(self) -> int:
        return 1 if self.shape.dropout or self.framework.dropout else 0

    def kept(self, recompute: str | None = None) -> float:
        """Of one layer and microbatch, from F to the end of B.

        Source: Korthikanti et al. 2022 (arXiv:2205.05198), equations 2 and 4 and table 2, with
        the widths of grouped-query heads and gated MLPs.
        """
        mode = self.split.recompute if recompute is None else recompute
        s, n, size, cut = self.shape, self.tokens, self.element_bytes, self.split.cut
        if mode == "full":
            return n * s.hidden * size / cut
        q, kv, ffn = s.widths(self.split.tp)
        outside = n * s.hidden * (4 * size + 2 * self._masks) / cut
        inner = n * size * (2 * q + 2 * kv + (s.ups + 1) * ffn)
        if s.gated:
            inner += n * size * ffn
        return outside + inner + (0.0 if mode == "selective" else self._scores)

    @property
    def _scores(self) -> float:
        s = self.shape
        heads = self.sequences * s.heads / self.split.tp
        if s.fused_attention:
            return 4 * heads * s.seq
        return heads * s.seq**2 * (self.element_bytes * (1 + self._masks) + self._masks)

    def kept_for_w(self) -> float:
        """Of one layer, between I and W: inputs and output gradients of the linear layers."""
        s, n, size = self.shape, self.tokens, self.element_bytes
        q, kv, ffn = s.widths(self.split.tp)
        taken = 2 * s.hidden / self.split.cut + q + ffn
        made = 2 * s.hidden / self.split.cut + q + 2 * kv + s.ups * ffn
        return n * size * (taken + made)

    def head_kept(self) -> float:
        """Final norm and logits: 4 s b h / t (1 + v / h) with two-byte elements."""
        s, n = self.shape, self.tokens
        rows = s.rows(self.split.tp)
        wide = max(4, self.element_bytes)
        return n * (2 * self.element_bytes * s.hidden / self.split.cut + wide * rows)

    def head_kept_for_w(self) -> float:
        """Of the head, between I and W: the final norm's output, and the logits' gradient."""
        s, n, size = self.shape, self.tokens, self.element_bytes
        return n * size * (s.hidden / self.split.cut + s.rows(self.split.tp))

    def embedding_kept(self) -> float:
        return self.tokens * (16 + self._masks * self.shape.hidden / self.split.cut)

    def state(self, elements: float) -> tuple[float, float, float]:
        """Weights, gradients and optimizer of so many parameters."""
        size = self.element_bytes
        adam = elements * (_ADAM + (_MASTER if size < 4 else 0) * (size // 8 + 1))
        if size == 8:
            adam = elements * 16
        grads = self.framework.grad_bytes if size < 8 else 8
        shared = adam / self.dp if self.zero1 else adam
        return elements * size, float(elements * grads), shared

    def ranks(
        self,
        schedule: str,
        pp: int,
        microbatches: int,
        virtual_stages: int,
        rank_of: Sequence[int],
        layers: Sequence[range],
    ) -> list[RankMemory]:
        """Every pipeline rank's bytes."""
        last = len(layers) - 1
        activation = [len(r) * self.kept() for r in layers]
        activation[0] += self.embedding_kept()
        activation[last] += self.head_kept()
        linear = min(self.kept_for_w(), self.kept("none"))
        waiting = [len(r) * linear for r in layers]
        waiting[last] += self.head_kept_for_w()
        open_w = [min(w, a) for w, a in zip(waiting, activation, strict=True)]
        held = peaks(schedule, pp, microbatches, virtual_stages, tuple(activation), tuple(open_w))
        return [
            self._rank(r, held[r], [s for s in range(last + 1) if rank_of[s] == r], layers, pp)
            for r in range(pp)
        ]

    def _rank(
        self, rank: int, held: float, stages: Sequence[int], layers: Sequence[range], pp: int
    ) -> RankMemory:
        s, tp, last = self.shape, self.split.tp, len(layers) - 1
        elements = sum(len(layers[i]) for i in stages) * s.layer_elements(tp)
        first_here, last_here = 0 in stages, last in stages
        if first_here:
            elements += s.embedding_elements(tp)
        if last_here:
            shared = s.tied and first_here
            elements += s.norm_elements if shared else s.head_elements(tp)
        weights, gradients, optimizer = self.state(elements)
        work = 0.0
        if self.split.recompute != "none" and any(len(layers[i]) for i in stages):
            work = self.kept("none") - self.kept()
        if last_here:
            logits = self.tokens * s.rows(tp)
            copies = (_LOGIT_WORK - 1) * max(4, self.element_bytes)
            each = self.element_bytes if self.framework.in_place else copies
            work = max(work, each * logits)
        message = self.tokens * s.hidden * self.element_bytes / self.split.cut
        chunks, gathers = (len(stages), 0) if self.framework.in_place else (1, 2)
        buffers = (4 * chunks * message if pp > 1 else 0.0) + gathers * message * (tp > 1)
        used = RankMemory(weights, gradients, optimizer, held, work, buffers)
        reserve = (self.framework.reserve - 1) * used.allocated + self.reserve_bytes
        return RankMemory(weights, gradients, optimizer, held, work, buffers, reserve)
