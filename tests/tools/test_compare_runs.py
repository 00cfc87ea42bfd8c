"""The command, on runs that the training command has recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.recording import is_recorded
from tests.launch.command import metrics, train
from tests.launch.test_pretrain import EQUAL
from tests.tools.torchless import run_without_torch
from tools.compare_runs import main

RECORD = ["--run.record", "True", "--train.steps", "3"]


def compared(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, str]:
    code = main([str(word) for word in argv])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone")
    done = train(1, out, *RECORD, "--train.micro_batch_size", "2")
    assert done.code == 0, done.output
    return out


def test_two_ranks_and_one_process_agree_and_another_run_does_not(
    alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = ["--parallel.pp", "2", "--parallel.schedule", "zb_h1"]
    done = train(2, tmp_path / "two", *RECORD, *layout)
    assert done.code == 0, done.output
    code, text = compared(capsys, alone, tmp_path / "two")
    assert code == 0 and "The runs agree within 1.5e-08 over 3 steps" in text, text
    assert "A: tp 1 x pp 1 x dp 1, 1f1b\nB: tp 1 x pp 2 x dp 1, zb_h1" in text
    assert "differ in" not in text
    code, text = compared(capsys, alone, tmp_path / "two", "--tolerance", "1e-18")
    assert code == 1, text

    done = train(1, tmp_path / "other", *RECORD, "--optim.weight_decay", "0.2")
    assert done.code == 0, done.output
    code, text = compared(capsys, alone, tmp_path / "other")
    assert code == 1 and "optim.weight_decay: 0.1 in A, 0.2 in B" in text
    assert "The runs part at step 1, weight: updated embedding.tokens.weight" in text, text
    code, text = compared(capsys, alone, tmp_path / "other", "--json")
    found = json.loads(text)
    assert code == 1 and found["agree"] is False
    assert (found["first"]["step"], found["first"]["phase"]) == (1, "weight")
    assert found["fields"] == [["optim.weight_decay", 0.1, 0.2]]


def test_a_run_that_is_taken_up_in_another_layout_has_one_record_without_holes(
    alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saves = [*RECORD, "--checkpoint.every", "1"]
    first = train(2, tmp_path, *saves, "--parallel.tp", "2", "--run.stop_at", "2")
    assert first.code == 0, first.output
    # As if it had been killed a step after its checkpoint.
    records = [path.read_bytes() for path in sorted((tmp_path / "record").iterdir())]
    for path, content in zip(sorted((tmp_path / "record").iterdir()), records, strict=True):
        last = json.loads(content.splitlines()[-1])
        path.write_bytes(content + json.dumps({**last, "step": 3}).encode() + b"\n" + b'{"step"')
    second = train(1, tmp_path, *saves)
    assert second.code == 0, second.output
    code, text = compared(capsys, alone, tmp_path)
    assert code == 0 and "over 3 steps" in text, text
    for path, content in zip(sorted((tmp_path / "record").iterdir()), records, strict=True):
        assert path.read_bytes().startswith(content)
        steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
        assert steps == ([1, 1, 2, 3, 3] if path.name == "rank_00000.jsonl" else [1, 1, 2])


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["--parallel.tp", "2", "--parallel.pp", "2"], id="tp2-pp2"),
        pytest.param(["--parallel.pp", "2"], id="pp2-dp2", marks=pytest.mark.full),
    ],
)
def test_two_deterministic_runs_of_one_layout_are_equal_to_the_bit(
    layout: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*RECORD, *layout, "--train.deterministic", "True", "--train.dtype", "fp32"]
    for name in ("a", "b"):
        done = train(4, tmp_path / name, *flags)
        assert (
            done.code == 0 and "deterministic: the same layout gives the same bits" in done.output
        )
    ours, theirs = metrics(tmp_path / "a"), metrics(tmp_path / "b")
    assert [{k: line[k] for k in EQUAL} for line in ours] == [
        {k: line[k] for k in EQUAL} for line in theirs
    ]
    code, text = compared(capsys, tmp_path / "a", tmp_path / "b", "--exact")
    assert code == 0 and "The runs agree to the bit over 3 steps" in text, text


def test_bad_input_is_one_line_with_a_way_out(
    alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(1, tmp_path / "plain", "--train.steps", "1").code == 0
    assert not (tmp_path / "plain" / "record").exists()
    code, text = compared(capsys, alone, tmp_path / "plain")
    assert code == 2 and "has no record. Train it with --run.record True" in text
    assert text.count("\n") == 1
    code, text = compared(capsys, alone, tmp_path / "nowhere")
    assert code == 2 and "nowhere/config.yaml" in text and text.count("\n") == 1
    flags = ["--model.num_layers", "2", "--run.record", "True", "--train.steps", "1"]
    assert train(1, tmp_path / "small", *flags).code == 0
    code, text = compared(capsys, alone, tmp_path / "small")
    assert code == 2 and "other models" in text and text.count("\n") == 1
    for tolerance in ("nan", "inf", "-1", "1e9", "some"):
        with pytest.raises(SystemExit, match="2"):
            compared(capsys, alone, alone, "--tolerance", tolerance)


def test_the_command_needs_no_torch(alone: Path) -> None:
    done = run_without_torch("compare_runs.py", str(alone), str(alone))
    assert done.returncode == 0, done.stderr
    assert "worst relative difference 0" in done.stdout


def test_recorded_steps_grow_sparser_so_that_a_record_stays_small() -> None:
    steps = [step for step in range(1, 100_001) if is_recorded(step, 0)]
    assert steps[:100] == list(range(1, 101)) and steps[100:103] == [110, 120, 130]
    assert len(steps) == 100 + 3 * 90
    assert [s for s in range(1, 20) if is_recorded(s, 5)] == [1, 5, 10, 15]
