"""What a run does about a step that is not finite, as a user sees it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launch import pretrain_gpt
from tests.launch.command import SMALL, TINY, Result, events, forked, metrics, train
from tests.resilience.plant import plant

LAYOUT = ["--parallel.tp", "2", "--parallel.pp", "2"]
HIT = {"rank": 2, "step": 3, "microbatch": 0, "layer": "layers.2", "way": "F", "times": 1}
PLACE = "rank 2 (stage 1): the output of layers.2, microbatch 0"


def planted(run_dir: Path, wanted: dict[str, Any], *flags: str) -> Result:
    """Four ranks, tp 2 x pp 2, of which one is hit."""
    words = [*TINY, *SMALL, "--run.dir", str(run_dir), *LAYOUT, "--train.steps", "6", *flags]
    return forked(4, words, change=partial(let_be_hit, wanted))


def let_be_hit(wanted: dict[str, Any]) -> None:
    """Have a layer's output or gradient become infinite on one rank of this training."""
    step_of = pretrain_gpt.train_step
    kind = {k: wanted[k] for k in ("layer", "microbatch", "way", "times")}

    def hit(training: Any, loader: Any, recorder: Any, step: int) -> None:
        if (step, training.mesh.rank) != (wanted["step"], wanted["rank"]):
            return step_of(training, loader, recorder, step)
        hooked = plant(training, **kind)
        step_of(training, loader, recorder, step)
        hooked.remove()

    pretrain_gpt.train_step = hit


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("clean")
    done = train(1, out, "--train.steps", "6")
    assert done.code == 0, done.output
    return metrics(out)


def test_stop_names_the_place_and_saves_nothing_of_the_step(tmp_path: Path) -> None:
    done = planted(tmp_path, HIT, "--checkpoint.every", "1")
    assert done.code != 0
    assert f"first not finite on {PLACE}; nothing of it is saved" in done.last_lines()
    assert [line["skipped"] for line in metrics(tmp_path)] == [False, False, True]
    assert events(tmp_path, "bad_step")[0]["place"] == PLACE
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept[-1] == "step_00000002"


def test_skip_goes_on_and_what_was_skipped_survives_a_resume(
    tmp_path: Path, clean: list[dict[str, Any]]
) -> None:
    skip = ["--train.bad_step", "skip", "--checkpoint.every", "4"]
    done = planted(tmp_path, HIT, *skip, "--run.stop_at", "4")
    assert done.code == 0 and PLACE in done.output, done.output
    again = train(1, tmp_path, "--train.steps", "6", *skip)
    assert again.code == 0, again.output
    lines = metrics(tmp_path)
    assert [line["skipped"] for line in lines] == [False, False, True, False, False, False]
    assert lines[2]["loss"] == "nan" and events(tmp_path, "skip")[0]["step"] == 3
    saved = tmp_path / "checkpoints" / "step_00000006" / "manifest.json"
    assert json.loads(saved.read_text())["extra"]["position"]["updates"] == 5
    for step in (0, 1):
        assert lines[step]["loss"] == pytest.approx(clean[step]["loss"], rel=1e-10)
    assert lines[4]["loss"] != pytest.approx(clean[4]["loss"], rel=1e-10)


def test_replay_takes_a_transient_fault_back_and_stops_at_one_that_comes_again(
    tmp_path: Path, clean: list[dict[str, Any]]
) -> None:
    done = planted(tmp_path / "once", HIT, "--train.bad_step", "replay")
    assert done.code == 0, done.output
    assert "a transient fault; first not finite on " + PLACE in done.output
    assert events(tmp_path / "once", "transient")[0]["place"] == PLACE
    for line, expected in zip(metrics(tmp_path / "once"), clean, strict=True):
        for key in ("loss", "grad_norm", "tokens"):
            assert line[key] == pytest.approx(expected[key], rel=1e-10)
        assert not line["skipped"]
    done = planted(tmp_path / "twice", {**HIT, "times": 2}, "--train.bad_step", "replay")
    assert done.code != 0
    assert "and neither when computed again; first not finite on " + PLACE in done.last_lines()


def test_fp16_trains_and_keeps_its_scale_over_a_resume(tmp_path: Path) -> None:
    flags = [
        "--train.dtype",
        "fp16",
        "--train.loss_scale",
        "64",
        "--train.loss_scale_interval",
        "2",
    ]
    flags += ["--checkpoint.every", "2"]
    done = planted(tmp_path, {**HIT, "way": "B"}, *flags, "--run.stop_at", "4")
    assert done.code == 0, done.output
    assert "step 3 skipped: an overflow, the loss scale is now 64" in done.output
    again = train(2, tmp_path, "--train.steps", "6", *flags)
    assert again.code == 0, again.output
    saved = tmp_path / "checkpoints" / "step_00000006" / "manifest.json"
    # 64, 128 after two good steps, 64 at the overflow, 128 after two more
    assert json.loads(saved.read_text())["extra"]["loss_scale"] == [128.0, 1.0]
    assert [line["skipped"] for line in metrics(tmp_path)] == [False, False, True, *[False] * 3]
