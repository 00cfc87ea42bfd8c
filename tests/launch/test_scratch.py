"""What a launcher leaves in /tmp is removed by the next, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch import scratch as module
from launch.scratch import remove_left, scratch
from tests.launch.command import ROOT

LIVES = """
import sys
sys.path[0] = "."
from launch.scratch import scratch
with scratch() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_directory_goes_with_its_owner_or_after_it(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": "/tmp"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", LIVES]
    process = subprocess.Popen(command, cwd=ROOT, env=env, text=True, **pipes)  # type: ignore[call-overload]
    try:
        found = Path(process.stdout.readline().strip())
        remove_left(found.parent)
        assert found.is_dir(), "its owner lives"
        process.kill()
        process.wait()
        assert found.is_dir()
        remove_left(found.parent)
        assert not found.exists()
    finally:
        process.kill()
        process.communicate()
    with scratch() as mine:
        assert mine.is_dir()
    assert not mine.exists()


def test_only_real_directories_of_this_user_with_an_owners_file_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left(name: str, owner: str = "owner") -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / owner).touch()
        return tmp_path / name

    dead, nobodys, others = left("megalite_a"), left("megalite_b", "control"), left("x_c")
    (tmp_path / "megalite_d").symlink_to(others)
    linked = left("megalite_e", "control")
    (linked / "owner").symlink_to(dead / "owner")
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "getuid", lambda: os.geteuid() + 1)
        remove_left(tmp_path)
    assert dead.exists(), "another user's"
    remove_left(tmp_path)
    assert not dead.exists()
    assert nobodys.exists() and others.exists() and linked.exists()
    assert (tmp_path / "megalite_d").is_symlink()
