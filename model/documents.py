"""Several documents in one row: where each starts, the places in it, and who sees whom.

The end-of-document token ends its document, as ``data.pack`` writes it. It still predicts the
first token of the next one, as the loader's targets say: so every token stays a target once, bits
a byte compare with those of a run that does not reset, and how a text begins, where sampling
starts, is learned.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def document_starts(tokens: Int64[Tensor, "b s"], eod: int) -> Int64[Tensor, "b s"]:
    """For each token, where in its row its document starts; a row starts one in any case."""
    place = torch.arange(tokens.shape[1], device=tokens.device)
    after = torch.zeros_like(tokens, dtype=torch.bool)
    after[:, 1:] = tokens[:, :-1] == eod
    return torch.where(after, place, 0).cummax(1).values


def places(starts: Int64[Tensor, "b s"]) -> Int64[Tensor, "s b"]:
    """Each token's place in its document."""
    place = torch.arange(starts.shape[1], device=starts.device)
    return (place - starts).t()


def document_mask(starts: Int64[Tensor, "b s"], dtype: torch.dtype) -> Float[Tensor, "b 1 s s"]:
    """What is added to the score of a query (first s) and a key: 0 or, from another document or
    from later on, minus infinity."""
    place = torch.arange(starts.shape[1], device=starts.device)
    seen = (place >= starts.unsqueeze(-1)) & (place <= place.unsqueeze(-1))
    # One tensor of the scores' type: a boolean one would be converted, and kept, in every block.
    mask = torch.zeros(seen.shape, dtype=dtype, device=starts.device)
    return mask.masked_fill_(~seen, -torch.inf).unsqueeze(1)
