"""Every wanted element is moved once, from its nearest holder, a little at a time."""

from __future__ import annotations

import random
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.checkpoint.moves import Area, Move, find_moves, in_rounds, split, without
from megalite.checkpoint.piece import inside, miscounted, overlap
from megalite.slices import Rectangle

shapes = st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple)
seeds = st.integers(0, 2**32)


def tiles(shape: tuple[int, ...], draw: random.Random) -> list[Rectangle]:
    """A tensor cut at random."""
    found: list[Rectangle] = [(tuple(0 for _ in shape), shape)]
    for _ in range(draw.randrange(5) if shape else 0):
        offset, extent = found.pop(draw.randrange(len(found)))
        dim = draw.randrange(len(shape))
        at = draw.randint(0, extent[dim])
        for start, size in ((0, at), (at, extent[dim] - at)):
            moved = (*offset[:dim], offset[dim] + start, *offset[dim + 1 :])
            found.append((moved, (*extent[:dim], size, *extent[dim + 1 :])))
    return found


def layout(
    tensors: dict[str, tuple[int, ...]], ranks: int, draw: random.Random
) -> list[list[Area]]:
    """Each part of each tensor on one rank, or on several."""
    found: list[list[Area]] = [[] for _ in range(ranks)]
    for name, shape in tensors.items():
        for offset, extent in tiles(shape, draw):
            for rank in draw.sample(range(ranks), draw.randint(1, ranks)):
                found[rank].append(Area(name, offset, extent))
    return found


def relative(move: Move, area: Area) -> Rectangle:
    return tuple(m - a for m, a in zip(move.offset, area.offset, strict=True)), move.extent


Case = tuple[list[list[Area]], list[list[Area]], list[int]]


def case(shape: tuple[int, ...], ranks: int, seed: int) -> Case:
    draw = random.Random(seed)
    tensors = {"a": shape, "b": shape[::-1], "c": ()}
    node = [rank // draw.randint(1, ranks) for rank in range(ranks)]
    return layout(tensors, ranks, draw), layout(tensors, ranks, draw), node


def check(moves: list[Move], held: list[list[Area]], wanted: list[list[Area]]) -> None:
    """Each wanted element comes once, from a rank that holds it."""
    for move in moves:
        source = held[move.source][move.held]
        assert source.name == wanted[move.target][move.wanted].name
        assert inside(source.extent, *relative(move, source))
    for target, areas in enumerate(wanted):
        for n, area in enumerate(areas):
            here = [m for m in moves if (m.target, m.wanted) == (target, n)]
            assert all(inside(area.extent, *relative(m, area)) for m in here)
            assert miscounted(area.extent, [relative(m, area) for m in here]) is None


@given(shapes, st.integers(1, 5), seeds)
@settings(deadline=None, max_examples=60)
def test_every_wanted_element_arrives_once_from_its_nearest_holder(
    shape: tuple[int, ...], ranks: int, seed: int
) -> None:
    held, wanted, node = case(shape, ranks, seed)
    moves = find_moves(held, wanted, node)
    check(moves, held, wanted)
    for move in moves:
        name, here = wanted[move.target][move.wanted].name, (move.offset, move.extent)
        for rank, areas in enumerate(held):
            has = [a for a in areas if a.name == name and overlap((a.offset, a.extent), here)]
            nearer = rank == move.target or node[rank] == node[move.target] != node[move.source]
            assert not (has and nearer and move.source != move.target) or rank == move.source


@given(shapes, st.integers(1, 5), st.integers(1, 9), seeds)
@settings(deadline=None, max_examples=60)
def test_no_rank_has_more_than_its_limit_in_a_round(
    shape: tuple[int, ...], ranks: int, least: int, seed: int
) -> None:
    held, wanted, node = case(shape, ranks, seed)
    moves = find_moves(held, wanted, node)
    most = [least + rank for rank in range(ranks)]
    rounds = in_rounds(moves, most)
    check([m for r in rounds for m in r], held, wanted)
    for moves_of_round in rounds:
        load = [0] * ranks
        for move in moves_of_round:
            for rank in {move.source, move.target} if move.source != move.target else ():
                load[rank] += move.numel
        assert all(a <= b for a, b in zip(load, most, strict=True))


def test_the_check_sees_an_element_that_comes_twice_or_from_elsewhere() -> None:
    """A negative control."""
    whole = [[Area("a", (0,), (4,))], [Area("a", (0,), (2,))]]
    good = find_moves(whole, [whole[0], []], [0, 0])
    check(good, whole, [whole[0], []])
    with pytest.raises(AssertionError):
        check([*good, good[0]._replace(extent=(1,))], whole, [whole[0], []])
    with pytest.raises(AssertionError):
        check([good[0]._replace(source=1)], whole, [whole[0], []])


def test_what_no_rank_holds_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no rank holds 'a' \(2,\) at \(2,\)"):
        find_moves([[Area("a", (0,), (2,))]], [[Area("a", (0,), (4,))]], [0])


def test_equally_near_holders_share_the_work() -> None:
    """Four replicas hold 8 tensors; of four new ranks each wants two of them."""
    names = [f"t{n}" for n in range(8)]
    held = [[Area(name, (0,), (10,)) for name in names] for _ in range(4)] + [[]] * 4
    wanted = [[]] * 4 + [[Area(n, (0,), (10,)) for n in names[i : i + 2]] for i in (0, 2, 4, 6)]
    sent = [0] * 8
    for move in find_moves(held, wanted, [0] * 8):
        sent[move.source] += move.numel
    assert sent == [20, 20, 20, 20, 0, 0, 0, 0]


@given(shapes, st.integers(1, 30))
def test_a_split_rectangle_is_whole_and_small(shape: tuple[int, ...], most: int) -> None:
    found = list(split((tuple(0 for _ in shape), shape), most))
    assert miscounted(shape, found) is None
    assert all(prod(extent) <= most for _, extent in found)


@given(shapes, seeds)
def test_a_rectangle_without_its_part_is_the_rest(shape: tuple[int, ...], seed: int) -> None:
    draw = random.Random(seed)
    hole = draw.choice([t for t in tiles(shape, draw) if prod(t[1])])
    rest = list(without((tuple(0 for _ in shape), shape), hole))
    assert miscounted(shape, [hole, *rest]) is None
    assert len(rest) <= 2 * len(shape)
