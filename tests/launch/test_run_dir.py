"""What stands in the way in a run's directory is named before anything starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch import run_dir
from launch.config import CONFIG, DATA, Config, load_config
from launch.run_dir import check_run_dir
from megalite.config import to_yaml
from megalite.errors import ConfigError
from tests.launch.command import TINY

NO_DATA: Any = None


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A run that has begun, in a directory of its own."""
    monkeypatch.setattr(run_dir, "data_identity", lambda data: ["a hash"])
    cfg = load_config([*TINY, "--run.dir", str(tmp_path)])
    (tmp_path / CONFIG).write_bytes(to_yaml(cfg).encode())
    (tmp_path / DATA).write_text('["a hash"]')
    (tmp_path / "lock").write_text("")
    return cfg


def as_directory(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return change


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "its data are no JSON": (lambda f: (f / DATA).write_text("{"), "it is no JSON"),
    "its data are no text": (lambda f: (f / DATA).write_bytes(b"\xff"), "it is no JSON"),
    "its lock is a directory": (as_directory("lock"), "lock is something else"),
    "its metrics are a directory": (as_directory("metrics.jsonl"), "is something else"),
    "its checkpoints are a file": (
        lambda f: (f / "checkpoints").write_text(""),
        "checkpoints is something else",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_start_cannot_use_is_one_error(begun: Config, wrong: str) -> None:
    folder = Path(begun.run.dir)
    assert check_run_dir(begun, NO_DATA) == []
    change, words = WRONG[wrong]
    change(folder)
    before = sorted(folder.iterdir())
    with pytest.raises(ConfigError, match=words) as caught:
        check_run_dir(begun, NO_DATA)
    assert caught.value.field == "run.dir" and sorted(folder.iterdir()) == before


@pytest.mark.parametrize("name", ["", "lock", CONFIG, DATA])
def test_what_cannot_be_written_is_named(
    begun: Config, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = Path(begun.run.dir, name)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != closed)
    with pytest.raises(ConfigError, match=f"{closed} cannot be written"):
        check_run_dir(begun, NO_DATA)


def test_a_new_directory_that_cannot_be_written_is_named(
    begun: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = load_config([*TINY, "--run.dir", str(tmp_path / "new")])
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="new cannot be written"):
        check_run_dir(cfg, NO_DATA)
