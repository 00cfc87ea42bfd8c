from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint import background
from megalite.checkpoint.background import Saved, Saver
from megalite.checkpoint.load import latest, open_checkpoint
from megalite.checkpoint.manifest import Share
from megalite.checkpoint.save import write_part
from megalite.errors import CheckpointError
from megalite.slices import Piece
from tests.checkpoint.jobs import (
    State,
    full_disk,
    make_state,
    names_in,
    results,
    run_job,
    same_bits,
    whole,
    zeros_like,
)

RANKS = 3
LIMIT_S = 20.0


def saver(directory: Path, rank: int, share: Share, **options: Any) -> Saver:
    options = {"background": True, **options}
    return Saver(directory, rank=rank, world_size=RANKS, share=share, **options)


def rows(state: State, rank: int) -> list[Piece]:
    """A rank's row of each tensor."""
    return [Piece(n, (RANKS, 4), (rank, 0), t[rank : rank + 1]) for n, t in state.items()]


def make_rows(seed: int = 0) -> State:
    return {f"w{i}": torch.full((RANKS, 4), 10.0 * seed + i) for i in range(5)}


def read(path: Path, like: State) -> State:
    found = zeros_like(like)
    open_checkpoint(path).read(whole(found))
    return found


def until_told(saver: Saver) -> list[Saved]:
    """What a rank learns without asking the others."""
    give_up = time.monotonic() + LIMIT_S
    while not (told := saver.finished()):
        assert time.monotonic() < give_up
        time.sleep(0.01)
    return told


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Parts are written only once this is set."""
    opened = threading.Event()

    def write(*args: Any) -> None:
        assert opened.wait(LIMIT_S)
        write_part(*args)

    monkeypatch.setattr(background, "write_part", write)
    return opened


def save_and_change(directory: Path, gate: threading.Event) -> tuple[State, State]:
    """The state at the save, and what the checkpoint holds, though it was changed meanwhile."""
    state = make_state()
    before = {name: tensor.clone() for name, tensor in state.items()}
    saving = Saver(directory, rank=0, world_size=1, share=lambda t: [t], background=True)
    saving.save(7, whole(state), {})
    for tensor in state.values():
        tensor.zero_()
    gate.set()
    saving.wait()
    (saved,) = saving.finished()
    assert saved.error is None and saved.step == 7 and saved.stalled_s < saved.seconds
    return before, read(saved.path, state)


def test_what_is_saved_is_the_state_of_the_step(tmp_path: Path, gate: threading.Event) -> None:
    before, found = save_and_change(tmp_path, gate)
    assert same_bits(found, before)


def test_without_the_copy_it_would_be_a_later_state(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Saver, "_copied", lambda _, pieces: list(pieces))
    before, found = save_and_change(tmp_path, gate)
    assert not same_bits(found, before)


def test_all_ranks_write_and_rank_0_commits_without_being_asked(tmp_path: Path) -> None:
    states = [make_rows(n) for n in range(4)]

    def body(rank: int, share: Share) -> list[Saved]:
        mine, told = saver(tmp_path, rank, share, keep=2), []
        for step, state in enumerate(states, 1):
            mine.save(step, rows(state, rank), {"samples": step})
            if rank == 0:
                told += until_told(mine)
        mine.wait()
        return told + mine.finished()

    for told in results(run_job(RANKS, body)):
        assert [(s.step, s.error, s.warning) for s in told] == [(n, None, "") for n in range(1, 5)]
    assert names_in(tmp_path) == ["step_00000003", "step_00000004"]
    for path, state in zip(latest(tmp_path), states[:1:-1], strict=True):
        assert same_bits(read(path, state), state)


def test_a_save_begins_when_the_one_before_is_over(tmp_path: Path, gate: threading.Event) -> None:
    order: list[str] = []

    def body(rank: int, share: Share) -> None:
        mine = saver(tmp_path, rank, share)
        mine.save(1, rows(make_rows(1), rank), {})
        assert mine.finished() == []
        if rank == 0:
            order.append("first is under way")
            assert not (tmp_path / "step_00000001").exists()
            threading.Timer(0.1, lambda: (order.append("gate"), gate.set())).start()
        mine.save(2, rows(make_rows(2), rank), {})
        if rank == 0:
            order.append("second has begun")
            assert (tmp_path / "step_00000001").exists()
        mine.wait()

    results(run_job(RANKS, body))
    assert order == ["first is under way", "gate", "second has begun"]


def test_the_copy_is_made_in_the_same_memory_again(tmp_path: Path) -> None:
    seen: list[set[int]] = []
    state = make_state()
    saving = Saver(tmp_path, rank=0, world_size=1, share=lambda t: [t], background=True)
    for step, pieces in enumerate([whole(state), whole(state), whole(state)[:2]], 1):
        saving.save(step, pieces, {})
        seen.append({buffer.data_ptr() for buffer in saving._buffers.values()})
    saving.wait()
    assert seen[0] == seen[1] and len(seen[0]) == len(state)
    assert len(seen[2]) == 2 and seen[2] < seen[0], "what is no longer saved is let go"


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("marks", [True, False], ids=["a mark says so", "nothing can be written"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_is_told_on_every_rank_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, marks: bool, background: bool
) -> None:
    monkeypatch.setattr(os, "write", full_disk(f"step_00000002.tmp/rank_{rank:05d}"))
    if not marks:
        monkeypatch.setattr("megalite.checkpoint.background._mark", refuse_mark(rank))

    def body(me: int, share: Share) -> list[Saved]:
        mine, told = saver(tmp_path, me, share, background=background), []
        for step in (1, 2, 3):
            mine.save(step, rows(make_rows(step), me), {})
            if step == 2 and background and marks and me == 0:
                told += until_told(mine)
        mine.wait()
        return told + mine.finished()

    for told in results(run_job(RANKS, body)):
        (failed,) = [saved for saved in told if saved.error]
        assert failed.step == 2 and "No space left on device" in str(failed.error)
        assert [saved.step for saved in told] == [1, 2, 3]
    assert names_in(tmp_path) == ["step_00000001", "step_00000003"]
    for step, path in zip((3, 1), latest(tmp_path), strict=True):
        assert same_bits(read(path, make_rows()), make_rows(step))


def refuse_mark(rank: int) -> Callable[..., None]:
    real = background._mark

    def mark(tmp: Path, me: int, how: str, text: str = "") -> None:
        if me == rank and how == "failed":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tmp, me, how, text)

    return mark


def test_pieces_that_leave_a_gap_are_never_committed(tmp_path: Path) -> None:
    def body(rank: int, share: Share) -> list[Saved]:
        mine = saver(tmp_path, rank, share)
        mine.save(1, rows(make_rows(), rank) if rank != 1 else [], {})
        mine.wait()
        return mine.finished()

    ((saved,), *_) = results(run_job(RANKS, body))
    assert "is stored 0 times" in str(saved.error)
    assert names_in(tmp_path) == []


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise CheckpointError(tmp_path, "Permission denied")

    monkeypatch.setattr(background, "prune", refuse)
    saving = Saver(tmp_path, rank=0, world_size=1, share=lambda t: [t])
    saving.save(1, whole(make_state()), {})
    (saved,) = saving.finished()
    assert saved.error is None and "Permission denied" in saved.warning
    assert open_checkpoint(saved.path).step == 1


def test_a_save_at_once_and_one_behind_the_training_write_the_same_bytes(tmp_path: Path) -> None:
    found = []
    for behind in (False, True):
        folder = tmp_path / str(behind)
        saving = Saver(folder, rank=0, world_size=1, share=lambda t: [t], background=behind)
        saving.save(1, whole(make_state()), {"samples": 3})
        saving.wait()
        found.append({p.name: p.read_bytes() for p in (folder / "step_00000001").iterdir()})
    assert found[0] == found[1] and len(found[0]) == 2
