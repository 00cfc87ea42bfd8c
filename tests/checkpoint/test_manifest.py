from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.load import open_checkpoint
from megalite.checkpoint.manifest import MANIFEST, Manifest, together
from megalite.checkpoint.save import save
from megalite.errors import CheckpointError
from megalite.slices import Piece
from tests.checkpoint.jobs import (
    flip,
    make_state,
    results,
    rewrite,
    run_job,
    same_bits,
    save_job,
    whole,
    zeros_like,
)

FILE_0, FILE_1 = "rank_00000_000.safetensors", "rank_00001_000.safetensors"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Step 10 of two ranks, each with half of ``w``; beside it step 20 with other values."""
    paths = []
    for step in (20, 10):
        w = torch.arange(24.0).reshape(4, 6) + step
        hands = [[Piece("w", (4, 6), (2 * r, 0), w[2 * r : 2 * r + 2])] for r in range(2)]
        paths.append(save_job(tmp_path, step, hands))
    return paths[-1]


def swap(path: Path) -> None:
    os.rename(path / FILE_0, path / "aside")
    os.rename(path / FILE_1, path / FILE_0)
    os.rename(path / "aside", path / FILE_1)


def from_other_step(path: Path) -> None:
    (path / FILE_1).write_bytes((path.parent / "step_00000020" / FILE_1).read_bytes())


def link(path: Path) -> None:
    os.rename(path / FILE_1, path.parent / "elsewhere")
    os.symlink(path.parent / "elsewhere", path / FILE_1)


def link_manifest(path: Path) -> None:
    os.rename(path / MANIFEST, path.parent / "elsewhere")
    os.symlink(path.parent / "elsewhere", path / MANIFEST)


def pipe(path: Path) -> None:
    os.unlink(path / FILE_1)
    os.mkfifo(path / FILE_1)


def edit(old: str, new: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        text = (path / MANIFEST).read_text()
        assert text.count(old) >= 1
        (path / MANIFEST).write_text(text.replace(old, new, 1))

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a flipped bit": (lambda p: flip(p / FILE_1), FILE_1, "hash differs"),
    "a flipped bit of a header": (lambda p: flip(p / FILE_0, 20), FILE_0, "hash differs"),
    "a truncated file": (lambda p: os.truncate(p / FILE_1, 50), FILE_1, "has 50 bytes"),
    "a deleted file": (lambda p: os.unlink(p / FILE_0), FILE_0, "No such file"),
    "two ranks' files swapped": (swap, FILE_0, "hash differs"),
    "a file of another step": (from_other_step, FILE_1, "hash differs"),
    "a stray shard": (
        lambda p: (p / "rank_00002_000.safetensors").write_bytes(b""),
        "rank_00002_000.safetensors",
        "is not in the manifest",
    ),
    "a link out of the directory": (link, FILE_1, "is not a regular file"),
    "a pipe that would block": (pipe, FILE_1, "is not a regular file"),
    "a linked manifest": (link_manifest, MANIFEST, "is not a regular file"),
    "no manifest": (lambda p: os.unlink(p / MANIFEST), MANIFEST, "No such file"),
    "half a manifest": (lambda p: os.truncate(p / MANIFEST, 200), MANIFEST, "is not a manifest"),
    "an empty manifest": (lambda p: os.truncate(p / MANIFEST, 0), MANIFEST, "is not a manifest"),
    "a flipped bit of the manifest": (lambda p: flip(p / MANIFEST, 40), MANIFEST, ""),
    "an edited extra": (edit('"samples": 10', '"samples": 11'), MANIFEST, "was changed"),
    "a list for a manifest": (
        lambda p: (p / MANIFEST).write_text("[]"),
        MANIFEST,
        "is not a manifest",
    ),
    "a deeply nested manifest": (
        lambda p: (p / MANIFEST).write_text("[" * 100_000),
        MANIFEST,
        "is not a manifest",
    ),
}


def test_an_undamaged_checkpoint_opens(checkpoint: Path) -> None:
    assert open_checkpoint(checkpoint).step == 10


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_with_its_file(checkpoint: Path, damage: str) -> None:
    change, file, problem = DAMAGES[damage]
    change(checkpoint)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(checkpoint)
    assert caught.value.path == str(checkpoint / file)
    assert problem in caught.value.problem


def set_chunk(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda doc: doc["tensors"]["w"]["chunks"][0].update(fields)


def rename_file(name: str) -> Callable[[dict[str, Any]], object]:
    def change(doc: dict[str, Any]) -> None:
        doc["files"][name] = doc["files"].pop(FILE_0)
        doc["tensors"]["w"]["chunks"][0]["file"] = name

    return change


LIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a newer format": (lambda d: d.update(format=2), "has format 2; this version reads format 1"),
    "another dtype": (lambda d: d["tensors"]["w"].update(dtype="I8"), "no support for I8"),
    "too many dims": (lambda d: d["tensors"]["w"].update(shape=[1] * 60), "no support for F32"),
    "a larger tensor": (
        lambda d: d["tensors"]["w"].update(shape=[5, 6]),
        "(4, 0) is stored 0 times",
    ),
    "a smaller tensor": (lambda d: d["tensors"]["w"].update(shape=[3, 6]), "has no Chunk"),
    "a lost chunk": (lambda d: d["tensors"]["w"]["chunks"].pop(), "(2, 0) is stored 0 times"),
    "two chunks that overlap": (set_chunk(offset=[1, 0]), "(0, 0) is stored 0 times"),
    "a chunk stored twice": (set_chunk(offset=[2, 0]), "(0, 0) is stored 0 times"),
    "a chunk outside": (set_chunk(offset=[3, 0]), "has no Chunk"),
    "a chunk of other dims": (set_chunk(offset=[0], extent=[12]), "has no Chunk"),
    "too few bytes": (set_chunk(begin=8), "do not hold"),
    "bytes past the end": (set_chunk(begin=10**6, end=10**6 + 48), "do not hold"),
    "a negative offset": (set_chunk(offset=[-1, 0]), "-1 is not a size"),
    "a float": (set_chunk(begin=0.0), "0.0 is not a size"),
    "a truth value": (set_chunk(begin=True), "True is not a size"),
    "an unknown field": (set_chunk(stride=[1]), "stride"),
    "a file not listed": (set_chunk(file="x.safetensors"), "which is not listed"),
    "a path upwards": (rename_file("../secret.safetensors"), "is not the plain name"),
    "an absolute path": (rename_file("/etc/x.safetensors"), "is not the plain name"),
    "a path downwards": (rename_file("a/b.safetensors"), "is not the plain name"),
    "a file that is no shard": (rename_file("data.pkl"), "is not the plain name"),
    "a name with an end of line": (rename_file("x.safetensors\n"), "is not the plain name"),
    "a hidden file": (rename_file(".x.safetensors"), "is not the plain name"),
    "a step that is none": (lambda d: d.update(step="10"), "'10' is not a size"),
    "another step": (lambda d: d.update(step=11), "is of step 11"),
    "no files": (lambda d: d.pop("files"), "'files'"),
    "tensors as a list": (lambda d: d.update(tensors=[]), "is not a manifest"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused(checkpoint: Path, lie: str) -> None:
    change, problem = LIES[lie]
    rewrite(checkpoint, change)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(checkpoint)
    assert caught.value.path == str(checkpoint / MANIFEST)
    assert problem in caught.value.problem


def test_a_manifest_written_anew_without_a_lie_is_taken(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda doc: None)
    assert open_checkpoint(checkpoint).step == 10


def test_what_is_no_shard_is_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state()
    path = save(tmp_path, 1, whole(state), {})
    trap = tmp_path / "sprung"

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(trap),)

    for name in (".metadata", "data.pkl", "model.pt", "rank_00000_000.pkl"):
        (path / name).write_bytes(pickle.dumps(Trap()))
    opened: list[str] = []
    real_open = open

    def note(file: Any, *args: Any, **kwargs: Any) -> Any:
        opened.append(str(file))
        return real_open(file, *args, **kwargs)

    monkeypatch.setattr("builtins.open", note)
    got = zeros_like(state)
    open_checkpoint(path).read(whole(got))
    assert same_bits(got, state)
    assert not trap.exists()
    assert {Path(name).name for name in opened} == {"rank_00000_000.safetensors"}
    with real_open(path / "data.pkl", "rb") as file:
        pickle.load(file)
    assert trap.exists(), "the trap does not work"


def test_the_manifest_is_json_with_the_documented_fields(checkpoint: Path) -> None:
    document = json.loads((checkpoint / MANIFEST).read_text())
    assert list(document) == ["xxh3_128", "format", "step", "files", "tensors", "extra"]
    assert document["files"].keys() == {FILE_0, FILE_1}
    assert document["files"][FILE_0]["size"] == (checkpoint / FILE_0).stat().st_size
    w = document["tensors"]["w"]
    assert (w["dtype"], w["shape"]) == ("F32", [4, 6])
    assert w["chunks"][1]["offset"] == [2, 0] and w["chunks"][1]["extent"] == [2, 6]
    chunk = w["chunks"][1]
    data = (checkpoint / chunk["file"]).read_bytes()[chunk["begin"] : chunk["end"]]
    assert torch.frombuffer(bytearray(data), dtype=torch.float32)[0] == 22.0


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"samples": 2**60, "lr": 0.1 + 0.2, "note": "naïve ☃", "none": None, "list": [1, [2.5]]},
        {10: "ten", 9: "nine"},
        {"worst": float("-inf")},
    ],
)
def test_extra_comes_back_as_json_gives_it(tmp_path: Path, extra: dict[Any, Any]) -> None:
    path = save(tmp_path, 1, [], extra)
    assert open_checkpoint(path).extra == json.loads(json.dumps(extra))


def test_extra_that_is_no_json_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        save(tmp_path, 1, [], {"rng": torch.zeros(2)})
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_disagree_about_a_tensor_are_named(tmp_path: Path) -> None:
    hands = [
        [Piece("w", (2,), (0,), torch.zeros(1))],
        [Piece("w", (2,), (1,), torch.zeros(1, dtype=torch.float64))],
    ]
    with pytest.raises(CheckpointError, match=r"disagree about 'w': F32 \[2\] and F64 \[2\]"):
        save_job(tmp_path, 1, hands)


def test_a_failure_of_one_rank_is_the_same_error_on_all() -> None:
    def action(rank: int) -> str:
        if rank in (1, 2):
            raise CheckpointError(f"file{rank}", "is bad")
        if rank == 3:
            raise KeyError("a bug must not leave the others waiting")
        return "fine"

    outcomes = run_job(4, lambda rank, share: together(share, lambda: action(rank)))
    assert {repr(outcome) for outcome in outcomes} == {
        repr(CheckpointError("file1", "is bad (rank 1)"))
    }
    assert results(run_job(4, lambda r, share: together(share, lambda: r))) == [0, 1, 2, 3]


def test_the_cause_of_a_failure_stays_with_its_rank() -> None:
    def fail() -> None:
        raise KeyError("here")

    outcome = run_job(1, lambda rank, share: together(share, fail))[0]
    assert isinstance(outcome, CheckpointError)
    assert isinstance(outcome.__cause__, KeyError)
    assert outcome.problem == "KeyError: 'here'"


def test_coverage_is_proved_before_a_checkpoint_is_committed(tmp_path: Path) -> None:
    w = torch.zeros(4, 6)
    twice = [[Piece("w", (4, 6), (0, 0), w)]] * 2
    with pytest.raises(CheckpointError, match=r"element \(0, 0\) is stored 2 times"):
        save_job(tmp_path, 1, twice)
    half = [[Piece("w", (4, 6), (0, 0), w[:2])]]
    with pytest.raises(CheckpointError, match=r"element \(2, 0\) is stored 0 times"):
        save_job(tmp_path, 1, half)
    assert list(tmp_path.iterdir()) == []


def test_a_fresh_manifest_shares_nothing_with_another() -> None:
    Manifest(1).extra["x"] = 1
    assert Manifest(2).extra == {}
