from __future__ import annotations

from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.errors import ConfigError
from megalite.schedule.placement import place_layers, place_stages


def counts(found: tuple[range, ...]) -> list[int]:
    return [len(layers) for layers in found]


def test_loop_goes_round_and_v_there_and_back() -> None:
    assert place_stages("loop", 3, 2) == (0, 1, 2, 0, 1, 2)
    assert place_stages("v", 3, 2) == (0, 1, 2, 2, 1, 0)


@given(st.integers(1, 12), st.integers(0, 40), st.sampled_from(["uniform", "balanced"]))
def test_every_layer_lies_in_one_stage_and_in_order(stages: int, more: int, mode: str) -> None:
    found = place_layers([1.0] * (stages + more), stages, mode=mode)
    assert list(chain.from_iterable(found)) == list(range(stages + more))
    assert len(found) == stages and min(counts(found)) >= 1
    assert max(counts(found)) - min(counts(found)) <= 1


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (8, 4, [2, 2, 2, 2]),
        (9, 4, [2, 2, 3, 2]),
        (30, 4, [7, 8, 8, 7]),
        (11, 4, [3, 3, 3, 2]),
        (7, 2, [4, 3]),
        (10, 6, [1, 2, 2, 2, 2, 1]),
        (14, 8, [1, 2, 2, 2, 2, 2, 2, 1]),
        (11, 8, [1, 1, 2, 1, 2, 1, 2, 1]),
        (5, 1, [5]),
    ],
)
def test_a_surplus_goes_to_stages_without_embedding_and_head(
    layers: int, stages: int, expected: list[int]
) -> None:
    assert counts(place_layers([1.0] * layers, stages)) == expected


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=9),
    st.integers(1, 5),
    st.floats(0, 10),
    st.floats(0, 10),
)
def test_no_cut_has_a_cheaper_dearest_stage_than_balanced(
    costs: list[float], stages: int, first: float, last: float
) -> None:
    stages = min(stages, len(costs))

    def dearest(found: tuple[range, ...]) -> float:
        sums = [sum(costs[i] for i in layers) for layers in found]
        sums[0] += first
        sums[-1] += last
        return max(sums)

    cuts = (
        tuple(range(a, b) for a, b in zip((0, *inner), (*inner, len(costs)), strict=True))
        for inner in combinations(range(1, len(costs)), stages - 1)
    )
    best = place_layers(costs, stages, first_extra=first, last_extra=last, mode="balanced")
    assert dearest(best) == pytest.approx(min(map(dearest, cuts)))


def test_balanced_takes_layers_from_dear_ends_and_uniform_does_not_know() -> None:
    costs = [1.0] * 16
    assert counts(place_layers(costs, 4, last_extra=3.0, mode="balanced")) == [5, 5, 5, 1]
    assert counts(place_layers(costs, 4, last_extra=3.0)) == [4, 4, 4, 4]


def test_the_dearest_stage_counts_before_the_sum_of_squares() -> None:
    # [1, 1, 2] costs 1, 5, 5; [2, 1, 1] costs 6, 2, 3, which has the lesser sum of squares.
    assert counts(place_layers([1.0, 5.0, 2.0, 3.0], 3, mode="balanced")) == [1, 1, 2]


def test_a_list_gives_each_stage_its_count() -> None:
    assert place_layers([1.0] * 7, 4, mode=[2, 1, 2, 2]) == (
        range(0, 2),
        range(2, 3),
        range(3, 5),
        range(5, 7),
    )


@pytest.mark.parametrize(
    ("mode", "match"),
    [
        ([3, 3], r"\[3, 3\] sums to 6 .* Give 2 counts of at least 1 that sum to 7"),
        ([7, 0], r"least count is 0.* at least 1 that sum to 7"),
        ([8, -1], r"least count is -1"),
        ([3, 3, 1], r"3 counts for 2 stages"),
        ("even", r"unknown mode 'even'.* uniform, balanced"),
    ],
)
def test_a_partition_that_does_not_fit_is_refused_with_the_total(
    mode: str | list[int], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        place_layers([1.0] * 7, 2, mode=mode)


@pytest.mark.parametrize("mode", ["uniform", "balanced", [1, 1, 1, 1]])
def test_fewer_layers_than_stages_are_refused(mode: str | list[int]) -> None:
    with pytest.raises(ConfigError, match="3 layers cannot fill 4 stages.*at most 3"):
        place_layers([1.0] * 3, 4, mode=mode)
