"""The main test: any layout takes the same steps as one process, in fp64.

Every layout of the matrix is run by ``make test-all``, and one of its parts, another each day, by
``make test``. ``-k turn2`` runs a part on any day; so does ``MEGALITE_PARITY_TURN=2``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parity import matrix
from tests.parity.groups import few_steps, wrong
from tests.parity.matrix import FIELDS, TURN, TURNS, Case, grouped, legal, part, todays_turn, traits


def parts_of_matrix(most: int = 6, every: int = 1) -> list[Any]:
    """Groups of layouts; those of the other days, and of the day's all but ``every`` so many, are
    only in the full matrix."""
    found = []
    for turn in range(TURNS):
        numbers: Counter[int] = Counter()
        for nth, group in enumerate(grouped(part(turn), most)):
            todays = turn == todays_turn() and nth % every == 0
            marks = [] if todays else [pytest.mark.full]
            ranks = group[0].ranks
            name = f"turn{turn}-{ranks}ranks-{numbers[ranks]}"
            numbers[ranks] += 1
            found.append(pytest.param(group, marks=marks, id=name))
    return found


@pytest.mark.parametrize("cases", parts_of_matrix())
def test_layouts_take_the_steps_of_one_process(cases: tuple[Case, ...]) -> None:
    print(f"today's part: {TURN}={todays_turn()}; here are {len(cases)} layouts")
    assert not (found := wrong(cases)), "\n".join(found)


@pytest.mark.parametrize("cases", parts_of_matrix(every=2))
def test_layouts_keep_the_rules_of_nccl(cases: tuple[Case, ...]) -> None:
    """Where gloo's leniency ends: a transport and a device with NCCL's rules."""
    assert not (found := wrong(cases, "nccl_rules", few_steps)), "\n".join(found)


@st.composite
def further(draw: st.DrawFn) -> Case:
    """A legal layout of few ranks."""
    fitting = [s for s in matrix.shapes() if s["tp"] * s["pp"] * s["dp"] in (2, 3, 4)]
    rest = {name: draw(st.sampled_from(values)) for name, values in FIELDS.items()}
    case = Case(**{**rest, **draw(st.sampled_from(fitting))})
    return case if legal(case) else replace(case, batch="ragged")


@settings(max_examples=4)
@given(further())
def test_a_layout_that_nobody_listed_takes_the_steps_of_one_process(case: Case) -> None:
    assert legal(case)
    assert not (found := wrong([case])), "\n".join(found)


@pytest.mark.full
@settings(max_examples=30, derandomize=False)
@given(further())
def test_many_layouts_that_nobody_listed_do(case: Case) -> None:
    assert not (found := wrong([case])), "\n".join(found)


def test_the_matrix_is_large_and_covers_every_pair_that_is_possible() -> None:
    cases = matrix.matrix()
    print(matrix.table())
    assert len(cases) >= 120
    assert all(legal(case) for case in cases)
    assert all(len(part(turn)) >= 30 for turn in range(TURNS))
    assert sum(len(traits(case)) >= 3 for case in cases) >= len(cases) / 2
    covered = {pair for case in cases for pair in matrix.pairs(case)}
    missing = [p for p in matrix.all_pairs() if not matrix.why_not(**dict(p)) and p not in covered]
    assert not missing
    barred = [p for p in matrix.all_pairs() if matrix.why_not(**dict(p))]
    assert barred and not covered & set(barred)
    assert {c.vocab_size for c in cases if c.tp == 4} == {65, 257}


@pytest.mark.parametrize("change", [{"schedule": "zb_v"}, {"tp": 3}, {"partition": (1, 2)}])
def test_what_is_not_legal_is_not_drawn(change: dict[str, Any]) -> None:
    """The rules are those of the engine, not only the matrix's own."""
    assert legal(Case(pp=2))
    assert not legal(replace(Case(pp=2), **change))
