"""The figures and pictures of docs/pipelines.md are those of the tool that it names."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.launch.command import ROOT, run

GUIDE = (ROOT / "docs/pipelines.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\w+) \| (\d) \| (.+) \|$", GUIDE, re.MULTILINE)
PICTURES = {Path(p).stem: ROOT / "docs" / p for p in re.findall(r"\]\((.+?\.svg)\)", GUIDE)}
STAGES = {name: chunks for name, chunks, _ in ROWS}


def show(name: str, microbatches: int, form: str) -> str:
    flags = ["--schedule", name, "--pp", "4", "--microbatches", str(microbatches)]
    flags += ["--virtual-stages", STAGES[name], "--costs", "1,1,1", "--format", form]
    done = run([sys.executable, "tools/show_schedule.py", *flags])
    assert done.code == 0, done.output
    return done.output


@pytest.mark.parametrize("name,chunks,cells", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_of_the_table_is_what_the_simulator_says(name: str, chunks: str, cells: str) -> None:
    time, bubble, span, in_flight = (cell.strip() for cell in cells.split("|"))
    found = json.loads(show(name, 16, "json"))
    assert found["makespan"] == pytest.approx(float(time))
    assert f"{100 * found['bubble_fraction']:.1f} %" == bubble
    assert f"{100 * found['span_bubble_fraction']:.1f} %" == span
    assert found["peak_in_flight"] == [float(x) for x in in_flight.split()]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_the_tool_draws(name: str) -> None:
    assert PICTURES[name].read_text(encoding="utf-8") == show(name, 6, "svg")


def test_every_schedule_has_a_row_and_a_picture() -> None:
    assert len(ROWS) == 11 and PICTURES.keys() == STAGES.keys()
