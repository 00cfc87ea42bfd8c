"""The layout checker: all reasons at once, what would fit, and no torch."""

from __future__ import annotations

import pytest

from tests.tools.torchless import ROOT, run_without_torch
from tools.check_layout import main

TINY = str(ROOT / "launch/configs/gpt_tiny_cpu.yaml")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main(["--config", TINY, *argv])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_a_legal_layout_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(
        capsys, "--world-size", "8", "--parallel.tp", "2", "--parallel.pp=2", "--train.steps", "1"
    )
    assert code == 0
    assert "tp groups: (0 1) (2 3) (4 5) (6 7)" in text
    assert "pp groups: (0 4) (1 5) (2 6) (3 7)" in text
    assert "dp groups: (0 2) (1 3) (4 6) (5 7)" in text
    assert "8 sequences, 1 microbatches of 4 on each of 2 replicas, 0 rows missing" in text


def test_a_large_world_is_not_listed_rank_by_rank(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "--world-size", "4096", "--parallel.tp", "4")
    assert code == 0 and len(text.splitlines()) < 10
    assert "tp groups: 1024 of 4 ranks" in text and "96 rows" not in text


def test_every_broken_rule_and_the_nearest_layouts_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--parallel.tp", "3", "--parallel.sequence_parallel", "True", "--train.steps=-1"]
    code, text = run(capsys, "--world-size", "8", *flags)
    assert code == 2
    for part in ("world size 8 is not tp=3", "num_heads=4", "ffn_hidden_size=704", "seq_length"):
        assert part in text
    assert "train.steps: -1 is less than 0" in text
    near = text.split("nearest layouts of 8 ranks:\n")[1].splitlines()
    assert near[0].split(":")[0] == "  tp=4 pp=1 dp=2 schedule=1f1b sequence_parallel=True"
    for line in near:
        again = line.split(":  ")[1].split()
        assert run(capsys, "--world-size", "8", *flags[2:4], *again)[0] == 0


@pytest.mark.parametrize("flag", ["--parallel.tpp", "--train.tp", "--tp"])
def test_a_bad_flag_is_one_line(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "--world-size", "8", flag, "2")
    assert code == 2 and "parallel.tp" in text and text.count("\n") == 1


def test_what_no_layout_can_mend_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "--world-size", "8", "--model.num_heads", "3", "--parallel.tp", "2")
    assert code == 2 and "have to change first" in text
    code, text = run(capsys, "--world-size", "8", "--optim.lr", "-1")
    assert code == 2 and "nearest" not in text


def test_the_command_needs_no_torch_and_exits_with_2() -> None:
    for size, expected in (("8", 0), ("0", 2)):
        done = run_without_torch("check_layout.py", "--config", TINY, "--world-size", size)
        assert done.returncode == expected and done.stderr == ""
