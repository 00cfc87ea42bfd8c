"""The state of a run from one layout to another, from rank to rank, with nothing on disk.

One kind of tensor after the other (weights, masters, each moment), so that at most one kind is
there twice; and of that a buffer of the new layout gets its memory when the first part of it
arrives, one of the old layout gives it back when its last part has gone. The gradients, which are
worth nothing between two steps, are freed before and made after: they are as large as any kind, so
no rank needs more memory than before or after, but for the messages.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.moves import Area, Move, find_moves, in_rounds
from megalite.checkpoint.piece import view
from megalite.data_parallel.bucket import FlatParameters, allot, free
from megalite.mesh import Group, Mesh, Work
from megalite.optim.adamw import AdamW, Buffers
from megalite.slices import Piece

WEIGHTS = ""
"""The prefix of the weights, whose names have none."""
SHARE = 0.05
"""Of a rank's state, what it sends and receives in one round at most."""
_LEAST_BYTES = 4096
_TRIED_BYTES = 1 << 18


@dataclass(frozen=True)
class Kind:
    """What a rank holds of the tensors whose names begin with ``prefix``.

    Attributes:
        itemsize: bytes of an element.
        sizes: elements of each flat buffer.
        areas: what is in them, without the prefix; ``inside`` says in which buffer.
    """

    prefix: str
    itemsize: int
    sizes: tuple[int, ...]
    areas: tuple[Area, ...]
    inside: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.itemsize * sum(self.sizes)


