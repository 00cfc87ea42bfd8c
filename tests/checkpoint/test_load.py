from __future__ import annotations

import os
import random
import shutil
import threading
from pathlib import Path

import pytest
import torch

from megalite.checkpoint.load import latest, load_latest, open_checkpoint, prune
from megalite.checkpoint.manifest import MANIFEST, Share
from megalite.checkpoint.save import save
from megalite.errors import CheckpointError
from megalite.slices import Piece
from tests.checkpoint.jobs import (
    deal,
    flip,
    make_state,
    names_in,
    results,
    rewrite,
    run_job,
    same_bits,
    save_job,
    whole,
    zeros_like,
)


def steps(paths: list[Path]) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in paths]


def save_steps(directory: Path, *which: int) -> None:
    for step in which:
        save(directory, step, whole({"w": torch.full((6,), float(step))}), {"samples": 8 * step})


# --- reading


def test_every_misfit_is_listed_with_its_name_and_sizes(tmp_path: Path) -> None:
    path = save(tmp_path, 1, whole({"embedding": torch.zeros(65, 4), "b": torch.zeros(4)}), {})
    wanted = [
        Piece("embedding", (66, 4), (0, 0), torch.ones(66, 4)),
        Piece("b", (4,), (0,), torch.ones(4, dtype=torch.float64)),
        Piece("absent", (4,), (0,), torch.ones(4)),
        Piece("b", (4,), (3,), torch.ones(2)),
    ]
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path).read(wanted)
    assert caught.value.path == str(path / MANIFEST)
    assert caught.value.problem.split("; ") == [
        "'embedding' is stored with shape (65, 4), wanted (66, 4)",
        "'b' is stored as torch.float32, wanted torch.float64",
        "'absent' is not stored",
        "'b' of (4,) has no (2,) at (3,)",
    ]


def test_of_many_misfits_the_first_ten_are_listed(tmp_path: Path) -> None:
    path = save(tmp_path, 1, [], {})
    wanted = [Piece(f"w{i}", (1,), (0,), torch.ones(1)) for i in range(13)]
    with pytest.raises(CheckpointError, match="'w9' is not stored; and 3 more$"):
        open_checkpoint(path).read(wanted)


def test_a_misfit_on_one_rank_stops_all_before_anything_is_filled(tmp_path: Path) -> None:
    path = save(tmp_path, 1, whole({"w": torch.ones(4)}), {})
    got = [torch.zeros(4), torch.zeros(4)]

    def body(rank: int, share: Share, name: str) -> None:
        pieces = [Piece("w", (4,), (0,), got[rank])]
        if rank == 1:
            pieces.append(Piece(name, (4,), (0,), torch.zeros(4)))
        open_checkpoint(path).read(pieces, share=share)

    outcomes = run_job(2, lambda rank, share: body(rank, share, "absent"))
    expected = CheckpointError(path / MANIFEST, "'absent' is not stored (rank 1)")
    assert {repr(outcome) for outcome in outcomes} == {repr(expected)}
    assert not torch.cat(got).any()
    results(run_job(2, lambda rank, share: body(rank, share, "w")))
    assert torch.cat(got).all()


def test_a_cast_happens_only_when_asked_for(tmp_path: Path) -> None:
    path = save(tmp_path, 1, whole({"w": torch.tensor([1.0, 2.5, 1e-3])}), {})
    got = torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"stored as torch.float32, wanted torch.bfloat16"):
        open_checkpoint(path).read(whole({"w": got}))
    assert not got.any()
    open_checkpoint(path).read(whole({"w": got}), cast=True)
    assert got.tolist() == torch.tensor([1.0, 2.5, 1e-3]).bfloat16().tolist()


def test_reading_never_changes_the_files(tmp_path: Path) -> None:
    state = make_state()
    path = save(tmp_path, 1, whole(state), {})
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    got = zeros_like(state)
    checkpoint = open_checkpoint(path)
    checkpoint.read(whole(got))
    for tensor in got.values():
        tensor.zero_()
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    checkpoint.read(whole(got))
    assert same_bits(got, state)


