from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megalite.schedule.generators import build_schedule
from tools.show_schedule import main

ROOT = Path(__file__).parents[2]


def show(*flags: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "show_schedule.py"), *flags],
        capture_output=True,
        text=True,
        cwd=cwd,
    )


def test_json_has_the_agreed_keys_and_figures(tmp_path: Path) -> None:
    flags = "--schedule interleaved_1f1b --pp 2 --microbatches 4 --virtual-stages 2".split()
    done = show(*flags, "--costs", "1,2,3,0.5", "--format", "json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert list(facts) == [
        "schedule",
        "pp",
        "num_stages",
        "num_microbatches",
        "actions",
        "makespan",
        "ideal",
        "bubble_fraction",
        "span_bubble_fraction",
        "peak_in_flight",
        "peak_open_w",
    ]
    assert (facts["pp"], facts["num_stages"], facts["num_microbatches"]) == (2, 4, 4)
    assert facts["actions"][0][:3] == ["0F0", "0F1", "2F0"]
    assert facts["ideal"] == 24 and facts["makespan"] > 24
    assert facts["bubble_fraction"] == pytest.approx(1 - 24 / facts["makespan"])
    assert facts["peak_in_flight"] == [2.5, 1.5] and facts["peak_open_w"] == [0, 0]


def shown(capsys: pytest.CaptureFixture[str], flags: str) -> str:
    assert main(flags.split()) == 0
    return capsys.readouterr().out


def test_text_and_csv_show_the_actions_and_on_demand_the_messages(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = "--schedule 1f1b --pp 2 --microbatches 2"
    text = shown(capsys, flags)
    assert "rank 0:     0F0      0F1      0B0      0B1\n" in text and "makespan 9 (ideal 6)" in text
    assert shown(capsys, f"{flags} --format csv") == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert ",1SEND_B0," in shown(capsys, f"{flags} --format csv --messages")


@pytest.mark.parametrize("extra", ["", " --format csv", " --messages"])
def test_what_is_shown_can_be_read_as_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: str
) -> None:
    flags = "--pp 3 --microbatches 4 --virtual-stages 2"
    (tmp_path / "plan").write_text(shown(capsys, f"--schedule v_min {flags}{extra}"))
    again = json.loads(shown(capsys, f"--schedule file:{tmp_path}/plan {flags} --format json"))
    plan = build_schedule("v_min", 3, 4, 2)
    assert again["actions"] == [[str(a) for a in actions] for actions in plan.actions]
    assert again["schedule"] == f"file:{tmp_path}/plan"


def test_svg_is_a_picture_with_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--schedule zb_h1 --pp 2 --microbatches 3 --format svg")
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "makespan 10 (ideal 9)" in text