@dataclass(frozen=True)
class Inventory:
    """What a rank holds: every kind that moves, and the bytes of the gradients, which do not."""

    kinds: dict[str, Kind]
    grad_bytes: int

    @property
    def nbytes(self) -> int:
        return self.grad_bytes + sum(kind.nbytes for kind in self.kinds.values())

    def bytes_of(self, prefix: str) -> int:
        return self.kinds[prefix].nbytes if prefix in self.kinds else 0

    def areas(self, prefix: str) -> tuple[Area, ...]:
        return self.kinds[prefix].areas if prefix in self.kinds else ()

    def to_text(self) -> str:
        """JSON, in which kinds that are alike share their areas."""
        told: list[Any] = []
        kinds = []
        for kind in self.kinds.values():
            shape = [kind.sizes, kind.areas, kind.inside]
            told += [] if shape in told else [shape]
            kinds.append([kind.prefix, kind.itemsize, told.index(shape)])
        return json.dumps([kinds, told, self.grad_bytes], separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Inventory:
        kinds, told, grad_bytes = json.loads(text)
        shapes = [
            (
                tuple(sizes),
                tuple(Area(name, tuple(offset), tuple(extent)) for name, offset, extent in areas),
                tuple(inside),
            )
            for sizes, areas, inside in told
        ]
        return cls({p: Kind(p, size, *shapes[n]) for p, size, n in kinds}, grad_bytes)


def buffers_of(flat: FlatParameters, optimizer: AdamW) -> Buffers:
    """The flat tensors of the whole state, by prefix."""
    return {WEIGHTS: [b.weight for b in flat.buckets], **optimizer.buffers()}


def inventory(flat: FlatParameters, optimizer: AdamW) -> Inventory:
    """What this rank holds, or, of what was built on the device ``meta``, what a rank would."""
    kinds = {}
    for prefix, buffers in buffers_of(flat, optimizer).items():
        areas, inside = [], []
        for n, (bucket, buffer) in enumerate(zip(flat.buckets, buffers, strict=True)):
            for piece in bucket.pieces(buffer):
                areas.append(Area(piece.name, piece.offset, tuple(piece.tensor.shape)))
                inside.append(n)
        sizes = tuple(buffer.numel() for buffer in buffers)
        itemsize = buffers[0].itemsize if buffers else 0
        kinds[prefix] = Kind(prefix, itemsize, sizes, tuple(areas), tuple(inside))
    return Inventory(kinds, sum(b.grad.nbytes for b in flat.buckets))


@dataclass
class Resharding:
    """What every rank sends and receives, and when; the same on every rank.

    Args:
        held, wanted: of each rank.
        node: of each rank.
    Raises:
        ValueError: if something is wanted that no rank holds.
    """

    held: Sequence[Inventory]
    wanted: Sequence[Inventory]
    node: Sequence[int]
    rounds: dict[str, list[list[Move]]] = field(init=False)

    def __post_init__(self) -> None:
        order = best_order(self.held, self.wanted)
        known: dict[Any, list[Move]] = {}
        self.rounds = {}
        for prefix in order:
            held = tuple(rank.areas(prefix) for rank in self.held)
            wanted = tuple(rank.areas(prefix) for rank in self.wanted)
            if (held, wanted) not in known:
                known[held, wanted] = find_moves(held, wanted, self.node)
            itemsize = self.itemsize(prefix)
            most = [max(1, limit // itemsize) for limit in self.limits()]
            self.rounds[prefix] = in_rounds(known[held, wanted], most)

    def limits(self) -> list[int]:
        """Bytes that each rank sends and receives in a round at most."""
        sizes = [max(a.nbytes, b.nbytes) for a, b in zip(self.held, self.wanted, strict=True)]
        return [max(_LEAST_BYTES, int(SHARE * size)) for size in sizes]

    def itemsize(self, prefix: str) -> int:
        sides = (*self.held, *self.wanted)
        return max((i.kinds[prefix].itemsize for i in sides if prefix in i.kinds), default=1) or 1

    def messages(self) -> Iterator[tuple[Move, int]]:
        """Each move from one rank to another, with its bytes."""
        for prefix, rounds in self.rounds.items():
            for move in (m for r in rounds for m in r if m.source != m.target):
                yield move, move.numel * self.itemsize(prefix)

    def pairs(self) -> list[tuple[int, int]]:
        """The ranks between which something moves, the lower one first; sorted."""
        return sorted({(min(m[:2]), max(m[:2])) for m, _ in self.messages()})

    def traffic(self) -> list[int]:
        """Bytes that each rank sends and receives."""
        found = [0] * len(self.held)
        for move, nbytes in self.messages():
            found[move.source] += nbytes
            found[move.target] += nbytes
        return found

    def total_bytes(self) -> int:
        """What goes from rank to rank."""
        return sum(nbytes for _, nbytes in self.messages())

    def peaks(self) -> list[int]:
        """Bytes of state that each rank has at most on the way, messages included."""
        found = [peak(a, b, list(self.rounds)) for a, b in zip(self.held, self.wanted, strict=True)]
        return [a + b for a, b in zip(found, self.limits(), strict=True)]


def peak(held: Inventory, wanted: Inventory, order: Iterable[str]) -> int:
    """Bytes that a rank has at most if kinds move in this order, each being there twice."""
    now = held.nbytes - held.grad_bytes
    most = held.nbytes
    for prefix in order:
        now += wanted.bytes_of(prefix)
        most = max(most, now)
        now -= held.bytes_of(prefix)
    return max(most, now + wanted.grad_bytes)


def best_order(held: Sequence[Inventory], wanted: Sequence[Inventory]) -> tuple[str, ...]:
    """The order of kinds in which the rank that is worst off needs least.

    Where the optimizer's state is cut over more replicas than before it shrinks, and goes first.
    """
    prefixes = dict.fromkeys(p for i in (*held, *wanted) for p in i.kinds)

    def worst(order: tuple[str, ...]) -> float:
        return max(
            (
                peak(a, b, order) / max(a.nbytes, b.nbytes)
                for a, b in zip(held, wanted, strict=True)
                if max(a.nbytes, b.nbytes)
            ),
            default=0.0,
        )

    return min(permutations(prefixes), key=worst)


class Links:
    """A group for every two ranks between which something moves. Creation is collective.

    ``sent_bytes`` counts what this rank has sent of the state.
    """

    def __init__(self, mesh: Mesh, pairs: Sequence[tuple[int, int]]) -> None:
        self.mesh, self.sent_bytes = mesh, 0
        self._groups: dict[tuple[int, int], Group] = {}
        for pair in pairs:
            assert mesh.transport is not None
            group = mesh.transport.new_group([rank + mesh.first_rank for rank in pair])
            if group is not None:
                self._groups[pair] = group
        # NCCL joins a communicator at its first use, where the host waits for the other end: one
        # message a link, in one order on all ranks.
        self._try_out(1)

    def seconds_a_byte(self) -> float:
        """Of a message on the slowest link, tried out; the same on every rank. Collective."""
        seconds = torch.tensor([self._try_out(_TRIED_BYTES)], device=self.mesh.device)
        self.mesh.world.all_reduce(seconds, "max").wait()
        return float(seconds) / _TRIED_BYTES

    def _try_out(self, num_bytes: int) -> float:
        """Seconds of the slowest of one message a link."""
        slowest = 0.0
        tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=self.mesh.device)
        for pair in sorted(self._groups):
            begin = time.perf_counter()
            self._post(pair, tensor).wait()
            if tensor.device.type != "cpu":
                torch.accelerator.synchronize(tensor.device)
            slowest = max(slowest, time.perf_counter() - begin)
        return slowest

    def post(self, source: int, target: int, tensor: Tensor) -> Work:
        """Start to send ``tensor``, or to receive into it, whichever end this rank is."""
        self.sent_bytes += tensor.nbytes if self.mesh.rank == source else 0
        return self._post((source, target), tensor)

    def _post(self, way: tuple[int, int], tensor: Tensor) -> Work:
        pair = (min(way), max(way))
        if self.mesh.rank == way[0]:
            return self._groups[pair].send(tensor, pair.index(way[1]))
        return self._groups[pair].recv(tensor, pair.index(way[0]))

    def close(self) -> None:
        for group in self._groups.values():
            assert self.mesh.transport is not None
            self.mesh.transport.close_group(group)
        self._groups.clear()


Views = dict[int, Piece]
"""Areas of one kind by number, with the memory that holds them."""


def exchange(moves: Sequence[Move], links: Links, held: Views, wanted: Views) -> None:
    """Carry out this rank's part of one round.

    Messages are posted in one order on all ranks, that of (source, target), so the first that is
    not done yet always has both its ends waiting for it, whatever a link can do at a time.
    """
    me = links.mesh.rank
    messages: dict[tuple[int, int], list[Move]] = {}
    for move in moves:
        if move.source == move.target == me:
            part_of(wanted[move.wanted], move).copy_(part_of(held[move.held], move))
        elif me in (move.source, move.target):
            messages.setdefault((move.source, move.target), []).append(move)
    posted: list[tuple[Work, list[Move], Tensor]] = []
    for (source, target), parts in sorted(messages.items()):
        size = sum(move.numel for move in parts)
        end = held[parts[0].held] if source == me else wanted[parts[0].wanted]
        buffer = end.tensor.new_empty(size)
        if source == me:
            for move, room in zip(parts, _cut(buffer, parts), strict=True):
                room.copy_(part_of(held[move.held], move))
        posted.append((links.post(source, target, buffer), parts, buffer))
    for work, parts, buffer in posted:
        work.wait()
        if parts[0].target == me:
            for move, room in zip(parts, _cut(buffer, parts), strict=True):
                part_of(wanted[move.wanted], move).copy_(room)


def _cut(buffer: Tensor, moves: Sequence[Move]) -> list[Tensor]:
    parts = buffer.split([move.numel for move in moves])
    return [part.view(move.extent) for part, move in zip(parts, moves, strict=True)]


def part_of(piece: Piece, move: Move) -> Tensor:
    """The part of a piece that moves."""
    return view(piece.tensor, piece.offset, (move.offset, move.extent))


@torch.no_grad()
def reshard(
    plan: Resharding, links: Links, old: FlatParameters, state: Buffers, new: FlatParameters
) -> Buffers:
    """Move the whole state; collective. The old layout is used up: its buffers have no memory any
    more, those of the gradients neither; the new weights are in ``new``, which was made ``bare``
    and has room for gradients afterwards.

    Args:
        links: for ``plan.pairs()``.
        state: ``buffers_of`` the old layout.
    Returns:
        the new optimizer's state.
    """
    me = links.mesh.rank
    for bucket in old.buckets:
        free(bucket.grad)
    moved = Buffers()
    for prefix, rounds in plan.rounds.items():
        held = _Side(plan.held[me].kinds.get(prefix), old, state.get(prefix, []))
        wanted = _Side(plan.wanted[me].kinds.get(prefix), new)
        held.used_in([[m.held for m in moves if m.source == me] for moves in rounds])
        wanted.used_in([[m.wanted for m in moves if m.target == me] for moves in rounds])
        for at, moves in enumerate(rounds):
            wanted.open(at)
            exchange(moves, links, held.views, wanted.views)
            held.close(at)
        moved[prefix] = wanted.whole()
        held.end()
    for bucket in new.buckets:
        allot(bucket.grad)
    del moved[WEIGHTS]
    return moved


class _Side:
    """The buffers of one kind on this rank, in one of the two layouts.

    ``views`` are those areas whose buffer is in use.
    """

    def __init__(
        self, kind: Kind | None, flat: FlatParameters, buffers: Sequence[Tensor] = ()
    ) -> None:
        self.kind, self.buckets = kind or Kind(WEIGHTS, 0, (), (), ()), flat.buckets
        self.buffers = dict(enumerate(buffers))
        self.views: Views = {}
        self._areas: dict[int, list[int]] = {}
        for number, n in enumerate(self.kind.inside):
            self._areas.setdefault(n, []).append(number)
        self._first: dict[int, list[int]] = {}
        self._last: dict[int, list[int]] = {}
        for n, buffer in self.buffers.items():
            self._look(n, buffer)

    def used_in(self, rounds: Sequence[Sequence[int]]) -> None:
        """Which areas each round uses."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for at, numbers in enumerate(rounds):
            for n in {self.kind.inside[number] for number in numbers}:
                first.setdefault(n, at)
                last[n] = at
        for found, where in ((self._first, first), (self._last, last)):
            for n, at in where.items():
                found.setdefault(at, []).append(n)

    def open(self, at: int) -> None:
        """Make the buffers that are used from this round on."""
        for n in self._first.get(at, []):
            self._look(n, self._make(n))

    def close(self, at: int) -> None:
        """Free the buffers that no later round uses."""
        for n in self._last.get(at, []):
            free(self.buffers.pop(n))
            for number in self._areas[n]:
                del self.views[number]

    def end(self) -> None:
        """Free what no round has used."""
        for buffer in self.buffers.values():
            free(buffer)

    def whole(self) -> list[Tensor]:
        """All buffers, also those that nothing came into."""
        missing = set(range(len(self.buckets))) - self.buffers.keys()
        self.buffers.update({n: self._make(n) for n in missing})
        return [self.buffers[n] for n in range(len(self.buckets))]

    def _look(self, n: int, buffer: Tensor) -> None:
        self.buffers[n] = buffer
        pieces = self.buckets[n].pieces(buffer)
        self.views.update(zip(self._areas.get(n, []), pieces, strict=True))

    def _make(self, n: int) -> Tensor:
        bucket = self.buckets[n]
        if self.kind.prefix == WEIGHTS:
            allot(bucket.weight)
            return bucket.weight
        options: dict[str, Any] = {"dtype": bucket.grad.dtype, "device": bucket.grad.device}
        return torch.zeros(self.kind.sizes[n], **options)
