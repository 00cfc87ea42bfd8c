from __future__ import annotations

import errno
import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor, nn

from megalite.checkpoint import save as save_module
from megalite.checkpoint.load import latest, load_latest, open_checkpoint
from megalite.checkpoint.manifest import MANIFEST
from megalite.checkpoint.piece import view
from megalite.checkpoint.save import blocks, clean, discard, save
from megalite.errors import CheckpointError
from megalite.slices import Piece
from tests.checkpoint.jobs import (
    State,
    bits,
    deal,
    make_state,
    names_in,
    results,
    run_job,
    same_bits,
    save_job,
    whole,
    zeros_like,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64]


def read_state(path: Path, like: State) -> State:
    got = zeros_like(like)
    open_checkpoint(path).read(whole(got))
    return got


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4))
@settings(deadline=None, max_examples=25)
def test_any_layout_is_read_by_any_other(
    tmp_path_factory: pytest.TempPathFactory, seed: int, writers: int, readers: int
) -> None:
    rng = random.Random(seed)
    directory = tmp_path_factory.mktemp("job")
    state = make_state(seed % 1000)
    path = save_job(directory, 7, deal(state, writers, rng))
    got = zeros_like(state)
    hands = deal(got, readers, rng)
    checkpoint = open_checkpoint(path)
    results(run_job(readers, lambda rank, share: checkpoint.read(hands[rank], share=share)))
    assert same_bits(got, state)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_pattern_survives(tmp_path: Path, dtype: torch.dtype) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    special = bits((4096,), dtype, 5)
    state = {"w": patterns.view(dtype) if dtype.itemsize == 2 else special}
    if dtype.is_floating_point:
        special[:4] = torch.tensor([-0.0, float("nan"), float("inf"), -float("nan")], dtype=dtype)
        assert state["w"].isnan().sum() > 1
    assert same_bits(read_state(save(tmp_path, 1, whole(state), {}), state), state)


def test_equal_bits_are_told_from_equal_numbers() -> None:
    assert not same_bits({"w": torch.tensor([0.0])}, {"w": torch.tensor([-0.0])})
    assert same_bits({"w": torch.tensor([torch.nan])}, {"w": torch.tensor([torch.nan])})


def test_the_safetensors_library_reads_the_files(tmp_path: Path) -> None:
    state = make_state()
    path = save_job(tmp_path, 3, deal(state, 3, random.Random(1)))
    manifest = open_checkpoint(path).manifest
    seen = 0
    for name in manifest.files:
        with safe_open(path / name, framework="pt") as file:
            assert file.metadata() == {"format": "megalite", "step": "3"}
            stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        for key, tensor in stored.items():
            base, _, sides = key.partition("[")
            full = state[base]
            ranges = [s.split(":") for s in sides.rstrip("]").split(",")] if sides else []
            index = tuple(slice(int(start), int(stop)) for start, stop in ranges)
            assert same_bits({"x": tensor}, {"x": full[index]})
            seen += tensor.numel()
    assert seen == sum(tensor.numel() for tensor in state.values())


def test_every_tensor_is_aligned_to_its_items(tmp_path: Path) -> None:
    path = save(tmp_path, 1, whole(make_state()), {})
    entries = open_checkpoint(path).manifest.tensors.values()
    items = {"F64": 8, "I64": 8, "F32": 4, "F16": 2, "BF16": 2}
    assert all(c.begin % items[entry.dtype] == 0 for entry in entries for c in entry.chunks)


def test_a_rank_begins_another_file_above_the_limit(tmp_path: Path) -> None:
    state = {f"w{i}": torch.full((10,), float(i)) for i in range(5)}
    path = save(tmp_path, 1, whole(state), {}, max_file_bytes=80)
    assert names_in(path) == [
        MANIFEST,
        *(f"rank_00000_{i:03d}.safetensors" for i in range(3)),
    ]
    assert same_bits(read_state(path, state), state)


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    paths = [save_job(tmp_path / name, 1, deal(make_state(), 2, random.Random(3))) for name in "ab"]
    first, second = ({f.name: f.read_bytes() for f in path.iterdir()} for path in paths)
    assert first == second


def test_only_what_a_rank_owns_is_written(tmp_path: Path) -> None:
    w = torch.ones(3)
    replicas = [[Piece("w", (3,), (0,), w * (r + 1), owner=r == 0)] for r in range(2)]
    path = save_job(tmp_path, 1, replicas)
    assert [f.name for f in path.glob("*.safetensors")] == ["rank_00000_000.safetensors"]
    assert same_bits(read_state(path, {"w": w}), {"w": w})


