from __future__ import annotations

import os
from pathlib import Path

import pytest

from megalite.errors import ConfigError, ScheduleError
from megalite.schedule.generators import SCHEDULES, build_schedule, forward_only
from megalite.schedule.lower import as_written, lower
from megalite.schedule.placement import place_stages
from megalite.schedule.render import render_text, to_csv
from megalite.schedule.validate import validate
from tests.schedule.plans import edited


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return f"file:{path}"


@pytest.mark.parametrize("messages", [False, True])
@pytest.mark.parametrize("render", [render_text, to_csv])
@pytest.mark.parametrize(("name", "v"), [("1f1b", 1), ("zb_v", 2), ("interleaved_1f1b", 3)])
def test_a_schedule_comes_back_from_text_and_csv(
    tmp_path: Path, name: str, v: int, render: object, messages: bool
) -> None:
    plan = build_schedule(name, 3, 5, v)
    assert callable(render)
    name = written(tmp_path / "plan", "# a comment\n\n" + render(lower(plan) if messages else plan))
    read = build_schedule(name, 3, 5, v)
    assert read.actions == (lower(plan) if messages else plan).actions
    assert (
        lower(read).actions == lower(plan).actions
        and read.rank_of == plan.rank_of
        and read.name == name
    )
    validate(lower(read))


def test_a_step_may_have_fewer_microbatches_than_the_file(tmp_path: Path) -> None:
    name = written(tmp_path / "plan.csv", to_csv(build_schedule("zb_h2", 4, 16)))
    for m in range(1, 17):
        plan = build_schedule(name, 4, m)
        assert plan.num_microbatches == m
        validate(lower(plan))
    with pytest.raises(ConfigError, match=r"has 16 microbatches, the step has 17"):
        build_schedule(name, 4, 17)


@pytest.mark.parametrize("name", [n for n in SCHEDULES if n != "auto"])
def test_a_file_with_messages_is_cut_and_run_as_it_is(tmp_path: Path, name: str) -> None:
    v = SCHEDULES[name].fewest
    whole = lower(build_schedule(name, 3, 9, v))
    path = written(tmp_path / "plan.csv", to_csv(whole))
    for m in (1, 4, 9):
        plan = build_schedule(path, 3, m, v)
        validate(lower(plan), trains=True)
        kept = [[a for a in actions if a.microbatch < m] for actions in whole.actions]
        assert [list(actions) for actions in lower(plan).actions] == kept


def test_what_a_file_says_of_messages_is_kept(tmp_path: Path) -> None:
    """A receive that is posted later than ``lower`` would."""
    late = edited(lower(build_schedule("1f1b", 2, 2)), 1, "1RECV_F0 1RECV_F1 1F0", "1RECV_F0 1F0")
    late = edited(late, 1, "1F1", "1RECV_F1 1F1")
    plan = build_schedule(written(tmp_path / "plan", render_text(late)), 2, 2)
    assert lower(plan).actions == late.actions and as_written(plan).actions == late.actions
    usual = lower(build_schedule("1f1b", 2, 2))
    assert as_written(usual) == build_schedule("1f1b", 2, 2)


def test_the_whole_file_is_checked_and_shown_before_it_is_cut(tmp_path: Path) -> None:
    name = written(tmp_path / "plan", "0F0,0B0,0F1,0B1,0F2\n1F0,1B0,1F1,1B1,1F2,1B2")
    with pytest.raises(ScheduleError) as error:
        build_schedule(name, 2, 1)
    first, *grid = str(error.value).splitlines()
    assert first.endswith("rank 0, step 5: 0B2 is missing") and "[0B2]" in grid[0]
    good = written(tmp_path / "plan", "0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1")
    assert build_schedule(good, 2, 1).microbatches == "1 microbatches (0 to 0 of the file's 2)"
    assert build_schedule(good, 2, 2).microbatches == "2 microbatches"


def test_a_dead_lock_is_shown_in_the_files_own_words(tmp_path: Path) -> None:
    name = written(tmp_path / "plan", "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0")
    with pytest.raises(ScheduleError) as error:
        build_schedule(name, 2, 2)
    first, *grid = str(error.value).splitlines()
    assert first.startswith(f"{tmp_path / 'plan'}: dead-lock: rank 0, step 1: 0B0 waits for rank 1")
    assert grid == [
        "rank 0:     0F0     [0B0]     0F1      0B1",
        "rank 1:    [1F1]     1B1      1F0      1B0",
    ]


