"""AdamW, its learning rate over time and the bound on gradients. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SMALLEST_SCALE, LARGEST_SCALE = 2.0**-10, 2.0**24
"""Of a loss in fp16: below, gradients are not finite at any scale; above, no gradient of a mean
loss is lost for being small."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), with warm-up and decay."""

    lr: float = 3e-4
    """The highest learning rate, reached at the end of the warm-up."""
    min_lr: float = 0.0
    """The learning rate of the last step (not used by the constant schedule)."""
    warmup_steps: int = 0
    """Steps of linear warm-up; a run of fewer steps ends inside it."""
    lr_schedule: Literal["cosine", "constant", "linear"] = "cosine"
    """How the learning rate falls from lr to min_lr after the warm-up."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices (not of biases and norms), times the learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    clip_grad_norm: float = 1.0
    """The highest norm of the whole gradient; 0: no clipping."""
    backend: Literal["auto", "torch", "apex"] = "auto"
    """Which AdamW updates the weights; auto: apex on a GPU if NVIDIA's is complete, else torch."""