def test_empty_pieces_and_empty_tensors_keep_their_names(tmp_path: Path) -> None:
    state = {"none": torch.zeros(0, 3), "w": torch.ones(2)}
    pieces = [*whole(state), Piece("w", (2,), (2,), torch.zeros(0))]
    path = save(tmp_path, 1, pieces, {})
    assert open_checkpoint(path).names == ["none", "w"]
    assert same_bits(read_state(path, state), state)


def test_parameters_are_written_and_read_in_place(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    path = save(tmp_path, 1, [Piece("w", (4, 2), (0, 0), weight[:, :2])], {})
    other = nn.Parameter(torch.zeros(4, 2))
    open_checkpoint(path).read([Piece("w", (4, 2), (0, 0), other)])
    assert other.requires_grad and other.grad_fn is None and bool((other == 1).all())


@pytest.mark.parametrize(
    "piece",
    [
        Piece("w", (4,), (0,), torch.zeros(4, dtype=torch.int32)),
        Piece("w", (4,), (1,), torch.zeros(4)),
        Piece("w", (4, 1), (0,), torch.zeros(4)),
    ],
    ids=["dtype", "outside", "dims"],
)
def test_a_piece_that_cannot_be_stored_is_named(tmp_path: Path, piece: Piece) -> None:
    with pytest.raises(CheckpointError, match="'w' of .* cannot store torch"):
        save(tmp_path, 1, [piece], {})


@pytest.mark.parametrize("name", ["w", "__metadata__"])
def test_a_name_that_is_taken_in_the_file_is_refused(tmp_path: Path, name: str) -> None:
    pieces = [Piece("w", (4,), (0,), torch.zeros(4)), Piece(name, (4,), (0,), torch.zeros(4))]
    with pytest.raises(CheckpointError, match=f"'{name}' is to be written twice"):
        save(tmp_path, 1, pieces, {})


# --- memory


def address(block: memoryview) -> int:
    return int(np.frombuffer(block, np.uint8).__array_interface__["data"][0])


def transposed(shape: tuple[int, ...]) -> Tensor:
    return bits(shape[::-1], torch.bfloat16, 1).permute(*reversed(range(len(shape))))


@pytest.mark.parametrize(
    "tensor",
    [
        bits((40, 30), torch.float32, 1),
        bits((40, 30), torch.float32, 1)[:, 3:20],
        bits((3, 900), torch.float64, 2)[:, ::2],
        transposed((7, 11, 13)),
        torch.ones(1).expand(50, 50),
        torch.tensor(1.5),
    ],
    ids=["whole", "columns", "long rows", "transposed", "expanded", "scalar"],
)
def test_blocks_are_the_bytes_in_row_major_order(
    tensor: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_module, "BLOCK_BYTES", 256)
    found = list(blocks(tensor))
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    assert b"".join(found) == raw
    assert max(len(block) for block in found) <= 256


def test_what_is_contiguous_is_written_from_its_own_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"a": torch.randn(1000, 100), "b": torch.randn(300).bfloat16()}
    written: list[tuple[int, int]] = []
    real_write = os.write

    def note(descriptor: int, data: memoryview) -> int:
        written.append((address(data), len(data)))
        return real_write(descriptor, data)

    monkeypatch.setattr(os, "write", note)
    monkeypatch.setattr(save_module, "BLOCK_BYTES", 4096)
    save(tmp_path, 1, whole(state), {})
    own = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in state.values()]
    inside = sum(n for at, n in written if any(lo <= at and at + n <= hi for lo, hi in own))
    assert inside == sum(t.nbytes for t in state.values())
    outside = sum(n for _, n in written) - inside
    assert outside < 4096, "headers and manifests only"


def test_of_a_strided_tensor_one_block_at_a_time_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = torch.randn(1000, 128)[:, :64]
    sizes: list[int] = []
    real_write = os.write

    def note(descriptor: int, data: memoryview) -> int:
        sizes.append(len(data))
        return real_write(descriptor, data)

    monkeypatch.setattr(os, "write", note)
    monkeypatch.setattr(save_module, "BLOCK_BYTES", 4096)
    path = save(tmp_path, 1, [Piece("w", (1000, 64), (0, 0), w)], {})
    assert max(sizes) <= 4096
    assert same_bits(read_state(path, {"w": w}), {"w": w})