@pytest.mark.parametrize("text", ["0F0,0B0\r\n1F0,1B0\r\n", "rank 0: 0F0 0B0\nrank 1: 1F0 1B0"])
def test_a_byte_order_mark_is_no_matter(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert build_schedule(f"file:{tmp_path / 'plan'}", 2, 1).pp == 2


def test_stages_may_lie_anywhere(tmp_path: Path) -> None:
    name = written(tmp_path / "plan", "rank 0: 1F0 1I0 1W0\nrank 1: 0F0 0B0")
    assert build_schedule(name, 2, 1).rank_of == (1, 0)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "the file is empty"),
        ("\n# nothing\n\n", "the file is empty"),
        ("rank 0: 0F0 0X0\nrank 1: 1F0 1B0", "rank 0, step 1: not an action: '0X0'"),
        ("0F0,0B0\n1F0,1Q0", "rank 1, step 1: not an action: '1Q0'"),
        ("once upon a time", "rank 0, step 0: not an action"),
        ("rank 0: 0F0 0B0\nrank 2: 1F0 1B0", "line 2: expected 'rank 1: ...'"),
        ("0F0,0B0\n1F0,1B0,0F0", "0F0 stands on rank 1, but rank 0 has its stage"),
        ("0F0,0B0\n999999999F0", "numbered from 0 without a gap"),
        ("0F0,0B0\n1F0", "rank 1, step 1: 1B0 is missing"),
        ("0F0,0B0\n1F0,1I0", "rank 1, step 2: 1W0 is missing"),
        ("0F0,0B0\n1B0,1F0", "rank 1, step 0: 1B0 needs 1F0 first"),
        ("0F0,0B0,0B0\n1F0,1B0", "rank 0, step 2: 0B0 repeats 0B0 of step 1"),
        ("0REDUCE\n1REDUCE", "nothing would be learned"),
        ("0F0,0B0,0REDUCE\n1F0,1B0", "0F0 needs 0SEND_F0, which is missing .*has all messages"),
        ("0F0,0B0\n1F999999999,1B0", "line 2: rank 1, step 0: .* beyond the number of actions"),
        ("0F0,0B0\n1F" + "9" * 5000, r"line 2: rank 1, step 0: not an action: '1F9+\.\.\.'"),
        ("0F０,0B0\n1F0,1B0", "line 1: rank 0, step 0: not an action"),
        ("0F0,0F1,0B1\n1F0,1B0", "0B0 is missing"),
    ],
)
def test_a_file_that_is_no_schedule_is_refused_with_the_place(
    tmp_path: Path, text: str, match: str
) -> None:
    name = written(tmp_path / "plan", text)
    with pytest.raises(ScheduleError, match=match) as error:
        build_schedule(name, 2, 1)
    assert str(error.value).startswith(str(tmp_path / "plan"))


def test_a_wrong_order_is_shown_in_the_grid(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError) as error:
        build_schedule(written(tmp_path / "plan", "0F0,0B0\n1B0,1F0"), 2, 1)
    assert str(error.value).splitlines()[1:] == [
        "rank 0:     0F0      0B0",
        "rank 1:    [1B0]     1F0",
    ]


def test_a_plan_for_evaluation_is_not_trained_with(tmp_path: Path) -> None:
    plan = forward_only(place_stages("loop", 2, 1), 3)
    with pytest.raises(ScheduleError, match="nothing would be learned"):
        build_schedule(written(tmp_path / "plan", render_text(plan)), 2, 3)


@pytest.mark.parametrize(
    ("pp", "v", "field", "match"),
    [
        (3, 2, "parallel.pp", "has 2 ranks, pp=3. Use pp=2"),
        (2, 1, "parallel.virtual_stages", r"has \[2, 2\] stages .* Use virtual_stages=2"),
    ],
)
def test_a_file_for_other_numbers_is_refused_with_its_own(
    tmp_path: Path, pp: int, v: int, field: str, match: str
) -> None:
    name = written(tmp_path / "plan", to_csv(build_schedule("zb_v", 2, 4, 2)))
    with pytest.raises(ConfigError, match=match) as error:
        build_schedule(name, pp, 4, v)
    assert error.value.field == field


@pytest.mark.parametrize("text", ["0F0,2F0,2B0,0B0\n1F0,1B0", "0F0,1F0,1B0,0B0\n\n"])
def test_stages_that_cannot_be_shared_out_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="Use another file|has 1 ranks, pp=2"):
        build_schedule(written(tmp_path / "plan", text), 2, 1)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    os.mkfifo(tmp_path / "pipe")
    for name, why in (
        ("absent", "No such file"),
        (".", "Is a directory"),
        ("binary", "no text"),
        ("pipe", "no regular file"),
    ):
        with pytest.raises(ConfigError, match=f"cannot read .*{why}") as error:
            build_schedule(f"file:{tmp_path / name}", 2, 1)
        assert error.value.field == "parallel.schedule"
    with pytest.raises(ConfigError, match="file: has no path"):
        build_schedule("file:", 2, 1)
