"""What saving and loading cost, beside raw writes, torch.save and torch.distributed.checkpoint."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from launch.build import Training, build
from launch.config import CheckpointConfig, Config, TrainConfig
from launch.job import share_text
from launch.state import Position, Share, open_saver, restore, save_state, state_pieces
from megalite.checkpoint.background import Saver
from megalite.checkpoint.load import load_latest
from megalite.checkpoint.save import blocks
from megalite.mesh import Mesh, Transport
from megalite.parallel_config import ParallelConfig, mesh_shape
from model.config import GPTConfig
from tools.benches.clock import Contestant, slowest, time_in_turn
from tools.benches.ranks import run_ranks
from tools.benches.rows import Goal, Row, Sample

REPETITIONS = 5
MODEL = GPTConfig(num_layers=6, hidden_size=768, num_heads=12, seq_length=256, vocab_size=50257)
"""81M parameters: 1.1 GB with fp32 master weights and moments."""
RANKS = 2


def run() -> list[Row]:
    """Files lie in the current directory while this runs, for that is the disk that is meant."""
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=".") as folder:
        ranks = run_ranks(RANKS, race, MODEL, folder, REPETITIONS)
    return rows(slowest(ranks), sum(int(rank["bytes"][0]) for rank in ranks))


def race(
    transport: Transport, model: GPTConfig, folder: str, repetitions: int
) -> dict[str, list[float]]:
    """Seconds of each way to save and load on this rank, its bytes, and its peak memory in a save
    in parts of the state."""
    root = Path(folder)
    mesh, other = (Mesh.create(mesh_shape(p, RANKS), transport) for p in (TENSOR, PIPELINE))
    training, elsewhere = built(model, TENSOR, mesh), built(model, PIPELINE, other)
    share = share_text(mesh)
    tensors = {f"{n}": p.tensor for n, p in enumerate(state_pieces(training, share=True))}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    at_once = saver_of(training, root / "ours", share)
    behind = saver_of(training, root / "behind", share, behind=True)
    mine = root / f"rank{mesh.rank}"

    def clear() -> None:
        """No bench pays for what another left; a save in the background goes on to its end."""
        behind.wait()
        mesh.world.all_reduce(torch.zeros(1)).wait()
        if mesh.rank == 0:
            for path in root.iterdir():
                shutil.rmtree(path)
        mesh.world.all_reduce(torch.zeros(1)).wait()
        mine.mkdir()

    saves: dict[str, Contestant] = {
        "raw": lambda: write_raw(mine / "raw", tensors),
        "ours": lambda: save_state(training, Position(1), at_once),
        "behind": lambda: save_state(training, Position(1), behind),
        "torch.save": lambda: write_pickled(mine / "pickled", tensors),
        "dcp": lambda: write_dcp(root / "dcp", tensors, mesh.rank),
    }
    found = time_in_turn(mesh.world, saves, repetitions, clear)
    clear()
    with peak_memory() as peak:
        save_state(training, Position(1), at_once)
    found |= {"bytes": [float(num_bytes)], "peak": [1 + peak[0] / num_bytes]}
    loads: dict[str, Contestant] = {
        "load": lambda: load(training, root / "ours", share),
        "load elsewhere": lambda: load(elsewhere, root / "ours", share),
    }
    found |= time_in_turn(mesh.world, loads, repetitions)
    saves.clear()
    loads.clear()
    del training, elsewhere, tensors
    other.close()
    mesh.close()
    return found


TENSOR, PIPELINE = ParallelConfig(tp=RANKS), ParallelConfig(pp=RANKS)


def built(model: GPTConfig, parallel: ParallelConfig, mesh: Mesh) -> Training:
    train = TrainConfig(global_batch_size=RANKS, micro_batch_size=1, dtype="bf16")
    return build(replace(Config(), model=model, parallel=parallel, train=train), mesh)


def saver_of(training: Training, directory: Path, share: Share, behind: bool = False) -> Saver:
    cfg = replace(training.cfg, checkpoint=CheckpointConfig(async_save=behind))
    return open_saver(replace(training, cfg=cfg), directory, share)


def load(training: Training, directory: Path, share: Share) -> None:
    mesh = training.mesh
    found, _ = load_latest(directory, rank=mesh.rank, world_size=RANKS, share=share)
    assert found is not None
    restore(training, found, share)


def write_raw(path: Path, tensors: dict[str, Tensor]) -> None:
    """The bytes alone, durable."""
    with open(path, "wb", buffering=0) as file:
        for tensor in tensors.values():
            for block in blocks(tensor):
                file.write(block)
        os.fsync(file.fileno())


def write_pickled(path: Path, tensors: dict[str, Tensor]) -> None:
    with open(path, "wb") as file:
        # A view would be written with all that it is a view of.
        torch.save({name: tensor.clone() for name, tensor in tensors.items()}, file)
        file.flush()
        os.fsync(file.fileno())


def write_dcp(path: Path, tensors: dict[str, Tensor], rank: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_dcp({f"{rank}.{name}": t for name, t in tensors.items()}, checkpoint_id=path)


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """By how many bytes this process grows at most meanwhile (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    grown = [0]
    yield grown
    grown[0] = max(0, _resident("VmHWM") - before)


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def rows(found: dict[str, Sample], num_bytes: int) -> list[Row]:
    what = f"{num_bytes / 1e9:.2f} GB on {RANKS} ranks"
    one = Sample((1.0,))
    return [
        Row(f"{what}, save, s: beside raw writes", found["ours"], found["raw"], AT_MOST_RAW),
        Row(f"{what}, save, s: beside torch.save", found["ours"], found["torch.save"]),
        Row(f"{what}, save, s: beside DCP", found["ours"], found["dcp"]),
        Row(
            f"{what}, training stands still, s: in the background beside at once",
            found["behind"],
            found["ours"],
            Goal("at most", 0.25),
        ),
        Row(f"{what}, peak memory in a save, states", found["peak"], one, Goal("at most", 1.1)),
        Row(
            f"{what}, load, s: into pp {RANKS} beside tp {RANKS}",
            found["load elsewhere"],
            found["load"],
            Goal("at most", 2.0),
        ),
    ]


AT_MOST_RAW = Goal("at most", 1.25)
