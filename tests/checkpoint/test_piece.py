from __future__ import annotations

import random
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.checkpoint.piece import (
    copy_overlap,
    inside,
    miscounted,
    overlap,
    view,
)
from megalite.slices import Rectangle
from tests.checkpoint.jobs import count, cut

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)
seeds = st.integers(0, 2**32)


@st.composite
def rectangle_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Rectangle:
    offset = tuple(draw(st.integers(0, size)) for size in shape)
    return offset, tuple(draw(st.integers(0, s - o)) for s, o in zip(shape, offset, strict=True))


@st.composite
def shape_and_rectangles(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Rectangle]]:
    shape = draw(shapes)
    return shape, draw(st.lists(rectangle_in(shape), max_size=5))


@given(shapes, seeds, st.integers(0, 9), st.integers(0, 9))
@settings(deadline=None)
def test_one_cut_of_a_tensor_is_reassembled_from_any_other(
    shape: tuple[int, ...], seed: int, num_stored: int, num_wanted: int
) -> None:
    rng = random.Random(seed)
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    origin = tuple(0 for _ in shape)
    stored = [(r[0], view(tensor, origin, r).clone()) for r in cut(shape, num_stored, rng)]
    got = torch.full(shape, torch.nan)
    copied = 0
    for rectangle in cut(shape, num_wanted, rng):
        wanted = view(got, origin, rectangle)
        copied += sum(copy_overlap(wanted, rectangle[0], part, at) for at, part in stored)
    assert torch.equal(got, tensor)
    assert copied == tensor.numel()


def test_an_element_that_no_chunk_holds_is_not_filled() -> None:
    got = torch.full((4,), torch.nan)
    assert copy_overlap(got, (0,), torch.ones(3), (1,)) == 3
    assert got[0].isnan() and not got[1:].isnan().any()


@given(shape_and_rectangles())
@settings(deadline=None)
def test_the_overlap_of_two_rectangles_is_what_both_cover(
    drawn: tuple[tuple[int, ...], list[Rectangle]],
) -> None:
    shape, drawn_rectangles = drawn
    for a, b in zip(drawn_rectangles, drawn_rectangles[1:], strict=False):
        common = overlap(a, b)
        both = count(shape, [a]) * count(shape, [b])
        assert torch.equal(count(shape, [common] if common else []), both)
        assert (common is None) == (not both.any()), "an empty overlap is none"


@given(shape_and_rectangles())
@settings(deadline=None, max_examples=300)
def test_the_first_miscounted_element_is_that_of_a_count_by_element(
    drawn: tuple[tuple[int, ...], list[Rectangle]],
) -> None:
    shape, drawn_rectangles = drawn
    times = count(shape, drawn_rectangles)
    wrong = [tuple(at) for at in (times != 1).nonzero().tolist()]
    expected = (wrong[0], int(times[wrong[0]])) if wrong else None
    assert miscounted(shape, drawn_rectangles) == expected


@given(shapes, seeds, st.integers(0, 20))
@settings(deadline=None)
def test_a_random_cut_tiles_and_a_cut_with_a_part_dropped_or_doubled_does_not(
    shape: tuple[int, ...], seed: int, num_cuts: int
) -> None:
    rng = random.Random(seed)
    parts = cut(shape, num_cuts, rng)
    assert miscounted(shape, parts) is None
    solid = rng.choice([p for p in parts if prod(p[1])])
    gap = miscounted(shape, [p for p in parts if p is not solid])
    assert gap == (solid[0], 0)
    assert miscounted(shape, [*parts, solid]) == (solid[0], 2)


def test_a_gap_and_an_overlap_of_equal_size_do_not_cancel() -> None:
    assert miscounted((4,), [((0,), (2,)), ((1,), (2,))]) == ((1,), 2)


def test_many_chunks_are_counted_in_linear_time() -> None:
    # 40,000 cells: comparing all pairs would be 800 million comparisons
    cells = [((i, j), (1, 1)) for i in range(200) for j in range(200)]
    assert miscounted((200, 200), cells) is None
    assert miscounted((200, 200), cells[:-1]) == ((199, 199), 0)


@pytest.mark.parametrize(
    ("offset", "extent", "expected"),
    [
        ((0, 0), (2, 3), True),
        ((2, 3), (0, 0), True),
        ((1, 0), (2, 3), False),
        ((-1, 0), (1, 1), False),
        ((0, 0), (-1, 1), False),
        ((0,), (2,), False),
    ],
)
def test_a_rectangle_is_inside_only_with_all_its_sides(
    offset: tuple[int, ...], extent: tuple[int, ...], expected: bool
) -> None:
    assert inside((2, 3), offset, extent) is expected