def test_auto_plans_for_the_costs_and_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--schedule auto --pp 3 --microbatches 9 --costs 2,2,1,0.1 --format json"
    free = json.loads(shown(capsys, flags))
    bound = json.loads(shown(capsys, f"{flags} --memory 3"))
    half = json.loads(shown(capsys, f"{flags} --memory 5,0.5"))
    assert max(bound["peak_in_flight"]) == 3 and max(half["peak_in_flight"]) > 5
    assert free["makespan"] <= half["makespan"] < bound["makespan"]


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    flags = "--schedule gpipe --pp 64 --microbatches 256".split()
    tool = subprocess.Popen(
        [sys.executable, str(ROOT / "tools" / "show_schedule.py"), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert tool.stdout is not None and tool.stderr is not None
    assert tool.stdout.readline().startswith("# gpipe: 64 ranks")
    tool.stdout.close()
    assert tool.stderr.read() == "" and tool.wait() == 0
    tool.stderr.close()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--schedule 1f2b --pp 2 --microbatches 2", "unknown schedule '1f2b'. Did you mean 1f1b?"),
        ("--schedule 1f1b --pp 2 --microbatches 2 --virtual-stages 2", "got virtual_stages=2"),
        ("--schedule gpipe --pp 2 --microbatches 2 --virtual-stages 0", "got virtual_stages=0"),
        ("--schedule 1f1b --pp 0 --microbatches 2", "got pp=0"),
        ("--schedule 1f1b --pp two --microbatches 2", "argument --pp: invalid int value: 'two'"),
        ("--schedule 1f1b --pp 2 --microbatches 2 --costs 1,1", "'1,1' is not F,I,W or F,I,W,COMM"),
        ("--schedule 1f1b --pp 2 --microbatches 2 --costs -1,1,1", "'-1,1,1' is not F,I,W"),
        ("--schedule 1f1b --pp 2 --microbatches 2 --costs 1e308,1,1", "within 1e-100 to 1e+100"),
        ("--schedule 1f1b --pp 2 --microbatches 2 --costs 1e-320,0,0", "within 1e-100 to 1e+100"),
        ("--schedule 1f1b --pp 2 --microbatches 2 --memory 1", "--memory: 1f1b keeps to no limit"),
        ("--schedule 1F1B --pp 2 --microbatches 2", "Did you mean 1f1b?"),
        ("--schedule ZB-H1 --pp 2 --microbatches 2", "Did you mean zb_h1?"),
        ("--schedule 1f1b --pp 100000000 --microbatches 2", "600,000,000 F, I and W. Use fewer"),
        ("--schedule auto --pp 2 --microbatches 2 --memory nan", "'nan' is not UNITS"),
        ("--schedule auto --pp 2 --microbatches 2 --memory -1", "'-1' is not UNITS"),
        ("--schedule auto --pp 2 --microbatches 2 --memory 1,2,3", "'1,2,3' is not UNITS"),
        ("--schedule file: --pp 2 --microbatches 2", "file: has no path"),
        ("--schedule 1f1b --pp 2 --microbatches 2 --costs 1,1,-1", "argument --costs"),
        ("--schedule auto --pp 2 --microbatches 2 --memory 2,3", "argument --memory"),
        ("--schedule auto --pp 2 --microbatches 2 --memory 0.9", "Allow at least 1"),
        ("--schedule file:/absent --pp 2 --microbatches 2", "cannot read /absent"),
        ("--schedule 1f1b --pp 2", "required: --microbatches"),
    ],
)
def test_bad_input_exits_2_with_one_line(
    capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    try:
        code = main(flags.split())
    except SystemExit as stopped:
        code = int(str(stopped.code))
    out, err = capsys.readouterr()
    assert code == 2 and out == ""
    assert message in err and err.count("\n") == 1


def test_bad_input_exits_2_from_the_shell_too() -> None:
    done = show("--schedule", "1f1b", "--pp", "2")
    assert done.returncode == 2 and "required: --microbatches" in done.stderr


def test_a_file_with_a_wrong_order_is_shown_with_the_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan").write_text("0F0,0B0\n1B0,1F0\n")
    assert main(f"--schedule file:{tmp_path}/plan --pp 2 --microbatches 1".split()) == 2
    assert "[1B0]" in capsys.readouterr().err


def test_a_cut_file_says_which_microbatches_are_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan").write_text("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n")
    flags = f"--schedule file:{tmp_path}/plan --pp 2 --microbatches"
    assert "1 microbatches (0 to 0 of the file's 2)\n" in shown(capsys, f"{flags} 1")
    assert "2 stages, 2 microbatches\n" in shown(capsys, f"{flags} 2")


@pytest.mark.parametrize("form", ["text", "json", "svg"])
@pytest.mark.parametrize("costs", ["1e100,1e100,1e100", "1e-100,0,0", "1e100,1e-100,0", "0,0,0"])
def test_the_largest_and_the_least_times_are_shown(
    capsys: pytest.CaptureFixture[str], costs: str, form: str
) -> None:
    text = shown(capsys, f"--schedule 1f1b --pp 2 --microbatches 2 --costs {costs} --format {form}")
    assert "nan" not in text.lower() and "inf" not in text.lower()


def test_the_idle_time_is_shown_by_cause(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--schedule", "1f1b", "--pp", "2", "--microbatches", "3", "--costs", "1,1,1,0.5"]
    assert main(flags) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("# idle"))
    assert line == "# idle, by rank: warm up and drain 3, 3; communication 2, 2"
    assert main(["--schedule", "1f1b", "--pp", "1", "--microbatches", "3"]) == 0
    assert "# idle, by rank: never" in capsys.readouterr().out
