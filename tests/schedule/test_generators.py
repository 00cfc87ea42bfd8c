from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.errors import ConfigError
from megalite.schedule import search
from megalite.schedule.action import Action, Op, Plan
from megalite.schedule.costs import Costs
from megalite.schedule.generators import SCHEDULES, build_schedule, forward_only
from megalite.schedule.lower import lower
from megalite.schedule.placement import place_stages
from megalite.schedule.render import render_text
from megalite.schedule.simulate import Timeline, simulate, simulate_step
from megalite.schedule.validate import validate

GOLDEN = Path(__file__).parents[1] / "golden" / "schedules"


def unit_times(plan: Plan) -> Timeline:
    """F = I = W = 1 for a rank's whole share of a microbatch."""
    share = [1 / len(plan.stages_of(rank)) for rank in plan.rank_of]
    return simulate(lower(plan), share, share, share)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda p: p.stem)
def test_a_schedule_reads_as_its_golden_text(path: Path) -> None:
    name, pp, microbatches, virtual_stages, what = path.stem.split("-")
    plan = build_schedule(name, int(pp[1:]), int(microbatches[1:]), int(virtual_stages[1:]))
    shown = lower(plan) if what == "messages" else plan
    assert render_text(shown) + "\n" == path.read_text()


def test_every_schedule_has_a_golden_text() -> None:
    assert set(SCHEDULES) == {path.stem.split("-")[0] for path in GOLDEN.glob("*.txt")}


# At pp 4, 16 microbatches, where 48 is ideal.
@pytest.mark.parametrize(
    ("name", "virtual_stages", "makespan", "span_bubble", "peak"),
    [
        ("naive", 1, 192, 0.75, (1, 1, 1, 1)),
        ("gpipe", 1, 57, 9 / 57, (16, 16, 16, 16)),
        ("1f1b", 1, 57, 9 / 57, (4, 3, 2, 1)),
        ("interleaved_1f1b", 2, 52.5, 4.5 / 52.5, (5.5, 4.5, 3.5, 2.5)),
        ("interleaved_1f1b", 3, 51, 3 / 51, (5, 13 / 3, 11 / 3, 3)),
        ("interleaved_1f1b", 4, 50.25, 2.25 / 50.25, (4.75, 4.25, 3.75, 3.25)),
        ("looped_bfs", 2, 52.5, 4.5 / 52.5, (16, 16, 16, 16)),
        ("looped_bfs", 3, 51, 3 / 51, (16, 16, 16, 16)),
        ("zb_h1", 1, 51, 3 / 51, (4, 4, 4, 4)),
        ("zb_h2", 1, 51, 0, (7, 7, 7, 7)),
        ("zb_v", 2, 49.5, 0, (4, 4, 4, 4)),
        ("v_half", 2, 50.5, 2.5 / 50.5, (3, 3, 3, 3)),
        ("v_min", 2, 53.5, 5.5 / 53.5, (2, 2, 2, 2)),
        ("dualpipe_v", 2, 49.5, 1.5 / 49.5, (4.5, 4.5, 4.5, 4.5)),
    ],
)
def test_makespan_and_peak_are_the_papers(
    name: str, virtual_stages: int, makespan: float, span_bubble: float, peak: tuple[float, ...]
) -> None:
    plan = build_schedule(name, 4, 16, virtual_stages)
    timeline = unit_times(plan)
    assert timeline.makespan == pytest.approx(makespan, abs=1e-9)
    assert timeline.bubble_fraction == pytest.approx(1 - 48 / makespan, abs=1e-9)
    assert timeline.span_bubble_fraction == pytest.approx(span_bubble, abs=1e-9)
    assert validate(lower(plan)).peak_in_flight == pytest.approx(peak)


def test_one_action_for_f_and_b_loses_what_dualpipes_own_formula_says() -> None:
    plan = build_schedule("dualpipe_v", 4, 16, 2)
    whole = plan.replace(
        (
            a if a.op is Op.FORWARD else Action(Op.BACKWARD, a.stage, a.microbatch)
            for a in actions
            if a.op is not Op.WEIGHT_GRAD
        )
        for actions in plan.actions
    )
    assert unit_times(whole).makespan > unit_times(plan).makespan


