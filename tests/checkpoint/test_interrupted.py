"""A save that fails or is killed at any moment leaves the checkpoints before it good."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint import save as save_module
from megalite.checkpoint.load import latest, load_latest, open_checkpoint
from megalite.checkpoint.manifest import MANIFEST
from megalite.checkpoint.save import clean, discard, save
from megalite.errors import CheckpointError
from megalite.slices import Piece
from tests.checkpoint.jobs import (
    make_state,
    names_in,
    read_state,
    run_job,
    same_bits,
    save_job,
    whole,
)

# --- failures


def fail_on(rank: int, number: int) -> Callable[[int, memoryview], int]:
    """An ``os.write`` whose ``number``-th call on this rank finds the disk full."""
    real_write = os.write
    calls = 0

    def write(descriptor: int, data: memoryview) -> int:
        nonlocal calls
        if threading.current_thread().name == f"rank{rank}":
            calls += 1
            if calls >= number:
                raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(descriptor, data)

    return write


@pytest.mark.parametrize(
    ("rank", "number", "file"),
    [
        (1, 1, "rank_00001_000.safetensors"),
        (1, 3, "rank_00001_000.safetensors"),
        (2, 9, "rank_00002.json"),
        (0, 10, MANIFEST),
    ],
)
def test_a_full_disk_on_one_rank_is_the_same_error_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, number: int, file: str
) -> None:
    state = {f"w{i}": torch.full((3, 4), float(i)) for i in range(7)}
    hands = [[Piece(n, (3, 4), (r, 0), t[r : r + 1]) for n, t in state.items()] for r in range(3)]
    save_job(tmp_path, 1, hands)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail_on(rank, number))
        outcomes = run_job(
            3,
            lambda r, share: save(tmp_path, 2, hands[r], {}, rank=r, world_size=3, share=share),
        )
    problem = f"No space left on device (rank {rank})"
    expected = CheckpointError(tmp_path / "step_00000002.tmp" / file, problem)
    assert {repr(outcome) for outcome in outcomes} == {repr(expected)}
    assert names_in(tmp_path) == ["step_00000001"], "a full disk is not left full"
    assert same_bits(read_state(latest(tmp_path)[0], state), state)
    save_job(tmp_path, 2, hands)


def test_a_directory_that_cannot_be_made_is_the_same_error_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    directory = tmp_path / "file" / "checkpoints"
    outcomes = run_job(
        2, lambda r, share: save(directory, 1, [], {}, rank=r, world_size=2, share=share)
    )
    expected = CheckpointError(directory, "Not a directory (rank 0)")
    assert {repr(outcome) for outcome in outcomes} == {repr(expected)}


def test_an_error_in_the_making_of_pieces_reaches_all(tmp_path: Path) -> None:
    def pieces(rank: int) -> Any:
        yield Piece("w", (2,), (rank,), torch.zeros(1))
        if rank == 1:
            raise RuntimeError("moment missing")

    outcomes = run_job(
        2, lambda r, share: save(tmp_path, 1, pieces(r), {}, rank=r, world_size=2, share=share)
    )
    assert ["RuntimeError: moment missing (rank 1)" in str(o) for o in outcomes] == [True, True]


def test_a_rank_that_wrote_elsewhere_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as on a file system that the nodes do not share
    real = save_module.write_part

    def write_part(tmp: Path, rank: int, *args: Any) -> None:
        local = tmp if rank == 0 else tmp_path / "other node"
        local.mkdir(exist_ok=True)
        real(local, rank, *args)

    monkeypatch.setattr(save_module, "write_part", write_part)
    with pytest.raises(CheckpointError, match=r"rank_00001.json: No such file"):
        save_job(tmp_path / "job", 1, [[], []])


class Killed(BaseException):
    """The process ends here; nothing after it runs, not even error handling."""


CALLS = ("write", "fsync", "rename", "mkdir", "unlink", "rmdir")


def kill_at(patch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Let the system call with this number, and all later ones, never happen."""
    log: list[str] = []

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(log) < number:
                log.append(name)
                return real(*args, **kwargs)
            if name == "write" and len(log) == number:
                log.append("half a write")
                real(args[0], args[1][: len(args[1]) // 2])
            raise Killed

        return call

    for name in CALLS:
        patch.setattr(os, name, wrap(name, getattr(os, name)))
    return log


@pytest.mark.parametrize("step", [1, 2], ids=["replacing", "new"])
def test_a_kill_at_any_moment_leaves_a_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    old, new = make_state(1), make_state(2)
    seen = set()
    number = 0
    while True:
        directory = tmp_path / str(number)
        save(directory, 1, whole(old), {"samples": 1})
        ended = False
        with monkeypatch.context() as patch:
            log = kill_at(patch, number)
            try:
                save(directory, step, whole(new), {"samples": 2})
                ended = True
            except Killed:
                pass
        found, bad = load_latest(directory)
        assert found is not None and not bad, log
        expected = {1: old, 2: new}[found.extra["samples"]]
        assert same_bits(read_state(found.path, old), expected), log
        seen.add(found.extra["samples"])
        save(directory, 3, whole(old), {})
        assert set(names_in(directory)) <= {"step_00000001", "step_00000002", "step_00000003"}
        again = open_checkpoint(directory / f"step_{found.step:08d}")
        assert again.extra == found.extra, "cleaning up keeps what was good"
        if ended:
            break
        number += 1
    assert seen == {1, 2} and number > 12


def test_a_kill_in_a_removal_never_leaves_half_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(10):
        directory = tmp_path / str(number)
        save(directory, 1, whole(make_state(1)), {})
        path = save(directory, 2, whole(make_state(2)), {})
        with monkeypatch.context() as patch:
            kill_at(patch, number)
            try:
                discard(path)
                break
            except Killed:
                pass
        for left in latest(directory):
            open_checkpoint(left)
        clean(directory)
        assert set(names_in(directory)) <= {"step_00000001", "step_00000002"}
    assert 2 < number < 9


def test_leftovers_are_removed_by_the_next_save_and_other_files_are_not(tmp_path: Path) -> None:
    for name in ("step_00000004.tmp", "step_00000005.trash", "notes.tmp", "step_7.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    save(tmp_path, 6, [], {})
    assert names_in(tmp_path) == ["notes.tmp", "step_00000006", "step_7.tmp"]


def test_a_stale_file_of_an_earlier_attempt_is_not_taken_in(tmp_path: Path) -> None:
    stale = tmp_path / "step_00000001.tmp"
    stale.mkdir()
    (stale / "rank_00001_000.safetensors").write_bytes(b"old")
    path = save(tmp_path, 1, whole(make_state()), {})
    assert names_in(path) == [MANIFEST, "rank_00000_000.safetensors"]
