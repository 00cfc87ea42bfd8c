"""The negative controls of the matrix: every planted fault is seen, and none without a fault."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parity import faults
from tests.parity.harness import Fault
from tests.parity.matrix import TURN, TURNS, Case, legal, todays_turn
from tests.parity.planted import FAULTS, SEEN, Sight, look

Planted = tuple[Fault, Case]


def grouped(chosen: list[Planted], most: int = 5) -> Iterator[list[Planted]]:
    for ranks in sorted({case.ranks for _, case in chosen}):
        same = [(fault, case) for fault, case in chosen if case.ranks == ranks]
        yield from (same[i : i + most] for i in range(0, len(same), most))


def see_all(chosen: list[Planted]) -> list[Sight]:
    sights = [sight for group in grouped(chosen) for sight in look(group)]
    print("\n".join(["", *map(str, sights)]))
    return sights


def check(sights: list[Sight]) -> None:
    unseen = [f"{s.fault} moved {s.figure} by {s.size:.1e} only" for s in sights if s.times <= SEEN]
    assert not unseen, "\n".join(unseen)
    assert not [f"{s.case} is wrong without {s.fault}" for s in sights if s.clean > 1]


def test_planted_faults_of_the_day_are_seen() -> None:
    print(f"{TURN}={todays_turn()}")
    check(see_all(FAULTS[todays_turn() :: 2 * TURNS]))


@pytest.mark.full
def test_every_planted_fault_is_seen() -> None:
    """Prints, fault by fault, the layout and the figure that showed it."""
    check(see_all(FAULTS))


def does_nothing(training: object) -> None:
    """No fault at all."""


def test_a_fault_that_changes_nothing_does_not_pass() -> None:
    sights = look([(does_nothing, Case(dp=2))])
    with pytest.raises(AssertionError, match="does_nothing moved"):
        check(sights)


def test_the_list_of_faults_is_long_and_complete() -> None:
    assert len(FAULTS) >= 25
    assert len({fault for fault, _ in FAULTS}) == len(FAULTS)
    assert all(legal(case) for _, case in FAULTS)
    public = {n for n, f in vars(faults).items() if getattr(f, "__module__", "") == faults.__name__}
    public = {n for n in public if not n.startswith("_") and n != "undo"}
    assert public == {fault.__name__ for fault, _ in FAULTS}
