"""Which ranks are named as slow, from invented times."""

from __future__ import annotations

import random

from megalite.mesh_shape import MeshShape
from megalite.resilience.stragglers import LOOKS, Passes, Straggler, Stragglers


def look(watch: Stragglers, times: list[float]) -> list[Straggler]:
    return watch.look([Passes(t, 2 * t) for t in times])


def test_a_rank_slower_than_its_replicas_is_named_once_after_a_few_looks() -> None:
    watch = Stragglers(MeshShape(pp=2, dp=4))
    even = [1.0] * 4 + [2.0] * 4  # the second stage has more to do
    slow = [*even[:5], 3.2, *even[6:]]
    told = [look(watch, slow) for _ in range(10)]
    assert [len(t) for t in told] == [0] * (LOOKS - 1) + [1] + [0] * (10 - LOOKS)
    (found,) = told[LOOKS - 1]
    assert found.rank == 5 and "its replicas" in found.text and "pp 1" in found.text
    assert look(watch, even) == []
    assert [len(look(watch, slow)) for _ in range(LOOKS)] == [0] * (LOOKS - 1) + [1]


def test_a_rank_without_replicas_is_compared_with_its_own_past() -> None:
    watch = Stragglers(MeshShape(pp=4))
    uneven = [1.0, 3.0, 1.0, 0.5]
    assert not any(look(watch, uneven) for _ in range(5))
    slow = [1.0, 3.0, 2.0, 0.5]
    told = [look(watch, slow) for _ in range(LOOKS)]
    assert [[s.rank for s in t] for t in told] == [[]] * (LOOKS - 1) + [[2]]


def test_a_machine_that_is_slow_as_a_whole_has_no_straggler() -> None:
    watch = Stragglers(MeshShape(pp=4, dp=2))
    assert not any(look(watch, [1.0] * 8) for _ in range(5))
    assert not any(look(watch, [4.0] * 8) for _ in range(5))


def test_noise_and_single_slow_steps_are_not_named() -> None:
    draw = random.Random(7)
    watch = Stragglers(MeshShape(pp=2, dp=2, tp=2))
    for n in range(200):
        times = [draw.uniform(0.9, 1.15) for _ in range(8)]
        if n % 3:
            times[n % 8] *= 3
        assert not look(watch, times)


def test_steps_that_were_not_traced_say_nothing() -> None:
    watch = Stragglers(MeshShape(dp=2))
    assert not any(look(watch, [0.0, 0.0]) for _ in range(5))


def test_a_slow_tp_group_is_named_with_all_of_its_ranks() -> None:
    watch = Stragglers(MeshShape(tp=2, dp=2))
    told = [look(watch, [1.0, 1.0, 2.0, 2.0]) for _ in range(LOOKS)]
    assert [s.rank for s in told[-1]] == [2, 3] and "tp group" in told[-1][0].text
