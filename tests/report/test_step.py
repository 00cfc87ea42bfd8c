"""The measured step on the page: what it says in words, and that nothing of the step is missing."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megalite.report.html import join
from megalite.report.lost import Measured, lost_time
from megalite.report.measured import Part, Pipeline, Traced
from megalite.report.step import measured_step, sentences
from megalite.report.style import stylesheet
from megalite.trace import Span
from tests.report.test_lost import PLAN, PP, step
from tests.tools.test_report import Page, outside


def pipeline(m: Measured, first: int, dp: int) -> Pipeline:
    rest = [[Span("step", "optimizer", m.end - 1, m.end)] for _ in range(PP)]
    ranks = list(range(first, first + PP))
    return Pipeline({"dp": dp, "tp": 0}, ranks, m, rest, lost_time(m))


def in_ms(m: Measured) -> Measured:
    """Units of time become 10 ms."""
    rows = [[[t / 100 for t in r] for r in rows] for rows in (m.reached, m.started, m.ended)]
    return Measured(m.plan, m.begin / 100, m.end / 100, *rows, m.reductions)


def two_replicas(slow: float = 1.0, comm_s: float = 0.0) -> Traced:
    """The second replica may have a slow stage 2 (rank 6) and late messages."""
    even, other = in_ms(step(PLAN)), in_ms(step(PLAN, {2: slow}, comm_s))
    ends = max(even.end, other.end)
    found = [
        pipeline(Measured(m.plan, 0.0, ends, m.reached, m.started, m.ended, m.reductions), at, dp)
        for m, at, dp in ((even, 0, 0), (other, PP, 1))
    ]
    return Traced(9, 20, "tp 1 x pp 4 x dp 2, 1f1b", found, 3e-6, 2 * PP)


def page(traced: Traced) -> Page:
    return Page(join(measured_step(traced)))


def test_the_slowest_stage_of_all_replicas_is_named_by_its_rank() -> None:
    said = sentences(two_replicas(slow=1.5))
    assert said[1] == "Stage 2 on rank 6 takes 1.41 x the mean of all stages."
    assert "the largest loss" in said[0] and len(said) == 2
    assert sentences(two_replicas())[1].startswith("The stages are even")


def test_a_loss_to_messages_names_who_waits_for_whom() -> None:
    (late,) = sentences(two_replicas(comm_s=2.0))[2:]
    found = re.fullmatch(r"Rank (\d) waits [\d.]+ ms for (\w+) of rank (\d) that .*\.", late)
    assert found and abs(int(found[1]) - int(found[3])) == 1 and int(found[1]) >= PP


def numbers_of(row: str) -> list[float]:
    return list(map(float, re.findall(r">([\d.]+)</td>", row)))


@pytest.mark.parametrize("slow", [1.0, 1.5])
def test_bars_fill_the_step_and_numbers_sum_up(slow: float) -> None:
    traced = two_replicas(slow, comm_s=0.3)
    found = page(traced)
    rows = re.findall(
        r"<tr><th>([^<]*)</th><td><div class=\"bar\">(.*?)</div></td>(.*?)</tr>", found.source
    )
    shown = traced.slowest[0]
    names = [f"{rank} (pp {pp})" for pp, rank in enumerate(shown.ranks)]
    assert [name for name, _, _ in rows] == [*names, "mean of all 8"]
    for at, (_, bar, cells) in enumerate(rows):
        widths = map(float, re.findall(r"width:([\d.]+)%", bar))
        assert sum(widths) == pytest.approx(100, abs=0.05)
        # What all ranks lose together stands once, beside the first of them.
        shared = numbers_of(rows[0 if at < PP else PP][2])[5:]
        busy, warm_up, imbalance, idle, _ = numbers_of(cells)[:5]
        assert warm_up + imbalance + sum(shared) == pytest.approx(idle, abs=0.3)
        assert busy + idle == pytest.approx(shown.lost.step_s * 1e3, abs=0.2)
        assert len(numbers_of(cells)) == (8 if at in (0, PP) else 5)
    assert found.attributes("td", "rowspan") == [str(PP)] * 3 + ["1"] * 3


def test_late_messages_are_those_that_a_rank_waits_for_itself() -> None:
    shown = two_replicas(comm_s=2.0).slowest[0]
    rows = re.findall(r"<tr><th>\d \(pp.*?</tr>", page(two_replicas(comm_s=2.0)).source)
    waits = [numbers_of(row)[4] for row in rows]
    for rank, wait in enumerate(waits):
        own = sum(late.wait_s for late in shown.lost.late if late.receiver == rank)
        assert wait == pytest.approx(own * 1e3, abs=0.06)
    assert len(set(waits)) > 1, "the column would say the same of every rank"


def test_one_bar_says_where_a_step_of_all_ranks_goes() -> None:
    found = page(two_replicas(slow=1.5, comm_s=0.3))
    widths = re.findall(r'<div class="bar whole">(.*?)</div>', found.source)
    shares = list(map(float, re.findall(r"width:([\d.]+)%", widths[0])))
    assert len(widths) == 1 and sum(shares) == pytest.approx(100, abs=0.05)
    assert f"computing {shares[0]:.0f}%" in found.texts("i")


def test_cells_are_coloured_as_the_legend_says() -> None:
    found = page(two_replicas())
    cells = set(found.attributes("g", "class")) - {"c2", "c3", "c4"}
    assert cells == {"f", "b"}
    assert {"k-f", "k-b"} <= set(found.attributes("i", "class"))
    for class_ in ("f", "b", "i", "w"):
        assert f".timeline .{class_} rect" in stylesheet()
        assert f".legend .k-{class_}" in stylesheet()


def without(traced: Traced, *missing: int) -> Traced:
    """As if the traces of some ranks of the second replica had not been found."""
    first, second = traced.pipelines
    m = second.measured
    gone = [rank in missing for rank in second.ranks]
    plan = m.plan.replace(() if g else a for g, a in zip(gone, m.plan.actions, strict=True))
    times = [
        [() if g else t for g, t in zip(gone, rows, strict=True)]
        for rows in (m.reached, m.started, m.ended)
    ]
    ranks = [-1 if g else rank for g, rank in zip(gone, second.ranks, strict=True)]
    reached, started, ended = times
    part = Part(
        second.where,
        ranks,
        Measured(plan, m.begin, m.end, reached, started, ended, m.reductions),
        second.rest,
    )
    return replace(traced, pipelines=[], missing=[*first.ranks, *missing], part=part)


def test_of_a_pipeline_that_is_not_whole_it_draws_what_there_is_and_says_what_not() -> None:
    found = page(without(two_replicas(), 5))
    said = found.texts("li")
    assert said[0].startswith("3 of 8 ranks' traces found: none of ranks 0, 1, 2, 3, 5.")
    assert re.match(r"Of [\d.]+ ms is computing: rank 4 \d+%, rank 6 \d+%, rank 7 \d+%\.", said[1])
    assert sum("of microbatch" in t for t in found.texts("title")) == 3 * 2 * 8
    assert sum(t.startswith("no trace of this rank") for t in found.texts("title")) == 1
    assert len(found.attributes("svg", "width")) == 1 and found.texts("table") == []
    assert "traces found" not in page(two_replicas()).text


def test_whole_pipelines_are_shown_as_ever_beside_the_note() -> None:
    traced = two_replicas()
    found = page(replace(traced, pipelines=traced.pipelines[:1], missing=[4]))
    assert found.texts("li")[0].startswith("7 of 8 ranks' traces found: none of rank 4.")
    assert len(found.attributes("svg", "width")) == 2 and "mean of all 4" in found.text


def test_planned_and_measured_have_one_scale_and_fetch_nothing() -> None:
    found = page(two_replicas(slow=1.5, comm_s=0.3))
    widths = found.attributes("svg", "width")
    assert len(widths) == 2 and widths[0] == widths[1]
    heads = found.texts("h3")
    assert heads[0].startswith("The plan without losses: ") and heads[1].startswith("Measured: ")
    assert "clocks agree to 3 us" in found.text and outside(found) == []
    # Every computation is drawn, in both.
    assert sum("of microbatch" in t for t in found.texts("title")) == 2 * PP * 2 * 8
    assert any(t.startswith("waits for pp") for t in found.texts("title"))
    assert any(t.startswith("optimizer, ") for t in found.texts("title"))
