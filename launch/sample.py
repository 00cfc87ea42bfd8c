"""Text from a model in training, in whatever layout it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from launch.build import Training
from megalite.pipeline.executor import Batch
from megalite.rng import stream_key, uniform


@torch.no_grad()
def sample(
    training: Training,
    prompt: Sequence[int],
    max_new_tokens: int,
    vocab_size: int,
    *,
    temperature: float = 0.7,
    seed: int = 0,
    stop: Callable[[int], bool] = lambda token: False,
) -> list[int]:
    """Token ids that go on from ``prompt`` (not empty); collective, the same on every rank.

    Only the first ``vocab_size`` ids are drawn: the tokenizer's, of which the model may have more.
    Draw number i depends on (seed, i) only. ``temperature`` 0 takes the likeliest token. Stops
    before a token for which ``stop`` is true.
    """
    mesh, length = training.mesh, training.cfg.model.seq_length
    tokens = list(prompt)
    chosen = torch.zeros(1, dtype=torch.int64, device=mesh.device)
    for place in range(max_new_tokens):
        window = tokens[-length:]
        padded = torch.tensor(window + [0] * (length - len(window)), device=mesh.device)
        out = training.forward(Batch(padded.view(1, 1, length), None))
        if out is not None:
            logits = _whole(training, out[len(window) - 1, 0])[:vocab_size]
            chosen.fill_(_draw(logits, temperature, stream_key(seed, "sample"), place))
        mesh.pp.broadcast(chosen, training.plan.rank_of[-1]).wait()
        token = int(chosen)
        if stop(token):
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def _whole(training: Training, logits: Tensor) -> Tensor:
    """(v,) float64 logits of the full vocabulary, on the CPU, from each tp rank's (v/tp,)."""
    tp = training.mesh.tp
    whole = logits.new_empty(logits.shape[0] * tp.size)
    tp.all_gather(whole, logits.contiguous()).wait()
    return whole[: training.cfg.model.vocab_size].double().cpu()


def _draw(logits: Tensor, temperature: float, key: int, place: int) -> int:
    if temperature == 0:
        return int(logits.argmax())
    shares = torch.softmax(logits / temperature, 0).cumsum(0)
    point = uniform(key, torch.tensor([place])) * shares[-1]
    return min(int(torch.searchsorted(shares, point)), len(shares) - 1)