# (from how many microbatches on, lost time at most, microbatches in flight at most) by p, m, v
Formula = Callable[[int, int, int], tuple[int, float, float]]
FORMULAS: dict[str, Formula] = {
    "naive": lambda p, m, v: (1, 3 * m * (p - 1), 1),
    "gpipe": lambda p, m, v: (1, 3 * (p - 1), m),
    "1f1b": lambda p, m, v: (1, 3 * (p - 1), p),
    "interleaved_1f1b": lambda p, m, v: (p, 3 * (p - 1) / v, interleaved_peak(p, m, v)),
    "looped_bfs": lambda p, m, v: (p, 3 * (p - 1) / v, m),
    "zb_h1": lambda p, m, v: (p, p - 1, p),
    "zb_h2": lambda p, m, v: (2 * p - 1, p - 1, 2 * p - 1),
    "zb_v": lambda p, m, v: (2 * p - 1, (p - 1) / 2, p),
    "v_half": lambda p, m, v: (6, 1.5 * (p - 1), (p + 2) // 2),
    "v_min": lambda p, m, v: (2, 2 * (p - 1), (p + 4) // 3),
    "dualpipe_v": lambda p, m, v: (2 * p, (p - 1) / 2, p + 0.5),
}
NAMED = sorted(FORMULAS)


def interleaved_peak(p: int, m: int, v: int) -> float:
    """The warm-up of rank 0 and one more; the first group has the microbatches left over."""
    first = p + m % p
    return p if v == 1 else (2 * (p - 1) + (v - 1) * first + 1) / v


def prove(name: str, pp: int, num_microbatches: int, virtual_stages: int) -> None:
    """Checks the plan, and its time and memory where there is a formula for them."""
    plan = build_schedule(name, pp, num_microbatches, virtual_stages)
    lowered = lower(plan)
    report = validate(lowered)
    assert max(max(peaks.values(), default=0) for peaks in report.peak_receives) <= 2
    if name not in FORMULAS:
        return
    start, lost, peak = FORMULAS[name](pp, num_microbatches, virtual_stages)
    assert max(report.peak_in_flight) <= peak + 1e-9
    if num_microbatches >= start:
        timeline = simulate_step(lowered, Costs.equal(pp, virtual_stages))
        assert timeline.makespan <= 3 * num_microbatches + lost + 1e-6


@pytest.fixture
def little_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that stops after a few plans, on few limits of memory."""
    monkeypatch.setattr(search, "EFFORT", 2_000)
    monkeypatch.setattr(search, "_EVERY", 8)
    monkeypatch.setattr(search, "_FINE", 2.0)
    monkeypatch.setattr(search, "_COARSE", 4.0)


def test_every_schedule_has_a_formula_or_is_searched_for() -> None:
    assert set(SCHEDULES) == {*FORMULAS, "auto"}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_is_proven_for_some_counts(name: str, little_effort: None) -> None:
    """One number of microbatches for each pp up to 16: a small part of the whole matrix."""
    allowed = list(filter(SCHEDULES[name].allows, range(1, 5)))
    for pp in range(1, 17):
        num_microbatches = 1 + (23 * pp + sum(map(ord, name))) % (12 if name == "auto" else 40)
        prove(name, pp, num_microbatches, allowed[pp % len(allowed)])


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(NAMED), st.integers(1, 8), st.integers(1, 24), st.integers(1, 4))
def test_every_schedule_is_proven_for_any_number_of_microbatches(
    name: str, pp: int, num_microbatches: int, virtual_stages: int
) -> None:
    if not SCHEDULES[name].allows(virtual_stages):
        virtual_stages = SCHEDULES[name].fewest
    prove(name, pp, num_microbatches, virtual_stages)


@pytest.mark.full
@pytest.mark.parametrize("pp", range(1, 17))
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_the_whole_matrix_is_proven(name: str, pp: int, little_effort: None) -> None:
    for virtual_stages in filter(SCHEDULES[name].allows, range(1, 5)):
        for num_microbatches in range(1, 65):
            prove(name, pp, num_microbatches, virtual_stages)


@pytest.mark.parametrize(("name", "virtual_stages"), [("zb_h2", 1), ("zb_v", 2)])
@pytest.mark.parametrize("pp", [1, 2, 5, 8])
def test_no_rank_idles_between_its_first_start_and_its_last_end(
    name: str, virtual_stages: int, pp: int
) -> None:
    for num_microbatches in (2 * pp - 1, 3 * pp + 1):
        timeline = unit_times(build_schedule(name, pp, num_microbatches, virtual_stages))
        assert timeline.span_bubble_fraction == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (3, 2, 1), (18.5, 18, 9.3), (1, 2, 1.5)])
def test_zb_h1_loses_what_its_formula_says_for_unequal_times(f: float, i: float, w: float) -> None:
    """With W above F the first I comes too late for any plan that holds no more than pp."""
    lowered = lower(build_schedule("zb_h1", 5, 9))
    makespan = simulate_step(lowered, Costs.equal(5, 1, f, i, w)).makespan
    assert makespan == pytest.approx(9 * (f + i + w) + 4 * (i + max(f - w, 0)))


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe_v"])
def test_no_weight_gradient_is_open_at_the_end_and_all_are_bounded(name: str) -> None:
    virtual_stages = SCHEDULES[name].fewest
    few, many = (
        validate(lower(build_schedule(name, 4, m, virtual_stages))).peak_open_w for m in (16, 64)
    )
    assert few == many and max(many) <= 7


@given(st.integers(1, 8), st.integers(0, 16), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_interleaving_loses_what_the_formula_says_from_as_many_microbatches_as_ranks(
    pp: int, more: int, virtual_stages: int
) -> None:
    plan = build_schedule("interleaved_1f1b", pp, pp + more, virtual_stages)
    ideal, lost = 3 * (pp + more), 3 * (pp - 1) / virtual_stages
    assert unit_times(plan).makespan == pytest.approx(ideal + lost, abs=1e-9)


def test_one_chunk_interleaved_is_1f1b_and_two_chunks_are_not() -> None:
    assert build_schedule("interleaved_1f1b", 4, 6).actions == build_schedule("1f1b", 4, 6).actions
    plan = build_schedule("interleaved_1f1b", 4, 6, 2)
    for rank in range(4):
        assert {a.stage for a in plan[rank] if a.op is Op.FORWARD} == {rank, rank + 4}


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_looped_bfs_with_one_chunk_is_gpipe(pp: int) -> None:
    assert build_schedule("looped_bfs", pp, 5).actions == build_schedule("gpipe", pp, 5).actions


def test_an_unknown_schedule_gets_the_names_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.schedule: unknown schedule 'interleaved'.*"):
        build_schedule("interleaved", 2, 2)
    with pytest.raises(ConfigError, match=r"Did you mean gpipe\? Use one of naive, gpipe, 1f1b"):
        build_schedule("g-pipe", 2, 2)


@pytest.mark.parametrize(
    ("name", "virtual_stages", "match"),
    [
        ("1f1b", 2, "1f1b has exactly one stage a rank, got virtual_stages=2.*interleaved_1f1b"),
        ("looped_bfs", 0, "looped_bfs has at least one stage a rank, got virtual_stages=0"),
        ("zb_v", 1, "zb_v has exactly two stages a rank, got virtual_stages=1.*virtual_stages=2"),
        ("auto", 0, "auto has at least one stage a rank, got virtual_stages=0"),
    ],
)
def test_an_impossible_number_of_chunks_is_refused(
    name: str, virtual_stages: int, match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        build_schedule(name, 2, 2, virtual_stages)


@pytest.mark.parametrize(("pp", "microbatches"), [(0, 4), (2, 0)])
def test_no_ranks_and_no_microbatches_are_refused(pp: int, microbatches: int) -> None:
    with pytest.raises(ConfigError, match="at least"):
        build_schedule("1f1b", pp, microbatches)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.integers(1, 24))
@settings(max_examples=100, deadline=None)
def test_evaluation_is_proven_for_any_placement(ranks: list[int], num_microbatches: int) -> None:
    names = sorted(set(ranks))
    rank_of = [names.index(rank) for rank in ranks]
    plan = forward_only(rank_of, num_microbatches)
    report = validate(lower(plan))
    for rank, unsent in enumerate(report.peak_unsent):
        assert unsent <= 3 * len(plan.stages_of(rank))


@pytest.mark.parametrize(("placement", "virtual_stages"), [("loop", 1), ("loop", 3), ("v", 2)])
def test_evaluation_keeps_every_rank_busy(placement: str, virtual_stages: int) -> None:
    rank_of = place_stages("v" if placement == "v" else "loop", 4, virtual_stages)
    makespan = unit_times(forward_only(rank_of, 40)).makespan
    assert makespan <= 40 + 2 * 4
