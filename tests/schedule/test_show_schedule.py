from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_text_and_csv_show_the_actions_and_on_demand_the_messages() -> None:
    flags = "--schedule 1f1b --pp 2 --microbatches 2".split()
    text = show(*flags).stdout
    assert "rank 0:     0F0      0F1      0B0      0B1\n" in text and "makespan 9 (ideal 6)" in text
    assert show(*flags, "--format", "csv").stdout == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert ",1SEND_B0," in show(*flags, "--format", "csv", "--messages").stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--schedule 1f2b --pp 2 --microbatches 2", "unknown schedule '1f2b'. Did you mean 1f1b?"),
        ("--schedule 1f1b --pp 2 --microbatches 2 --virtual-stages 2", "got virtual_stages=2"),
        ("--schedule 1f1b --pp 0 --microbatches 2", "got pp=0"),
        ("--schedule 1f1b --pp two --microbatches 2", "argument --pp: invalid int value: 'two'"),
        ("--schedule 1f1b --pp 2 --microbatches 2 --costs 1,1", "argument --costs"),
        ("--schedule 1f1b --pp 2 --microbatches 2 --costs 1,1,-1", "argument --costs"),
        ("--schedule 1f1b --pp 2", "required: --microbatches"),
    ],
)
def test_bad_input_exits_2_with_one_line(flags: str, message: str) -> None:
    done = show(*flags.split())
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and done.stderr.count("\n") == 1
