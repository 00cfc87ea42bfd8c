"""What a run does about a checkpoint that cannot be written."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from tests.checkpoint.jobs import full_disk
from tests.launch.command import SMALL, TINY, Result, events, forked, metrics

STEPS = 4


def run_out_of_room(step: int) -> None:
    """Have one rank of this training find the disk full when it writes the state of a step."""
    os.write = full_disk(f"step_{step:08d}.tmp/rank_00001")


def trained(run_dir: Path, full_at: int, behind: bool) -> Result:
    """Two replicas that save after every step."""
    words = [*TINY, *SMALL, "--run.dir", str(run_dir), "--train.steps", str(STEPS)]
    words += ["--checkpoint.every", "1", "--checkpoint.async_save", str(behind)]
    return forked(2, words, change=partial(run_out_of_room, full_at))


@pytest.mark.parametrize("behind", [False, True], ids=["at once", "in the background"])
def test_a_full_disk_costs_one_checkpoint_and_no_step(tmp_path: Path, behind: bool) -> None:
    done = trained(tmp_path, 2, behind)
    assert done.code == 0, done.output
    assert "the checkpoint of step 2 failed" in done.output
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4]
    (failed,) = events(tmp_path, "save_failed")
    assert failed["step"] == 2 and "No space left on device" in failed["problem"]
    assert [event["step"] for event in events(tmp_path, "save")] == [1, 3, 4]
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step_00000003", "step_00000004"]


@pytest.mark.parametrize("behind", [False, True], ids=["at once", "in the background"])
def test_a_run_whose_last_checkpoint_failed_does_not_end_well(tmp_path: Path, behind: bool) -> None:
    done = trained(tmp_path, STEPS, behind)
    assert done.code == 1
    assert "No space left on device" in done.output
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step_00000002", "step_00000003"]
