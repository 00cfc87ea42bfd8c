from __future__ import annotations

import torch

from megalite.optim.config import LARGEST_SCALE
from megalite.optim.loss_scale import LossScale

CPU = torch.device("cpu")


def run(scale: LossScale, steps: str) -> list[float]:
    """The scale after each step: ``.`` is finite, ``x`` is not."""
    found = []
    for step in steps:
        scale.update(torch.tensor(float(step == ".")))
        found.append(float(scale.scale))
    return found


def test_it_halves_at_an_overflow_and_doubles_after_an_interval_without() -> None:
    assert run(LossScale(8.0, 3, CPU), "..x...x.x....") == [8, 8, 4, 4, 4, 8, 4, 4, 2, 2, 2, 4, 4]


def test_it_has_an_upper_end() -> None:
    assert run(LossScale(LARGEST_SCALE / 2, 1, CPU), "...") == [LARGEST_SCALE] * 3


def test_it_goes_on_where_it_was() -> None:
    whole, first = LossScale(8.0, 4, CPU), LossScale(8.0, 4, CPU)
    run(first, ".x..")
    second = LossScale(1.0, 4, CPU)
    second.restore(first.state())
    assert run(whole, ".x......")[4:] == run(second, "....")
