from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.errors import ConfigError
from megalite.schedule.action import Op, Plan
from megalite.schedule.generators import SCHEDULES, build_schedule, forward_only
from megalite.schedule.lower import lower
from megalite.schedule.placement import place_stages
from megalite.schedule.render import render_text
from megalite.schedule.simulate import Timeline, simulate
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


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 8), st.integers(1, 24), st.integers(1, 4))
def test_every_schedule_is_proven_for_any_number_of_microbatches(
    name: str, pp: int, num_microbatches: int, virtual_stages: int
) -> None:
    if not SCHEDULES[name].allows(virtual_stages):
        virtual_stages = SCHEDULES[name].fewest
    validate(lower(build_schedule(name, pp, num_microbatches, virtual_stages)))


# At pp 4, 16 microbatches, where 48 is ideal.
@pytest.mark.parametrize(
    ("name", "virtual_stages", "makespan", "peak"),
    [
        ("naive", 1, 192, (1, 1, 1, 1)),
        ("gpipe", 1, 57, (16, 16, 16, 16)),
        ("1f1b", 1, 57, (4, 3, 2, 1)),
        ("interleaved_1f1b", 2, 52.5, (5.5, 4.5, 3.5, 2.5)),
        ("interleaved_1f1b", 3, 51, (5, 13 / 3, 11 / 3, 3)),
        ("interleaved_1f1b", 4, 50.25, (4.75, 4.25, 3.75, 3.25)),
        ("looped_bfs", 2, 52.5, (16, 16, 16, 16)),
        ("looped_bfs", 3, 51, (16, 16, 16, 16)),
    ],
)
def test_makespan_and_peak_are_the_papers(
    name: str, virtual_stages: int, makespan: float, peak: tuple[float, ...]
) -> None:
    plan = build_schedule(name, 4, 16, virtual_stages)
    timeline = unit_times(plan)
    assert timeline.makespan == pytest.approx(makespan, abs=1e-9)
    assert timeline.bubble_fraction == pytest.approx(1 - 48 / makespan, abs=1e-9)
    assert timeline.span_bubble_fraction == pytest.approx(1 - 48 / makespan, abs=1e-9)
    assert validate(lower(plan)).peak_in_flight == pytest.approx(peak)


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
    with pytest.raises(ConfigError, match=r"Did you mean gpipe\? Known: naive, gpipe, 1f1b"):
        build_schedule("g-pipe", 2, 2)


@pytest.mark.parametrize(
    ("name", "virtual_stages", "match"),
    [
        ("1f1b", 2, "1f1b has exactly one stage a rank, got virtual_stages=2.*interleaved_1f1b"),
        ("looped_bfs", 0, "looped_bfs has at least one stage a rank, got virtual_stages=0"),
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


@pytest.mark.full
@pytest.mark.parametrize("pp", range(1, 9))
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_the_whole_matrix_is_proven(name: str, pp: int) -> None:
    for virtual_stages in filter(SCHEDULES[name].allows, range(1, 5)):
        for num_microbatches in range(1, 25):
            plan = build_schedule(name, pp, num_microbatches, virtual_stages)
            report = validate(lower(plan))
            assert max(max(peaks.values(), default=0) for peaks in report.peak_receives) <= 2
