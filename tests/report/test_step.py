"""The measured step on the page: what it says in words, and that nothing of the step is missing."""

from __future__ import annotations

import re

import pytest

from megalite.report.html import join
from megalite.report.lost import Measured, lost_time
from megalite.report.measured import Pipeline, Traced
from megalite.report.step import measured_step, sentences
from megalite.trace import Span
from tests.report.test_lost import PLAN, PP, step
from tests.tools.test_report import Page, outside


def pipeline(m: Measured, first: int, dp: int) -> Pipeline:
    rest = [[Span("step", "optimizer", m.end - 1, m.end)] for _ in range(PP)]
    ranks = list(range(first, first + PP))
    return Pipeline({"dp": dp, "tp": 0}, ranks, m, lost_time(m), rest)


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
    return Traced(9, 20, "tp 1 x pp 4 x dp 2, 1f1b", found, 3e-6)


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


@pytest.mark.parametrize("slow", [1.0, 1.5])
def test_bars_fill_the_step_and_numbers_sum_up(slow: float) -> None:
    traced = two_replicas(slow, comm_s=0.3)
    found = page(traced)
    rows = re.findall(
        r"<tr><th>([^<]*)</th><td><div class=\"bar\">(.*?)</div></td>(.*?)</tr>", found.source
    )
    names = [f"{rank} (pp {pp})" for pp, rank in enumerate(traced.slowest[0].ranks)]
    assert [name for name, _, _ in rows] == [*names, "mean of all 8"]
    for _, bar, cells in rows:
        widths = map(float, re.findall(r"width:([\d.]+)%", bar))
        assert sum(widths) == pytest.approx(100, abs=0.05)
        numbers = list(map(float, re.findall(r">([\d.]+)</td>", cells)))
        assert sum(numbers[1:-1]) == pytest.approx(numbers[-1], abs=0.3)
        assert numbers[0] + numbers[-1] == pytest.approx(
            traced.pipelines[0].lost.step_s * 1e3, abs=0.2
        )


def test_planned_and_measured_have_one_scale_and_fetch_nothing() -> None:
    found = page(two_replicas(slow=1.5, comm_s=0.3))
    widths = found.attributes("svg", "width")
    assert len(widths) == 2 and widths[0] == widths[1]
    heads = found.texts("h3")
    assert heads[0].startswith("Planned: ") and heads[1].startswith("Measured: ")
    assert "clocks agree to 3 us" in found.text and outside(found) == []
    # Every computation is drawn, in both.
    assert sum("of microbatch" in t for t in found.texts("title")) == 2 * PP * 2 * 8
    assert any(t.startswith("waits for pp") for t in found.texts("title"))
    assert any(t.startswith("optimizer, ") for t in found.texts("title"))