def test_a_short_write_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state()
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[: 1 + len(data) // 2]))
    path = save(tmp_path, 1, whole(state), {})
    assert same_bits(read_state(path, state), state)


# --- durability


def test_all_is_on_the_disk_before_the_rename_and_the_rename_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        log.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_fsync(descriptor)

    def rename(source: Path, target: Path) -> None:
        log.append(f"{source.name} -> {target.name}")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    save(tmp_path / "job", 1, whole({"w": torch.ones(2)}), {})
    assert log == [
        "rank_00000_000.safetensors",
        "rank_00000.json",
        MANIFEST,
        "step_00000001.tmp",
        "step_00000001.tmp -> step_00000001",
        "job",
    ]


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


def test_a_step_saved_again_is_replaced(tmp_path: Path) -> None:
    old, new = make_state(1), make_state(2)
    save_job(tmp_path, 1, deal(old, 3, random.Random(0)))
    path = save(tmp_path, 1, whole(new), {})
    assert same_bits(read_state(path, new), new)
    assert names_in(tmp_path) == ["step_00000001"]


# --- the format does not change unnoticed

FORMAT_1 = Path(__file__).parent / "format_1" / "step_00000003"


def format_1_hands() -> list[list[Piece]]:
    w = torch.arange(12, dtype=torch.float32).reshape(3, 4) / 8
    s = torch.tensor(-0.5, dtype=torch.bfloat16)
    n = torch.arange(5, dtype=torch.int64)
    return [
        [Piece("w", (3, 4), (0, 0), view(w, (0, 0), ((0, 0), (3, 1)))), Piece("s", (), (), s)],
        [Piece("w", (3, 4), (0, 1), view(w, (0, 0), ((0, 1), (3, 3)))), Piece("n", (5,), (0,), n)],
    ]


def test_a_stored_checkpoint_of_format_1_is_read() -> None:
    state = {
        "w": torch.zeros(3, 4),
        "s": torch.zeros((), dtype=torch.bfloat16),
        "n": torch.zeros(5, dtype=torch.int64),
    }
    checkpoint = open_checkpoint(FORMAT_1)
    checkpoint.read(whole(state))
    assert checkpoint.extra == {"samples": 24}
    assert state["w"].flatten().tolist() == [i / 8 for i in range(12)]
    assert state["s"].item() == -0.5
    assert state["n"].tolist() == [0, 1, 2, 3, 4]


def test_format_1_is_still_written(tmp_path: Path) -> None:
    """Shards byte for byte, and a manifest of the same content: its hash is of that."""
    path = save_job(tmp_path, 3, format_1_hands(), {"samples": 24})
    assert names_in(path) == names_in(FORMAT_1)
    manifest, stored = (json.loads((x / MANIFEST).read_text()) for x in (path, FORMAT_1))
    assert manifest == stored and list(manifest) == list(stored) and stored["format"] == 1
    for file in set(path.iterdir()) - {path / MANIFEST}:
        assert file.read_bytes() == (FORMAT_1 / file.name).read_bytes(), file.name


def test_a_manifest_has_a_line_for_each_file_and_tensor(tmp_path: Path) -> None:
    path = save_job(tmp_path, 3, format_1_hands(), {"samples": 24})
    lines = [line.strip() for line in (path / MANIFEST).read_text().splitlines()]
    for start in ('"rank_00000_000.safetensors": {', '"w": {', '"s": {', '"n": {', '"extra": {'):
        assert sum(line.startswith(start) for line in lines) == 1, start


def test_a_write_back_that_fails_while_the_rest_is_written_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of it once: whoever hears of it first must not keep it to himself."""
    monkeypatch.setattr(save_module, "EARLY_BYTES", 1)
    begun = []

    def broken(descriptor: int) -> None:
        begun.append(descriptor)
        raise OSError(errno.EIO, "Input/output error")

    pieces = [Piece(name, (4,), (0,), torch.ones(4)) for name in ("a", "b", "c")]
    save(tmp_path, 1, pieces, {})  # in time, the same is no failure
    monkeypatch.setattr(os, "fdatasync", broken)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(tmp_path, 2, pieces, {})
    assert begun and names_in(tmp_path) == ["step_00000001"]


def test_no_descriptor_is_closed_while_it_is_written_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_module, "EARLY_BYTES", 1)
    ends, slow = [], threading.Event()

    def late(descriptor: int) -> None:
        slow.wait(10)
        os.fstat(descriptor)  # raises for one that is closed
        ends.append(descriptor)

    def failing() -> Iterator[memoryview]:
        yield memoryview(b"data")
        threading.Timer(0.1, slow.set).start()
        raise CheckpointError(tmp_path, "cut off")

    monkeypatch.setattr(os, "fdatasync", late)
    with pytest.raises(CheckpointError, match="cut off"):
        save_module.write_file(tmp_path / "x", failing())
    assert len(ends) == 1
