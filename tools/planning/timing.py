"""Times kernels and collectives as a job has them: all ranks at once, one kind after another."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from megalite.mesh import Axis, Work
from tools.planning.bodies import KERNELS, ON_CPU, Body, bodies, products, sizes_of

LEAST_S = 0.02
"""A timed stretch is as long, at least."""
_MB = 1 << 20
SMALL_BYTES, LARGE_BYTES = 256, 8 * _MB
"""Of the collectives whose times tell latency and bandwidth apart."""
_CALLS = 4
_BETWEEN_S = 0.02  # of products between two collectives, as between those of a training step
Start = Callable[[], Work]
Rates = dict[str, float]


def collectives(axis: Axis, device: torch.device) -> dict[str, Start]:
    """Starts a collective of each kind and size; the same on every rank."""
    found: dict[str, Start] = {}
    for name, size in (("small", SMALL_BYTES), ("large", LARGE_BYTES)):
        whole = torch.zeros(size // 4, device=device)
        out, part = torch.zeros_like(whole), torch.zeros(size // 4 // axis.size, device=device)

        def reduce(whole: Tensor = whole) -> Work:
            return axis.all_reduce(whole)

        def gather(out: Tensor = out, part: Tensor = part) -> Work:
            return axis.all_gather(out, part)

        found |= {f"reduce {name}": reduce, f"gather {name}": gather}
    return found


def between(axis: Axis, compute: Body, each_s: float, starts: Mapping[str, Start]) -> Rates:
    """Seconds that a collective adds to the products between which it stands (``NAME``), and
    beside which it goes on (``beside NAME``). What a rank waits for the other's products counts:
    no two ranks are equally fast all the time."""
    # As many on every rank: each brings its own time.
    slowest = torch.tensor([each_s], dtype=torch.float64)
    axis.all_reduce(slowest, "max").wait()
    times = max(1, math.ceil(_BETWEEN_S / float(slowest)))

    def computed() -> None:
        for _ in range(times):
            compute()

    def after(start: Start) -> None:
        computed()
        start().wait()

    def beside(start: Start) -> None:
        work = start()
        computed()
        work.wait()

    def stretch(body: Body) -> float:
        axis.all_reduce(torch.zeros(1)).wait()
        begin = time.perf_counter()
        for _ in range(_CALLS):
            body()
        return (time.perf_counter() - begin) / _CALLS

    found = {}
    alone = stretch(computed)
    for name, start in starts.items():
        found[name] = stretch(partial(after, start)) - alone
        found[f"beside {name}"] = stretch(partial(beside, start)) - alone
    return found


class Bench:
    """Everything that is timed on one rank of an axis, which is asked for round by round: between
    rounds the machine may change, or train.

    Without ``computes`` a rank takes part in the collectives only: it has no device of its own.
    """

    def __init__(self, axis: Axis, device: torch.device, computes: bool = True) -> None:
        self.axis, self.sizes = axis, sizes_of(device)
        dtype = torch.float32 if self.sizes is ON_CPU else torch.bfloat16
        self.bodies = bodies(self.sizes, device, dtype) if computes else {}
        # Both ranks are processes of one host, and so are the collectives that are timed.
        host = torch.device("cpu")
        self.compute = products(ON_CPU.rows, ON_CPU.width // 4, host, torch.float32)
        self.starts = collectives(axis, host)
        self.rounds: list[Rates] = []
        for body in (*self.bodies.values(), self.compute):
            body()

    def round(self) -> None:
        """Times everything once. Collective over the axis."""
        found = {}
        for name in KERNELS:
            self.axis.all_reduce(torch.zeros(1)).wait()
            if name in self.bodies:
                found[name] = seconds(self.bodies[name])
        each = seconds(self.compute)
        self.rounds.append(found | between(self.axis, self.compute, each, self.starts))

    def medians(self) -> Rates:
        """Seconds of everything, the median of the rounds."""
        return {name: median(r[name] for r in self.rounds) for name in self.rounds[0]}


def seconds(body: Body) -> float:
    """Of one call, in a stretch of several; waits for the device at the ends."""

    def stretch(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times - 1):
            body()
        _waited(body())
        return time.perf_counter() - start

    once = stretch(1)
    times = math.ceil(LEAST_S / max(once, 1e-7))
    return once if times == 1 else stretch(times) / times


def _waited(result: Any) -> None:
    if isinstance(result, Tensor):
        float(result.flatten()[0])
