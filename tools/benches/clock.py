"""Times contestants in turn, on all ranks at once."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping

import torch

from megalite.mesh import Axis
from tools.benches.rows import Sample

Contestant = Callable[[], object]
HEAD_START_S = 0.02
"""From the agreement on a start to the start: for the slowest rank to hear of it."""


def time_in_turn(
    world: Axis,
    contestants: Mapping[str, Contestant],
    repetitions: int,
    before: Contestant = lambda: None,
    warm: bool = False,
) -> dict[str, list[float]]:
    """Seconds from a common start to this rank's end, by contestant and repetition.

    Each repetition runs every contestant once, beginning with another one each time; one more
    goes before that is not counted, unless all are ``warm`` already. All ranks of ``world`` call
    this with the same names, and each calls ``before`` ahead of every start.
    """
    names = list(contestants)
    found: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(0 if warm else -1, repetitions):
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            gc.collect()
            before()
            start = _common_start(world)
            contestants[name]()
            if repetition >= 0:
                found[name].append(time.monotonic() - start)
    return found


def _common_start(world: Axis) -> float:
    """A moment on this machine's clock at which every rank has returned from here."""
    at = torch.tensor([time.monotonic() + HEAD_START_S], dtype=torch.float64)
    world.all_reduce(at, "max").wait()
    start = float(at)
    time.sleep(max(0.0, start - time.monotonic()))
    return start


def slowest(ranks: list[dict[str, list[float]]]) -> dict[str, Sample]:
    """A repetition takes as long as its slowest rank."""
    return {
        name: Sample(tuple(map(max, zip(*(rank[name] for rank in ranks), strict=True))))
        for name in ranks[0]
    }
