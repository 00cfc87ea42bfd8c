from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.errors import ConfigError
from megalite.schedule.placement import place_layers, place_stages


def counts(found: tuple[range, ...]) -> list[int]:
    return [len(layers) for layers in found]


def all_counts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut, empty stages included."""
    for head in product(range(layers + 1), repeat=stages - 1):
        if sum(head) <= layers:
            yield (*head, layers - sum(head))


def ranges(counts: Sequence[int]) -> tuple[range, ...]:
    ends = list(accumulate(counts))
    return tuple(range(e - c, e) for c, e in zip(counts, ends, strict=True))


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
    st.lists(st.floats(0, 10), min_size=1, max_size=7),
    st.integers(1, 4),
    st.floats(0, 10),
    st.floats(0, 10),
)
def test_no_cut_has_a_cheaper_dearest_stage_than_balanced(
    costs: list[float], stages: int, first: float, last: float
) -> None:
    def dearest(found: tuple[range, ...]) -> float:
        sums = [sum(costs[i] for i in layers) for layers in found]
        sums[0] += first
        sums[-1] += last
        return max(sums)

    cuts = map(ranges, all_counts(len(costs), stages))
    best = place_layers(costs, stages, first_extra=first, last_extra=last, mode="balanced")
    assert dearest(best) == pytest.approx(min(map(dearest, cuts)))


def test_balanced_takes_layers_from_dear_ends_and_uniform_does_not_know() -> None:
    costs = [1.0] * 16
    assert counts(place_layers(costs, 4, last_extra=3.0, mode="balanced")) == [5, 5, 5, 1]
    assert counts(place_layers(costs, 4, last_extra=3.0)) == [4, 4, 4, 4]


def test_dear_ends_can_have_a_stage_of_their_own() -> None:
    found = place_layers([1.0] * 4, 4, first_extra=2.0, last_extra=5.0, mode="balanced")
    assert counts(found) == [0, 2, 2, 0]
    assert found == (range(0, 0), range(0, 2), range(2, 4), range(4, 4))
    found = place_layers([1.0] * 2, 4, first_extra=1.0, last_extra=1.0, mode="balanced")
    assert counts(found) == [0, 1, 1, 0]


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 8),
    st.sampled_from([(0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 2), (0, 0, 0)]),
    st.sampled_from([0.0, 0.5, 1.75, 4.0]),
    st.sampled_from([0.0, 0.25, 3.0, 9.0]),
)
def test_equal_layers_over_several_stages_a_rank_make_the_dearest_rank_cheapest(
    layers: int, rank_of: tuple[int, ...], first: float, last: float
) -> None:
    def loads(counts: Sequence[int]) -> tuple[list[float], list[float]]:
        """The cost of each rank and of each stage, the dearest first."""
        stages = [float(c) for c in counts]
        stages[0] += first
        stages[-1] += last
        by_rank: Counter[int] = Counter()
        for rank, cost in zip(rank_of, stages, strict=True):
            by_rank[rank] += cost  # type: ignore[assignment]
        return sorted(by_rank.values(), reverse=True), sorted(stages, reverse=True)

    found = place_layers(
        [1.0] * layers,
        len(rank_of),
        first_extra=first,
        last_extra=last,
        mode="balanced",
        rank_of=rank_of,
    )
    assert list(chain.from_iterable(found)) == list(range(layers))
    got = counts(found)
    totals = Counter(r for r, c in zip(rank_of, got, strict=True) for _ in range(c))
    ways = list(all_counts(layers, len(rank_of)))
    assert loads(got)[0] == min(loads(way)[0] for way in ways)
    alike = [
        way
        for way in ways
        if Counter(r for r, c in zip(rank_of, way, strict=True) for _ in range(c)) == totals
    ]
    assert loads(got)[1][0] == min(loads(way)[1][0] for way in alike)


def test_ranks_count_before_stages() -> None:
    cuts = {"first_extra": 0.0, "last_extra": 3.0, "mode": "balanced"}
    looped = place_layers([1.0] * 9, 4, rank_of=(0, 1, 0, 1), **cuts)  # type: ignore[arg-type]
    assert counts(looped) == [3, 3, 3, 0]  # ranks cost 6 and 6
    alone = place_layers([1.0] * 9, 4, **cuts)  # type: ignore[arg-type]
    assert counts(alone) == [3, 3, 3, 0] and counts(place_layers([1.0] * 8, 4)) == [2, 2, 2, 2]
    there_and_back = place_layers([1.0] * 9, 4, rank_of=(0, 1, 1, 0), **cuts)  # type: ignore[arg-type]
    assert counts(there_and_back) == [3, 3, 3, 0]


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
        ([3, 3], r"\[3, 3\] sums to 6 .* Give 2 counts of at least 0 that sum to 7"),
        ([6, 0], r"sums to 6 .* at least 0 that sum to 7"),
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


def test_a_listed_stage_may_be_empty() -> None:
    assert counts(place_layers([1.0] * 7, 4, mode=[0, 4, 0, 3])) == [0, 4, 0, 3]
    assert counts(place_layers([1.0] * 2, 3, mode=[2, 0, 0])) == [2, 0, 0]


def test_fewer_layers_than_uniform_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 layers cannot fill 4 stages.*at most 3 stages, or"):
        place_layers([1.0] * 3, 4)
