"""Text from a model, one token at a time, with the keys and values of earlier tokens kept.

The tokens do not depend on the layout: logits are gathered over tp, the choice is made once in
float64, from random numbers that are a function of (seed, number of the text, place, token), and
told to all. A text longer than the context is seen through a window of its last tokens, whose
positions start at 0; there nothing can be kept, and each token costs a pass over the window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from megalite.mesh import Axis
from megalite.rng import stream_key, uniform
from model.gpt import About, Block, split_heads

Forward = Callable[[Tensor, Tensor | None], Tensor | None]
"""(b, s) tokens and their places (None: 0, 1, 2, ...) to the (s, b, v/tp) logits, or None where no
last stage is."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: only so many of the likeliest; 0: all.
        top_p: only the likeliest that together have this probability (Holtzman et al. 2020,
            arXiv:1904.09751, section 3.1).
        num_ids: only ids below this, those of the tokenizer.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    num_ids: int = 0

    def choose(self, logits: Float[Tensor, " v"], text: int, place: int) -> int:
        """The token at ``place`` of what is added to text number ``text``.

        Equal logits count by id, the lowest first. The draw adds Gumbel noise of its own to each
        token (Gumbel 1954), so that logits which differ in the last bit give another token only
        where two candidates are as close; a draw along the sum of all probabilities would often.
        """
        logits = logits[: self.num_ids or None].double()
        if self.temperature == 0:
            return int(logits.argmax())
        logits = self._kept(logits / self.temperature)
        key = stream_key(self.seed, f"sample.{text}.{place}")
        point = uniform(key, torch.arange(len(logits))).clamp_(max=1 - 2.0**-53)
        noise = point.log_().neg_().log_()
        return int((logits - noise).argmax())

    def _kept(self, logits: Tensor) -> Tensor:
        """Minus infinity for what is not to be drawn."""
        if not self.top_k and self.top_p >= 1:
            return logits
        falling, order = logits.sort(descending=True, stable=True)
        keep = torch.ones_like(order, dtype=torch.bool)
        if self.top_k:
            keep[self.top_k :] = False
        if self.top_p < 1:
            shares = falling.masked_fill(~keep, -torch.inf).softmax(0)
            keep &= shares.cumsum(0) - shares < self.top_p
            keep[0] = True
        return torch.full_like(logits, -torch.inf).scatter_(
            0, order, falling.masked_fill(~keep, -torch.inf)
        )