def test_what_was_read_does_not_depend_on_the_files_any_more(tmp_path: Path) -> None:
    state = make_state()
    path = save(tmp_path, 1, whole(state), {})
    got = zeros_like(state)
    open_checkpoint(path).read(whole(got))
    for file in path.glob("*.safetensors"):
        os.truncate(file, 0)
    assert same_bits(got, state)


def test_missing_and_unwanted_names_are_told_apart(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path, 1, whole(make_state()), {}))
    wanted = ["counts", "layers.1.weight", "embedding.weight"]
    assert checkpoint.missing(wanted) == ["layers.1.weight"]
    assert checkpoint.unwanted(wanted) == ["layers.0.moment", "layers.0.scale", "layers.0.weight"]
    assert checkpoint.missing(checkpoint.names) == checkpoint.unwanted(checkpoint.names) == []


def two_files(directory: Path) -> Path:
    hands = [[Piece(f"w{r}", (64,), (0,), torch.arange(64.0) + r)] for r in range(2)]
    return save_job(directory, 1, hands)


def test_only_the_files_that_are_read_are_verified_on_request(tmp_path: Path) -> None:
    path = two_files(tmp_path)
    flip(path / "rank_00001_000.safetensors")
    checkpoint = open_checkpoint(path, verify="mine")
    got = torch.zeros(64)
    checkpoint.read([Piece("w0", (64,), (0,), got)])
    assert got.tolist() == list(range(64))
    with pytest.raises(CheckpointError, match="rank_00001_000.safetensors: is damaged"):
        checkpoint.read([Piece("w1", (64,), (0,), got)])
    assert got.tolist() == list(range(64)), "filled from a damaged file"
    open_checkpoint(path, verify="none").read([Piece("w1", (64,), (0,), got)])
    assert got.tolist() != [i + 1.0 for i in range(64)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_each_file_is_verified_by_one_rank(tmp_path: Path, world_size: int) -> None:
    state = {f"w{i}": torch.zeros(4 + i) for i in range(6)}
    checkpoint = open_checkpoint(save(tmp_path, 1, whole(state), {}, max_file_bytes=1))
    shares = [checkpoint.files_to_verify(rank, world_size) for rank in range(world_size)]
    assert sorted(sum(shares, [])) == sorted(checkpoint.manifest.files)
    assert max(map(len, shares)) == -(-6 // world_size)


# --- which checkpoint


def test_checkpoints_are_listed_newest_first_and_nothing_else_is(tmp_path: Path) -> None:
    save_steps(tmp_path, 2, 10, 100_000_000)
    for name in ("step_00000011.tmp", "step_00000012.trash", "step_13", "best"):
        (tmp_path / name).mkdir()
    assert steps(latest(tmp_path)) == [100_000_000, 10, 2]
    assert latest(tmp_path / "absent") == []


def test_without_a_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert load_latest(tmp_path) == (None, [])
    assert load_latest(tmp_path / "absent") == (None, [])
    with pytest.raises(CheckpointError, match="No such file"):
        open_checkpoint(tmp_path / "step_00000001")


def test_a_directory_that_cannot_be_listed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Not a directory"):
        load_latest(tmp_path / "file")


def test_the_newest_good_one_is_taken_and_the_bad_ones_are_told(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4)
    flip(tmp_path / "step_00000004" / "rank_00000_000.safetensors")
    os.unlink(tmp_path / "step_00000003" / MANIFEST)
    found, bad = load_latest(tmp_path)
    assert found is not None and found.step == 2 and found.extra == {"samples": 16}
    assert [Path(error.path).relative_to(tmp_path).as_posix() for error in bad] == [
        "step_00000004/rank_00000_000.safetensors",
        "step_00000003/manifest.json",
    ]


def test_only_bad_ones_are_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    for step in (1, 2):
        flip(tmp_path / f"step_{step:08d}" / "rank_00000_000.safetensors")
    with pytest.raises(CheckpointError, match=r"no good checkpoint: .*step_00000002.*; .*00000001"):
        load_latest(tmp_path)


def test_a_fault_that_one_rank_finds_turns_all_to_the_same_older_one(tmp_path: Path) -> None:
    hands = [[Piece(f"w{r}", (8,), (0,), torch.ones(8))] for r in range(3)]
    for step in (1, 2):
        save_job(tmp_path, step, hands)
    flip(tmp_path / "step_00000002" / "rank_00001_000.safetensors")
    outcomes = results(
        run_job(3, lambda rank, share: load_latest(tmp_path, rank=rank, world_size=3, share=share))
    )
    assert [found.step for found, _ in outcomes if found] == [1, 1, 1]
    assert len({str(bad) for _, [bad] in outcomes}) == 1


def test_each_file_is_hashed_once_by_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_job(tmp_path, 1, deal(make_state(), 4, random.Random(0)))
    hashed: list[str] = []
    monkeypatch.setattr(
        "megalite.checkpoint.load.check_hash", lambda path, info: hashed.append(path.name)
    )
    results(
        run_job(2, lambda rank, share: load_latest(tmp_path, rank=rank, world_size=2, share=share))
    )
    assert len(hashed) == 4 and len(set(hashed)) == 4


def test_what_rank_0_sees_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(tmp_path, 1, 2)
    real = latest

    def blind(directory: Path) -> list[Path]:
        return real(directory) if threading.current_thread().name == "rank0" else []

    monkeypatch.setattr("megalite.checkpoint.load.latest", blind)
    outcomes = results(
        run_job(2, lambda rank, share: load_latest(tmp_path, rank=rank, world_size=2, share=share))
    )
    assert [found and found.step for found, _ in outcomes] == [2, 2]


def test_a_checkpoint_that_was_being_replaced_is_found(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    os.rename(tmp_path / "step_00000002", tmp_path / "step_00000002.old")
    found, bad = load_latest(tmp_path)
    assert found is not None and found.step == 2 and not bad
    shutil.copytree(tmp_path / "step_00000002.old", tmp_path / "step_00000002")
    assert latest(tmp_path)[0].name == "step_00000002"


def test_a_checkpoint_under_another_steps_name_is_refused(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    os.rename(tmp_path / "step_00000001", tmp_path / "step_00000009")
    with pytest.raises(CheckpointError, match="is of step 1"):
        open_checkpoint(tmp_path / "step_00000009")
    os.rename(tmp_path / "step_00000009", tmp_path / "best")
    assert open_checkpoint(tmp_path / "best").step == 1


# --- which are kept


def test_the_newest_and_each_mth_step_are_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, *range(1, 11))
    removed = prune(tmp_path, keep=2, keep_every=4)
    assert steps(latest(tmp_path)) == [10, 9, 8, 4]
    assert steps(removed) == [7, 6, 5, 3, 2, 1]
    assert prune(tmp_path, keep=2) == [tmp_path / "step_00000008", tmp_path / "step_00000004"]
    assert names_in(tmp_path) == ["step_00000009", "step_00000010"]


def test_nothing_is_removed_while_there_are_few(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    assert prune(tmp_path, keep=3) == []
    assert steps(latest(tmp_path)) == [2, 1]


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep must be at least 1"):
        prune(tmp_path, keep=0)


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4)
    rewrite(tmp_path / "step_00000004", lambda doc: doc.update(format=9))
    prune(tmp_path, keep=2)
    assert steps(latest(tmp_path)) == [4, 3, 2]


def test_what_is_saved_is_not_old_beside_a_later_one_that_was_passed_over(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 9)
    assert prune(tmp_path, keep=1, last_step=2) == [tmp_path / "step_00000001"]
    assert steps(latest(tmp_path)) == [9, 2]
    os.rename(tmp_path / "step_00000009", tmp_path / "step_00000009.old")
    assert prune(tmp_path, keep=1, last_step=9) == [tmp_path / "step_00000002"]


def test_pruning_removes_leftovers_so_that_none_comes_back(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    shutil.copytree(tmp_path / "step_00000001", tmp_path / "step_00000001.old")
    (tmp_path / "step_00000005.trash").mkdir()
    prune(tmp_path, keep=1)
    assert names_in(tmp_path) == ["step_00000002"]
