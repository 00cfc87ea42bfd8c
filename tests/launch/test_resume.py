"""Where a run begins, where it goes on, and what it says of a past that is not its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megalite.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from tests.launch.command import Result, events, forked, metrics, train

EVERY = ["--train.steps", "6", "--checkpoint.every", "1", "--checkpoint.keep", "9"]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps that nobody disturbed."""
    place = tmp_path_factory.mktemp("done") / "run"
    assert train(1, place, *EVERY).code == 0
    return place


def go(run: Path, *flags: str) -> Result:
    found = train(1, run, *EVERY, *flags)
    assert found.code == 0, found.output
    return found


def at(run: Path, step: int) -> str:
    return str(run / f"checkpoints/step_{step:08d}")


def begins(run: Path) -> list[int]:
    return [event["step"] for event in events(run, "start")]


def saved(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step_*"))


def lines(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in metrics(run)]


def test_a_run_that_began_from_a_checkpoint_goes_on_from_its_own(
    done: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source/step_00000002"
    shutil.copytree(at(done, 2), source)
    resume = ["--checkpoint.resume", str(source)]
    go(tmp_path / "run", *resume, "--run.stop_at", "4")
    shutil.rmtree(source)  # it is not needed any more
    go(tmp_path / "run", *resume)
    assert begins(tmp_path / "run") == [2, 4]
    assert lines(tmp_path / "run") == lines(done)[2:]


def test_a_run_that_goes_back_sets_what_came_after_aside(done: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(done, run)
    resume = ["--checkpoint.resume", at(run, 2), "--checkpoint.keep", "1"]
    found = go(run, *resume, "--run.stop_at", "3")
    assert saved(run) == [3] and "set aside" in found.output
    left = sorted(path.name for path in (run / "checkpoints.left").iterdir())
    assert left == [f"step_{step:08d}" for step in (3, 4, 5, 6)]
    go(run)
    assert lines(run) == lines(done)
    other = tmp_path / "other"
    shutil.copytree(done, other)
    go(other, "--checkpoint.resume", "none", "--run.stop_at", "1")
    assert saved(other) == [1] and [step for step, _ in lines(other)] == [1]


def be_restarted() -> None:
    import os

    os.environ["SLURM_RESTART_COUNT"] = "1"


def test_none_begins_anew_but_not_when_the_job_is_requeued(done: Path, tmp_path: Path) -> None:
    from tests.launch.command import SMALL, TINY

    run = tmp_path / "run"
    words = [*TINY, *SMALL, "--run.dir", str(run), *EVERY, "--checkpoint.resume", "none"]
    assert forked(1, [*words, "--run.stop_at", "3"]).code == 0
    assert forked(1, [*words, "--run.stop_at", "5"], change=be_restarted).code == 0
    assert forked(1, words).code == 0
    assert begins(run) == [0, 3, 0]
    assert lines(run) == lines(done)


def test_a_record_that_was_damaged_is_told_of(done: Path, tmp_path: Path) -> None:
    def drop(text: list[str]) -> list[str]:
        return text[:2] + text[3:]

    def garble(text: list[str]) -> list[str]:
        return [*text[:2], "garbage\n", *text[3:]]

    def cut(text: list[str]) -> list[str]:
        return text[:2]

    ways: dict[str, Callable[[list[str]], list[str]]] = {
        "drop": drop, "garble": garble, "cut": cut, "empty": lambda text: [], "whole": list,
    }  # fmt: skip
    for name, damage in ways.items():
        run = tmp_path / name
        shutil.copytree(done, run)
        shutil.rmtree(at(run, 6))
        path = run / "metrics.jsonl"
        text = path.read_text().splitlines(keepends=True)[:5]
        path.write_text("".join(damage(text)))
        found = go(run)
        told = events(run, "record_damaged")
        assert len(told) == (name != "whole") == ("warning: " + str(path) in found.output), name


def rewrite(path: Path, change: Callable[[Manifest], None]) -> None:
    """A manifest that is whole and wrong."""
    manifest = read_manifest(path / MANIFEST)
    change(manifest)
    (path / MANIFEST).write_bytes(manifest.to_json())


def test_a_checkpoint_that_lacks_what_a_run_needs_is_passed_over(
    done: Path, tmp_path: Path
) -> None:
    def lose_position(manifest: Manifest) -> None:
        del manifest.extra["position"]

    def lose_count(manifest: Manifest) -> None:
        manifest.extra["position"]["step"] = 3

    def lose_moment(manifest: Manifest) -> None:
        gone = next(name for name in manifest.tensors if name.startswith("optim.exp_avg_sq"))
        del manifest.tensors[gone]

    for change in (lose_position, lose_count, lose_moment):
        run = tmp_path / change.__name__
        shutil.copytree(done, run)
        rewrite(Path(at(run, 6)), change)
        rewrite(Path(at(run, 5)), lambda manifest: None)  # as it was
        found = go(run)
        assert begins(run) == [0, 5] and "passed over" in found.output, found.output
        assert lines(run) == lines(done)


def test_what_is_kept_for_good_outlives_the_setting(tmp_path: Path) -> None:
    keep = ["--train.steps", "6", "--checkpoint.every", "1", "--checkpoint.keep", "1"]
    every = ["--checkpoint.keep_every", "2", "--run.stop_at", "4"]
    assert train(1, tmp_path / "run", *keep, *every).code == 0
    assert train(1, tmp_path / "run", *keep).code == 0
    assert saved(tmp_path / "run") == [2, 4, 6]


@pytest.mark.parametrize("behind", [False, True], ids=["at once", "behind"])
def test_what_a_run_saves_after_a_damaged_checkpoint_stays(
    behind: bool, done: Path, tmp_path: Path
) -> None:
    """The damaged one has the higher step: by number alone all that is new would be old."""
    run = tmp_path / "run"
    shutil.copytree(done, run)
    for step in (3, 4, 5):
        shutil.rmtree(at(run, step))
    (shard,) = Path(at(run, 6)).glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    flags = ["--checkpoint.keep", "1", "--checkpoint.async_save", str(behind)]
    go(run, *flags, "--run.stop_at", "4")
    assert saved(run) == [4] and (run / "checkpoints.left/step_00000006").is_dir()
    (told,) = events(run, "set_aside")
    assert told["why"] == "passed over" and told["paths"][0].endswith("step_00000006")
    go(run, *flags)
    assert begins(run) == [0, 2, 4] and saved(run) == [6]
    assert lines(run) == lines(done)
    assert len(events(run, "set_aside")) == 1
