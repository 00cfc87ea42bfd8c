"""Runs of flat memory as rectangles of global tensors."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megalite.checkpoint.piece import view
from megalite.slices import Piece, Slice, flat_pieces, rectangles, set_slice
from tests.checkpoint.jobs import count

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)


@given(st.data(), shapes)
@settings(deadline=None)
def test_a_flat_range_is_its_rectangles_one_after_the_other(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    numel = prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    tensor = torch.arange(numel).reshape(shape)
    found = rectangles(shape, start, stop)
    parts = [view(tensor, tuple(0 for _ in shape), r).reshape(-1) for r in found]
    flat = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
    assert flat.tolist() == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert all(prod(extent) for _, extent in found)


def test_a_flat_range_of_a_matrix_is_two_part_rows_around_whole_rows() -> None:
    assert rectangles((5, 4), 3, 14) == [((0, 3), (1, 1)), ((1, 0), (2, 4)), ((3, 0), (1, 2))]
    assert rectangles((5, 4), 4, 12) == [((1, 0), (2, 4))]
    assert rectangles((5, 4), 5, 7) == [((1, 1), (1, 2))]
    assert rectangles((), 0, 1) == [((), ())]
    assert rectangles((0, 4), 0, 0) == []


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 21)])
def test_a_range_outside_the_tensor_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="is not a range of a tensor of shape"):
        rectangles((5, 4), start, stop)


@st.composite
def padded_parameters(draw: st.DrawFn) -> nn.Parameter:
    """A parameter whose elements are their own places, somewhere in a global tensor; a rectangle
    of it exists there, the rest is padding."""
    local = draw(shapes)
    extent = tuple(draw(st.integers(0, n)) for n in local)
    offset = tuple(draw(st.integers(0, 3)) for _ in local)
    room = [o + e + draw(st.integers(0, 2)) for o, e in zip(offset, extent, strict=True)]
    at = Slice("w", tuple(room), offset, extent)
    return set_slice(nn.Parameter(torch.arange(prod(local), dtype=torch.float64).view(local)), at)


def runs(param: nn.Parameter, stops: list[int]) -> list[tuple[int, Tensor]]:
    """Its elements in row-major order, cut at ``stops``: start and memory of each run."""
    ends = sorted({0, *(min(s, param.numel()) for s in stops), param.numel()})
    flat = param.detach().reshape(-1)
    return [(a, flat[a:b]) for a, b in zip(ends, ends[1:], strict=False)]


def covered(param: nn.Parameter, found: list[Piece]) -> Tensor:
    """How often each element of the global tensor is in a piece."""
    at = param.slice  # type: ignore[attr-defined]
    return count(at.shape, [(p.offset, tuple(p.tensor.shape)) for p in found])


@given(padded_parameters(), st.lists(st.integers(0, 216), max_size=5))
@settings(deadline=None, max_examples=300)
def test_runs_of_a_parameter_hold_each_element_that_exists_once(
    param: nn.Parameter, stops: list[int]
) -> None:
    at = param.slice  # type: ignore[attr-defined]
    origin = tuple(0 for _ in at.shape)
    parts = [list(flat_pieces(param, flat, start, "x.")) for start, flat in runs(param, stops)]
    found = [piece for part in parts for piece in part]
    expected = torch.zeros(at.shape, dtype=torch.int64)
    view(expected, origin, (at.offset, at.extent)).fill_(1)
    assert torch.equal(covered(param, found), expected)
    for piece in found:
        assert (piece.name, piece.shape) == ("x.w", at.shape)
        local = tuple(o - a for o, a in zip(piece.offset, at.offset, strict=True))
        assert torch.equal(piece.tensor, view(param, origin, (local, tuple(piece.tensor.shape))))
        assert piece.tensor.untyped_storage().data_ptr() == param.untyped_storage().data_ptr()
    if found:  # a piece less or one twice would be seen
        assert not torch.equal(covered(param, found[1:]), expected)
        assert not torch.equal(covered(param, [*found, found[0]]), expected)
        assert max(map(len, parts)) <= max(1, 2 * len(at.shape) - 1)


def test_a_run_across_padded_rows_and_columns_leaves_them_out() -> None:
    param = nn.Parameter(torch.arange(20.0).view(4, 5))
    set_slice(param, Slice("w", (9, 9), (6, 2), (3, 4)))
    found = [
        (p.offset, p.tensor.tolist()) for p in flat_pieces(param, param.detach().view(-1)[3:18], 3)
    ]
    assert found == [
        ((6, 5), [[3.0]]),
        ((7, 2), [[5.0, 6.0, 7.0, 8.0], [10.0, 11.0, 12.0, 13.0]]),
    ]
    assert not list(flat_pieces(param, param.detach().view(-1)[4:5], 4)), "only padding"
