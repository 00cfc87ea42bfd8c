"""Jobs of several ranks without processes (threads that share strings), and random cuts."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from torch import Tensor

from megalite.checkpoint.load import open_checkpoint
from megalite.checkpoint.manifest import MANIFEST, Share
from megalite.checkpoint.piece import view
from megalite.checkpoint.save import save
from megalite.slices import Piece, Rectangle

T = TypeVar("T")
State = dict[str, Tensor]


def run_job(world_size: int, body: Callable[[int, Share], T]) -> list[T | Exception]:
    """``body(rank, share)`` on a thread a rank; what each returned or raised."""
    barrier = threading.Barrier(world_size, timeout=20)
    slots = [""] * world_size
    outcomes: list[T | Exception] = [RuntimeError("did not end")] * world_size

    def rank_main(rank: int) -> None:
        def share(text: str) -> list[str]:
            slots[rank] = text
            barrier.wait()
            found = list(slots)
            barrier.wait()
            return found

        try:
            outcomes[rank] = body(rank, share)
        except Exception as error:
            outcomes[rank] = error

    threads = [
        threading.Thread(target=rank_main, args=(r,), name=f"rank{r}") for r in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def results(outcomes: list[T | Exception]) -> list[T]:
    """What every rank returned; raises what a rank raised."""
    found: list[T] = []
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
        found.append(outcome)
    return found


def cut(shape: tuple[int, ...], num_cuts: int, rng: random.Random) -> list[Rectangle]:
    """Cut a tensor again and again at a random place; parts are uneven, some are empty."""
    parts: list[Rectangle] = [(tuple(0 for _ in shape), shape)]
    for _ in range(num_cuts if shape else 0):
        offset, extent = parts.pop(rng.randrange(len(parts)))
        dim = rng.randrange(len(shape))
        at = rng.randint(0, extent[dim])
        for start, size in ((0, at), (at, extent[dim] - at)):
            parts.append(
                (
                    (*offset[:dim], offset[dim] + start, *offset[dim + 1 :]),
                    (*extent[:dim], size, *extent[dim + 1 :]),
                )
            )
    return parts


def deal(state: State, world_size: int, rng: random.Random, num_cuts: int = 5) -> list[list[Piece]]:
    """Views of the state, cut at random and dealt to ranks at random."""
    hands: list[list[Piece]] = [[] for _ in range(world_size)]
    for name, tensor in state.items():
        shape = tuple(tensor.shape)
        for rectangle in cut(shape, num_cuts, rng):
            part = view(tensor, tuple(0 for _ in shape), rectangle)
            rng.choice(hands).append(Piece(name, shape, rectangle[0], part))
    return hands


def whole(state: State) -> list[Piece]:
    """Every tensor as one piece, as a job of one rank has it."""
    return [Piece(n, tuple(t.shape), (0,) * t.dim(), t) for n, t in state.items()]


def bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Random bits of a dtype: NaNs with payloads, both zeros, infinities and subnormals occur."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(
        0, 256, (max(1, prod(shape)) * dtype.itemsize,), generator=generator, dtype=torch.uint8
    )
    return raw.view(dtype)[: prod(shape)].reshape(shape)


def make_state(seed: int = 0) -> State:
    """A few tensors of every dtype and of 0 to 3 dims."""
    return {
        "embedding.weight": bits((13, 6), torch.bfloat16, seed),
        "layers.0.weight": bits((5, 7), torch.float32, seed + 1),
        "layers.0.moment": bits((4, 3, 5), torch.float64, seed + 2),
        "layers.0.scale": bits((), torch.float16, seed + 3),
        "counts": bits((11,), torch.int64, seed + 4),
    }


def zeros_like(state: State) -> State:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def same_bits(a: State, b: State) -> bool:
    """Equal to the last bit, also where floats compare unequal (NaN) or equal (-0.0)."""
    if a.keys() != b.keys():
        return False
    pairs = [(a[name].contiguous(), b[name].contiguous()) for name in a]
    return all(
        x.dtype == y.dtype
        and x.shape == y.shape
        and bool((x.reshape(-1).view(torch.uint8) == y.reshape(-1).view(torch.uint8)).all())
        for x, y in pairs
    )


def save_job(directory: Path, step: int, hands: list[list[Piece]], extra: Any = None) -> Path:
    """Save from ``len(hands)`` ranks."""
    world_size = len(hands)
    paths = run_job(
        world_size,
        lambda rank, share: save(
            directory,
            step,
            hands[rank],
            extra or {"samples": step},
            rank=rank,
            world_size=world_size,
            share=share,
        ),
    )
    return results(paths)[0]


def rewrite(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest as one who knows the format could: its own hash is right again."""
    path = checkpoint / MANIFEST
    document = json.loads(path.read_text())
    change(document)
    del document["xxh3_128"]
    digest = xxhash.xxh3_128(json.dumps(document, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({"xxh3_128": digest, **document}))


def flip(path: Path, offset: int = -1) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def read_state(path: Path, like: State) -> State:
    got = zeros_like(like)
    open_checkpoint(path).read(whole(got))
    return got


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def count(shape: tuple[int, ...], rectangles: Iterable[Rectangle]) -> Tensor:
    """In how many of the rectangles each element is."""
    times = torch.zeros(shape, dtype=torch.int64)
    for rectangle in rectangles:
        view(times, tuple(0 for _ in shape), rectangle).add_(1)
    return times


def full_disk(part: str) -> Callable[..., int]:
    """An ``os.write`` that finds the disk full in files whose path has this in it."""
    real = os.write

    def write(descriptor: int, data: Any) -> int:
        if part in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    return write
