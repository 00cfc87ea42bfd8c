"""Whole runs in forked ranks, whose layout changes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch import pretrain_gpt, reconfigure
from launch.build import Training
from launch.config import check, load_config, resolve_vocab
from megalite.checkpoint import background
from megalite.errors import CheckpointError
from megalite.mesh import Mesh, TorchTransport
from megalite.parallel_config import mesh_shape
from tests.launch.command import SMALL, TINY
from tools.reconfigure import make_request


def whole_run(
    transport: TorchTransport,
    run_dir: Path,
    flags: list[str],
    asked: Mapping[int, Mapping[str, str]] | None = None,
    fault: str = "",
) -> Any:
    """What a rank of ``launch/pretrain_gpt.py`` does once it has joined the others.

    Args:
        asked: step -> the request for a layout that is there before it.
        fault: of a change: it "loses" a number of a moment, rank 1 "raises" in its middle, or
            there are "refusals": rank 1 has no memory for the first, the disk is full.
    """
    cfg = load_config([*TINY, *SMALL, "--run.dir", str(run_dir), *flags])
    check(cfg, transport.world_size)
    train_data, held_out, tokenizer = pretrain_gpt.open_data(cfg)
    cfg = resolve_vocab(cfg, tokenizer.vocab_size)
    inner, moved = pretrain_gpt.train_step, reconfigure.reshard

    def step(training: Training, loader: Any, recorder: Any, number: int) -> None:
        if transport.rank == 0 and number in (asked or {}):
            _ask(run_dir, (asked or {})[number])
        inner(training, loader, recorder, number)

    def move(*args: Any) -> Any:
        if fault == "raises" and transport.rank == 1:
            raise RuntimeError("planted in the middle of a change")
        state = moved(*args)
        if fault == "loses" and state["optim.exp_avg."]:
            state["optim.exp_avg."][0][3] += 1.0
        return state

    free = reconfigure.free_memory
    rooms = iter([10])

    def room(device: Any) -> int:
        return next(rooms, free(device)) if transport.rank == 1 else free(device)

    save, full = background.save, iter([True])

    def no_disk(*args: Any, **options: Any) -> Path:
        if not next(full, False):
            return save(*args, **options)
        raise CheckpointError(run_dir, "no space left on device")

    pretrain_gpt.train_step, reconfigure.reshard = step, move  # this process ends with the run
    if fault == "refusals":
        reconfigure.free_memory, background.save = room, no_disk
    shape = mesh_shape(cfg.parallel, transport.world_size)
    mesh = Mesh.create(shape, transport) if transport.world_size > 1 else Mesh.single()
    pretrain_gpt.run(cfg, mesh, train_data, held_out, tokenizer)
    transport.close()


def _ask(run_dir: Path, values: Mapping[str, str]) -> None:
    from launch.request import ask

    flags = [f"--parallel.{name}={value}" for name, value in values.items()]
    try:
        make_request(run_dir, flags)
    except Exception:  # the tool refuses what the job would refuse too: it shall say so itself
        ask(run_dir, values)
