"""A run that is stopped and taken up again leaves the record of one that was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch import pretrain_gpt
from megalite.mesh import TorchTransport
from megalite.metrics import read_lines
from tests.launch.reconfiguring import whole_run
from tests.ranks import run_ranks

FLAGS = ["--train.steps", "6", "--train.eval_every", "2", "--train.eval_batches", "1"]


def asked_in(transport: TorchTransport, run_dir: Path, number: int) -> None:
    """A run that is asked to stop in this step, which is known in the next."""
    inner = pretrain_gpt.train_step

    def step(training: Any, loader: Any, recorder: Any, at: int) -> None:
        if at == number:
            training.control.ask_stop()
        inner(training, loader, recorder, at)

    pretrain_gpt.train_step = step
    whole_run(transport, run_dir, FLAGS)


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    return read_lines(run_dir / "eval.jsonl")


def test_an_evaluation_that_a_stop_left_out_is_made_once_when_the_run_goes_on(
    tmp_path: Path,
) -> None:
    calm, stopped = tmp_path / "calm", tmp_path / "stopped"
    run_ranks(1, whole_run, calm, FLAGS)
    run_ranks(1, asked_in, stopped, 3)
    assert [line["step"] for line in evaluations(stopped)] == [2]
    assert read_lines(stopped / "metrics.jsonl")[-1]["step"] == 4
    run_ranks(1, asked_in, stopped, 5)  # goes on from 4, and stops at the end
    assert evaluations(stopped) == evaluations(calm)
    assert [line["step"] for line in evaluations(calm)] == [2, 4, 6]
    run_ranks(1, whole_run, stopped, FLAGS)  # is done; nothing is owed
    assert evaluations(stopped) == evaluations(calm)
