"""Dynamic loss scaling: keeps fp16 gradients within its range, without the host's help."""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.optim.config import LARGEST_SCALE


class LossScale:
    """The factor by which backward starts, halved at an overflow and doubled after ``interval``
    steps without one.

    Both numbers stay on the device, and every rank takes the same steps from the same totals.

    Source: Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2.
    """

    def __init__(self, first: float, interval: int, device: torch.device) -> None:
        self.interval = interval
        self.scale = torch.full((), first, dtype=torch.float32, device=device)
        self.good = torch.zeros((), dtype=torch.float32, device=device)

    @torch.no_grad()
    def update(self, finite: Tensor) -> None:
        """After a step; ``finite`` (0-d) is 0 where a gradient was not finite."""
        fine = finite > 0
        self.good.copy_(torch.where(fine, self.good + 1, 0.0))
        grows = self.good >= self.interval
        factor = torch.where(fine, torch.where(grows, 2.0, 1.0), 0.5)
        self.scale.mul_(factor).clamp_(max=LARGEST_SCALE)
        self.good.mul_(~grows)

    def state(self) -> list[float]:
        """Waits for the device: scale, and steps since it last changed."""
        return [float(self.scale), float(self.good)]

    def restore(self, state: list[float]) -> None:
        scale, good = state
        self.scale.fill_(scale)
        self.good.fill_(good)