class KVCache:
    """Keys and values of a stage's blocks by row and place, in memory for ``capacity`` places.

    ``extent``: how many places of any row count; the caller sets it before a pass.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.extent = capacity, 0
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def used_by(self, blocks: Iterable[Block]) -> Iterator[None]:
        """Have these blocks attend to what is kept."""
        before = [(block.attention, block.attention.core) for block in blocks]
        for block in blocks:
            block.attention.core = partial(self._attend, block.name)
        try:
            yield
        finally:
            for attention, core in before:
                attention.core = core

    def _attend(
        self, name: str, q: Tensor, k: Tensor, v: Tensor, head_dim: int, about: About
    ) -> Float[Tensor, "s b q_local"]:
        """What ``model.gpt.attend`` gives, where the places before are not fed again."""
        assert about.places is not None and about.mask is None
        q, k, v = split_heads(q, k, v, head_dim, about.rotation)
        places = about.places.t()  # (b, s)
        kept = self._kept.get(name)
        if kept is None:
            shape = (*k.shape[:2], self.capacity, head_dim)
            # Zeros: what was never written is masked, but 0 x NaN would not be 0.
            kept = self._kept[name] = k.new_zeros(shape), v.new_zeros(shape)
        index = places[:, None, :, None].expand_as(k)
        k, v = (
            memory.scatter_(2, index, new)[:, :, : self.extent]
            for memory, new in zip(kept, (k, v), strict=True)
        )
        seen = torch.arange(self.extent, device=q.device) <= places.unsqueeze(-1)
        y = scaled_dot_product_attention(
            q, k, v, attn_mask=seen.unsqueeze(1), enable_gqa=q.shape[1] != k.shape[1]
        )
        return rearrange(y, "b h s k -> s b (h k)")


@dataclass
class Decoder:
    """A model in some layout, as generation needs it.

    Attributes:
        forward: through all stages; collective over tp and pp.
        blocks: those of this rank's stages.
        context: the most tokens that the model sees.
        last: the pipeline index of the last stage.
        border: the end-of-document token at which attention and positions start anew, if any.
        keeps: whether keys and values are kept; else every pass is over whole windows of
            ``context`` tokens.
    """

    forward: Forward
    blocks: Sequence[Block]
    context: int
    tp: Axis
    pp: Axis
    last: int
    device: torch.device
    border: int | None = None
    keeps: bool = True

    def start(self, text: Sequence[int]) -> int:
        """Where the window begins through which the model sees a text to be gone on with."""
        first = max(0, len(text) - self.context)
        if self.border is not None:
            for at in range(len(text) - 2, first - 1, -1):
                if text[at] == self.border:
                    return at + 1
        return first

    def gathered(self, logits: Float[Tensor, "b v_local"]) -> Float[Tensor, "b v"]:
        """Of the whole vocabulary, with its padding at the end."""
        whole = logits.new_empty(self.tp.size * logits.shape[0], logits.shape[1])
        self.tp.all_gather(whole, logits.contiguous()).wait()
        return rearrange(whole, "(t b) v -> b (t v)", t=self.tp.size)


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    stop: Callable[[int], bool] = lambda token: False,
    numbers: Sequence[int] | None = None,
) -> list[list[int]]:
    """Token ids that go on from each prompt; collective, the same on every rank of tp and pp.

    Args:
        prompts: none empty; they are computed together.
        stop: a text ends before a token for which this is true.
        numbers: what the random numbers know each text by; by default its index.
    """
    if not prompts or max_new_tokens < 1:
        return [[] for _ in prompts]
    assert all(prompts), "an empty prompt"
    numbers = range(len(prompts)) if numbers is None else numbers
    texts, done = [list(p) for p in prompts], [False] * len(prompts)
    longest = max(map(len, texts)) + max_new_tokens
    cache = KVCache(min(model.context, longest))
    chosen = torch.zeros(len(texts), dtype=torch.int64, device=model.device)
    kept: list[int] = []
    with cache.used_by(model.blocks if model.keeps else []):
        for place in range(max_new_tokens):
            starts = [model.start(text) for text in texts]
            windows = [text[start:] for text, start in zip(texts, starts, strict=True)]
            out = _feed(model, cache, windows, anew=starts != kept)
            kept = starts
            if out is not None:
                logits = model.gathered(out).cpu()
                picked = map(sampling.choose, logits, numbers, repeat(place))
                chosen.copy_(torch.tensor(list(picked)))
                # Ranks of tp have the same logits, but maybe not to the last bit.
                model.tp.broadcast(chosen, 0).wait()
            model.pp.broadcast(chosen, model.last).wait()
            for row, token in enumerate(chosen.tolist()):
                done[row] = done[row] or stop(token)
                if not done[row]:
                    texts[row].append(token)
            if all(done):
                break
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def _feed(
    model: Decoder, cache: KVCache, windows: Sequence[Sequence[int]], anew: bool
) -> Float[Tensor, "b v_local"] | None:
    """The logits after the last token of each window: that token alone is computed, or all."""
    sizes = torch.tensor([len(window) for window in windows], device=model.device)
    longest = max(map(len, windows))
    cache.extent = longest
    if model.keeps and not anew:
        tokens = torch.tensor([[window[-1]] for window in windows], device=model.device)
        out = model.forward(tokens, sizes.unsqueeze(1) - 1)
        return None if out is None else out[0]
    width = longest if model.keeps else model.context
    padded = [pad(torch.tensor(window), (0, width - len(window))) for window in windows]
    tokens = torch.stack(padded).to(model.device)
    places = torch.arange(width, device=model.device).expand_as(tokens) if model.keeps else None
    out = model.forward(tokens, places)
    if out is None:
        return None
    at = (sizes - 1)[None, :, None].expand(1, -1, out.shape[-1])
    return out.gather(0, at)[0]
