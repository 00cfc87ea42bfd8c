from __future__ import annotations

import subprocess
import sys
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.mesh_shape import AXES, MeshShape

shapes = st.builds(
    MeshShape,
    tp=st.integers(1, 5),
    pp=st.integers(1, 5),
    dp=st.integers(1, 5),
    order=st.sampled_from(list(permutations(AXES))),
)

# tp 2 x pp 2 x dp 2 as (pp, dp, tp) of each rank.
PP_DP_TP = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]
DP_PP_TP = [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1), (0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 1, 1)]
TP_DP_PP = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1)]


@pytest.mark.parametrize(
    ("order", "table"),
    [
        (("pp", "dp", "tp"), PP_DP_TP),
        (("dp", "pp", "tp"), DP_PP_TP),
        (("tp", "dp", "pp"), TP_DP_PP),
    ],
)
def test_ranks_follow_the_order_of_axes(
    order: tuple[str, ...], table: list[tuple[int, int, int]]
) -> None:
    shape = MeshShape(tp=2, pp=2, dp=2, order=order)
    for rank, (pp, dp, tp) in enumerate(table):
        assert shape.coords(rank) == {"pp": pp, "dp": dp, "tp": tp}
        assert shape.rank({"pp": pp, "dp": dp, "tp": tp}) == rank


def test_by_default_tp_ranks_are_neighbours_and_pipeline_ranks_are_far_apart() -> None:
    shape = MeshShape(tp=2, pp=2, dp=3)
    assert shape.world_size == 12
    assert shape.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11)]
    assert shape.groups("dp") == [(0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11)]
    assert shape.groups("pp") == [(0, 6), (1, 7), (2, 8), (3, 9), (4, 10), (5, 11)]


def test_another_order_gives_other_neighbours() -> None:
    shape = MeshShape(tp=2, pp=3, dp=2, order=("tp", "dp", "pp"))
    assert shape.groups("pp") == [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)]
    assert shape.groups("dp") == [(0, 3), (1, 4), (2, 5), (6, 9), (7, 10), (8, 11)]
    assert shape.groups("tp") == [(0, 6), (1, 7), (2, 8), (3, 9), (4, 10), (5, 11)]


def test_an_axis_of_size_1_has_a_group_for_every_rank() -> None:
    shape = MeshShape(dp=3)
    assert shape.groups("tp") == shape.groups("pp") == [(0,), (1,), (2,)]
    assert shape.groups("dp") == [(0, 1, 2)]


@given(shapes)
def test_coordinates_and_ranks_are_inverse(shape: MeshShape) -> None:
    for rank in range(shape.world_size):
        at = shape.coords(rank)
        assert shape.rank(at) == rank
        assert all(0 <= at[axis] < shape.size(axis) for axis in AXES)


@given(shapes, st.sampled_from(AXES))
def test_the_groups_of_an_axis_partition_the_world(shape: MeshShape, axis: str) -> None:
    groups = shape.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(shape.world_size))
    for group in groups:
        places = [shape.coords(rank) for rank in group]
        assert [place.pop(axis) for place in places] == list(range(shape.size(axis)))
        assert all(place == places[0] for place in places)


@given(shapes)
def test_two_axes_meet_in_one_rank(shape: MeshShape) -> None:
    for a in shape.groups("tp"):
        for b in shape.groups("dp"):
            assert len(set(a) & set(b)) <= 1


def test_the_table_has_a_line_a_rank() -> None:
    assert MeshShape(tp=2, pp=2).table() == (
        "tp 2 x pp 2 x dp 1 ranks by pp, dp, tp (slowest first)\n"
        "rank  pp  dp  tp\n"
        "   0   0   0   0\n"
        "   1   0   0   1\n"
        "   2   1   0   0\n"
        "   3   1   0   1"
    )


@pytest.mark.parametrize("order", [("pp", "dp"), ("pp", "dp", "dp"), ("pp", "dp", "cp")])
def test_an_order_that_is_no_order_of_the_axes_is_refused(order: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="must name each of"):
        MeshShape(order=order)


@pytest.mark.parametrize("sizes", [{"tp": 0}, {"pp": -1}, {"dp": 0}])
def test_a_size_below_1_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        MeshShape(**sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is not in a world of 4"):
        MeshShape(tp=4).coords(rank)


def test_shapes_need_no_torch() -> None:
    code = "import sys, megalite.mesh_shape; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
