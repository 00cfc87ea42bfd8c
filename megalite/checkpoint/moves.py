"""Which rank sends what to which when a state goes from one layout to another.

Pure arithmetic on rectangles of global tensors: every rank computes the same list from the same
two inventories, and so knows what to send and what will come without a word more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from megalite.checkpoint.piece import overlap
from megalite.slices import Rectangle


class Area(NamedTuple):
    """A rectangle of the global tensor ``name`` that a rank holds, or is to hold."""

    name: str
    offset: tuple[int, ...]
    extent: tuple[int, ...]


class Move(NamedTuple):
    """A rectangle that goes from one rank to another, or stays on its own.

    ``held`` is the number of the area on the source that has it, ``wanted`` that of the area on
    the target that takes it.
    """

    source: int
    target: int
    held: int
    wanted: int
    offset: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.extent)


def without(whole: Rectangle, hole: Rectangle) -> Iterator[Rectangle]:
    """What is left of a rectangle without one that lies in it: at most 2 d rectangles."""
    offset, extent = list(whole[0]), list(whole[1])
    for dim, (start, size) in enumerate(zip(*hole, strict=True)):
        stop, end = start + size, offset[dim] + extent[dim]
        for low, high in ((offset[dim], start), (stop, end)):
            if low < high:
                part = [*offset[:dim], low, *offset[dim + 1 :]]
                yield tuple(part), (*extent[:dim], high - low, *extent[dim + 1 :])
        offset[dim], extent[dim] = start, size


def find_moves(
    held: Sequence[Sequence[Area]], wanted: Sequence[Sequence[Area]], node: Sequence[int]
) -> list[Move]:
    """The moves that fill every wanted area once, each part of it from its nearest holder: the
    target itself, else a rank of its node, else any; of equally near ones that which sends least.

    Args:
        held, wanted: of each rank, in the order of ranks; several ranks may hold the same.
        node: of each rank.
    Returns:
        the moves in the order in which the areas of a target stand, each target's next one in
        turn, so that all are kept busy.
    Raises:
        ValueError: if nobody holds an element that is wanted.
    """
    holders: dict[str, list[tuple[int, int, Area]]] = {}
    for rank, areas in enumerate(held):
        for n, area in enumerate(areas):
            holders.setdefault(area.name, []).append((rank, n, area))
    sent = [0] * len(held)
    found: list[Move] = []
    for n in range(max(map(len, wanted), default=0)):
        for target, areas in enumerate(wanted):
            if n < len(areas):
                found += _fill(target, n, areas[n], holders.get(areas[n].name, []), node, sent)
    return found


def _fill(
    target: int,
    number: int,
    area: Area,
    holders: Sequence[tuple[int, int, Area]],
    node: Sequence[int],
    sent: list[int],
) -> Iterator[Move]:
    """The moves into one area; ``sent`` counts the elements that each rank sends to others."""

    def distance(holder: tuple[int, int, Area]) -> tuple[bool, bool, int, int]:
        rank = holder[0]
        return rank != target, node[rank] != node[target], sent[rank], rank

    missing = [(area.offset, area.extent)] if prod(area.extent) else []
    for rank, n, has in sorted(holders, key=distance):
        rest: list[Rectangle] = []
        for hole in missing:
            common = overlap(hole, (has.offset, has.extent))
            if common is None:
                rest.append(hole)
                continue
            rest += without(hole, common)
            move = Move(rank, target, n, number, *common)
            sent[rank] += move.numel if rank != target else 0
            yield move
        missing = rest
        if not missing:
            return
    if missing:
        raise ValueError(f"no rank holds {area.name!r} {missing[0][1]} at {missing[0][0]}")


def split(rectangle: Rectangle, most: int) -> Iterator[Rectangle]:
    """A rectangle in parts of at most ``most`` elements, rows of it where that is possible."""
    offset, extent = rectangle
    if prod(extent) <= most or not extent:
        yield rectangle
        return
    rows = most // prod(extent[1:])
    for start in range(0, extent[0], max(1, rows)):
        size = min(max(1, rows), extent[0] - start)
        first = offset[0] + start
        if rows:
            yield (first, *offset[1:]), (size, *extent[1:])
        else:
            inner = split((offset[1:], extent[1:]), most)
            yield from (((first, *o), (1, *e)) for o, e in inner)


def in_rounds(moves: Sequence[Move], most: Sequence[int]) -> list[list[Move]]:
    """The moves in rounds, in each of which no rank sends and receives more than ``most`` of it
    (elements, at least 1), together; moves that are larger are split.

    What stays on its rank costs nothing there and is put beside what came to it last.
    """
    rounds: list[list[Move]] = []
    load: list[list[int]] = []
    newest, full = [0] * len(most), [0] * len(most)

    def put(move: Move, at: int) -> None:
        while len(rounds) <= at:
            rounds.append([])
            load.append([0] * len(most))
        rounds[at].append(move)
        newest[move.target] = max(newest[move.target], at)

    for move in moves:
        ends = (move.source, move.target)
        if move.source == move.target:
            put(move, newest[move.target])
            continue
        limit = min(most[rank] for rank in ends)
        for offset, extent in split((move.offset, move.extent), limit):
            part = move._replace(offset=offset, extent=extent)
            at = max(full[rank] for rank in ends)
            while at < len(load) and any(load[at][r] + part.numel > most[r] for r in ends):
                at += 1
            put(part, at)
            for rank in ends:
                load[at][rank] += part.numel
                while full[rank] < len(load) and load[full[rank]][rank] >= most[rank]:
                    full[rank] += 1
    return [r for r in rounds if r]
