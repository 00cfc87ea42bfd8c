from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor, nn

from megalite.checkpoint import save as save_module
from megalite.checkpoint.load import open_checkpoint
from megalite.checkpoint.manifest import MANIFEST
from megalite.checkpoint.save import blocks, save
from megalite.errors import CheckpointError
from megalite.slices import Piece
from tests.checkpoint.jobs import (
    bits,
    deal,
    make_state,
    names_in,
    read_state,
    results,
    run_job,
    same_bits,
    save_job,
    whole,
    zeros_like,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64]


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


def test_a_step_saved_again_is_replaced(tmp_path: Path) -> None:
    old, new = make_state(1), make_state(2)
    save_job(tmp_path, 1, deal(old, 3, random.Random(0)))
    path = save(tmp_path, 1, whole(new), {})
    assert same_bits(read_state(path, new), new)
    assert names_in(tmp_path) == ["step_00000001"]


def test_a_write_back_that_fails_while_the_rest_is_written_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of it once: whoever hears of it first must not keep it to himself."""
    monkeypatch.setattr(save_module, "EARLY_BYTES", 1)
    begun, sync = [], os.fsync

    def broken(descriptor: int) -> None:
        if threading.current_thread() is threading.main_thread():
            return sync(descriptor)
        begun.append(descriptor)
        raise OSError(errno.EIO, "Input/output error")

    pieces = [Piece(name, (4,), (0,), torch.ones(4)) for name in ("a", "b", "c")]
    save(tmp_path, 1, pieces, {})  # in time, the same is no failure
    monkeypatch.setattr(os, "fsync", broken)
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

    monkeypatch.setattr(os, "fsync", late)
    with pytest.raises(CheckpointError, match="cut off"):
        save_module.write_file(tmp_path / "x", failing())
    assert len(ends) == 1
