"""Times of single kernels and collectives on one kind of device. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalite.planner.constants import Constants
from megalite.planner.hardware import TILES, HardwareSpec

_SPLITS = (1, 2, 4, 8)
_TILE_SHARE = {(256, 128): 1.0, (128, 128): 0.95, (128, 64): 0.80, (64, 64): 0.65}
"""A smaller tile reads more for each operation. Source: NVIDIA, "Matrix Multiplication Background
User's Guide", section on tile size: relative throughput by tile."""

FEW_RANKS = 0.3
"""Fewer ranks use fewer channels: 1 - 0.3 / ranks of the bandwidth. Source: vTrain's NCCL trace on
A100, largest messages: 197 GB/s on 2 ranks, 222 on 4, 229 on 8."""


@dataclass(frozen=True)
class Kernels:
    """A device and the constants that it is judged by; every method gives seconds."""

    hw: HardwareSpec
    c: Constants
    element_bytes: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "_known", {})
        object.__setattr__(self, "_rates", dict(self.hw.rates))

    @property
    def flops_s(self) -> float:
        return self.hw.peak_flops * self.hw.gemm_share * self.c.sustained

    def gemm(self, m: float, n: float, k: float, batch: float = 1) -> float:
        """(m, k) by (k, n), ``batch`` times in one launch: the best of the usual tiles, in waves
        over the processors, k split where there are few tiles."""
        known: dict[tuple[float, ...], float] = self._known  # type: ignore[attr-defined]
        key = (m, n, k, batch)
        if key not in known:
            known[key] = self._gemm(m, n, k, batch)
        return known[key]

    def _gemm(self, m: float, n: float, k: float, batch: float) -> float:
        hw, c, size = self.hw, self.c, self.element_bytes
        moved = size * batch * (m * k + k * n + m * n) / self.bytes_s
        if hw.processors == 1:
            return c.gap + max(2.0 * batch * m * n * (k + c.ramp_k) / self.flops_s, moved)
        one = self.flops_s / hw.processors
        best = math.inf
        for tm, tn in TILES:
            whole = math.ceil(m / tm) * math.ceil(n / tn) * batch
            for split in _SPLITS:
                if split > 1 and k / split < 512:
                    break
                tiles = whole * split
                even = tiles / hw.processors
                waves = math.ceil(even)
                flops = 2.0 * tm * tn * (k / split + c.ramp_k)
                time = waves * flops / (one * _TILE_SHARE[tm, tn])
                if split > 1:
                    time += 4.0 * split * batch * m * n / self.bytes_s
                best = min(best, time)
        return c.gap + max(best, moved)

    @property
    def bytes_s(self) -> float:
        return self.hw.hbm_bytes_s * self.hw.hbm_share

    def stream(self, num_bytes: float, kind: str = "") -> float:
        """A kernel that is bound by memory; ``kind`` names those that a machine may do at a rate
        of their own: "activation" (on a CPU bound by its exponentials), "update"."""
        rates: dict[str, float] = self._rates  # type: ignore[attr-defined]
        rate = rates.get(kind) or self.bytes_s * self.c.stream
        return self.c.gap + num_bytes / rate

    def flash(self, flops: float) -> float:
        return self.c.gap + flops / (self.flops_s * self.c.flash)

    # --- collectives; ``num_bytes`` is the whole tensor ------------------------------------------

    def all_reduce(self, num_bytes: float, ranks: int, stride: int = 1) -> float:
        """Over ranks that lie ``stride`` apart."""
        return self._ring(num_bytes, ranks, stride, 2.0)

    def all_gather(self, num_bytes: float, ranks: int, stride: int = 1) -> float:
        """Also a reduce-scatter: half an all-reduce, where the links are all that counts."""
        return self._ring(num_bytes, ranks, stride, 2.0 * self.hw.gather_share)

    def _ring(self, num_bytes: float, ranks: int, stride: int, trips: float) -> float:
        if ranks <= 1:
            return 0.0
        hw = self.hw
        inside = max(1, min(ranks, hw.node_size // max(1, stride)))
        fast = hw.link_bytes_s * hw.link_share * (1 - FEW_RANKS / inside)
        part = trips * (ranks - 1) / ranks * num_bytes
        if inside >= ranks:
            return hw.link_latency_s * trips / 2 * (1 + math.log2(ranks) / 3) + part / fast
        # Each node's members bring their network adapters; the ring is as fast as its slowest hop.
        net = min(fast, inside * hw.net_bytes_s * hw.net_share)
        hops = math.log2(ranks / inside)
        return hw.link_latency_s + trips * hops * hw.net_latency_s + part / net

    def message(self, num_bytes: float, far: bool) -> float:
        """From one stage to the next, in the same node or not."""
        hw = self.hw
        if far:
            share = hw.net_bytes_s * hw.net_share
            return hw.net_latency_s + num_bytes / share
        return hw.link_latency_s / 2 + num_bytes / (hw.link_bytes_s * hw.link_share)
