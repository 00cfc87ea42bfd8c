"""What every stage is told about a microbatch, besides what it computes on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The rows of a microbatch.

    Attributes:
        tokens: (b, s) int64 token ids, from which document borders follow.
        samples: (b,) int64 global numbers of the samples that the rows are, which dropout is
            keyed by; None where nothing is dropped (evaluation, sampling). A missing row may
            have any number.
        step: the training step's number.
        places: (b, s) int64 positions of the tokens in their text, where a text is fed in parts;
            None for whole rows, whose documents then count.
    """

    tokens: Tensor
    samples: Tensor | None = None
    step: int = 0
    places: Tensor | None = None
