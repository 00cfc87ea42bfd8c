from __future__ import annotations

import pytest

from megalite.errors import ScheduleError
from megalite.schedule.generators import build_schedule, forward_only
from megalite.schedule.lower import lower
from megalite.schedule.render import from_csv, parse_text, render_text, to_csv


@pytest.mark.parametrize("pp", [1, 3, 12])
def test_text_and_csv_read_back(pp: int) -> None:
    for plan in (
        build_schedule("1f1b", pp, 13),
        lower(build_schedule("interleaved_1f1b", pp, 3, 2)),
        lower(forward_only([*range(pp), *reversed(range(pp))], 3)),
    ):
        assert parse_text(f"# {plan.name}\n\n{render_text(plan)}", plan.name) == plan
        assert from_csv(to_csv(plan), plan.name) == plan


def test_a_mark_is_put_in_brackets() -> None:
    text = render_text(build_schedule("1f1b", 2, 2), {1: 1})
    assert text == (
        "rank 0:     0F0      0F1      0B0      0B1\nrank 1:     1F0     [1B0]     1F1      1B1"
    )


def test_a_large_plan_is_cut_down_to_where_the_mark_is() -> None:
    plan = build_schedule("1f1b", 64, 128)
    lines = render_text(plan, {40: 100}).splitlines()
    assert [line[:8] for line in lines] == [f"rank {r:2}:" for r in range(35, 46)]
    assert f"[{plan[40][100]}]" in lines[5] and " ... " in lines[5]
    assert max(map(len, lines)) < 160
    with pytest.raises(ScheduleError):
        parse_text("\n".join(lines))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("rank 0: 0F0 0X0", "line 1: rank 0, step 1: not an action: '0X0'"),
        ("rank 1: 0F0", "line 1: expected 'rank 0: ...'"),
        ("rank 0: 0F0\nnonsense", "line 2: expected 'rank 1: ...'"),
        ("rank 0: 0F0 2F0", r"without a gap, got \[0, 2\]"),
        ("rank 0: 0F0 0B0\nrank 1: 0F1", "0F1 stands on rank 1, but rank 0 has its stage"),
        ("", "without a gap"),
    ],
)
def test_text_that_is_no_plan_is_refused_with_the_place(text: str, match: str) -> None:
    with pytest.raises(ScheduleError, match=match):
        parse_text(text)


def test_a_csv_cell_that_is_no_action_is_named() -> None:
    assert from_csv("0F0,0B0,\n1F0,1B0,\n").pp == 2
    with pytest.raises(ScheduleError, match="line 4: rank 1, step 1: not an action"):
        from_csv("# two ranks\n0F0,0B0\n\n1F0,hello\n")
