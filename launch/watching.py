"""A rank's side of the watchdog: its slot, its stacks on request, and the start of ``watch.py``."""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from types import TracebackType

import torch

from launch import watch
from launch.config import Config
from launch.state import Share
from launch.world import world_from_env
from megalite.clock import clock_of
from megalite.mesh import Mesh
from megalite.place import SLOT_BYTES, DevicePlace, Phase, Place
from megalite.schedule.action import Plan
from megalite.trace import HostClock


class Watching:
    """``place`` is where this rank notes what it is at, in memory that its node's watchdog reads.

    The first rank of each node starts one, which ends with it. With ``run.watchdog_s`` 0, and
    elsewhere than on Linux, nobody looks.
    """

    def __init__(self, watchdog_s: float, device: torch.device) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._board: watch.Board | None = None
        self._files: tuple[int, int] | None = None
        self.place = Place()
        if not watchdog_s or not sys.platform.startswith("linux"):
            return
        # In memory, and read through /proc: whatever ends this process leaves nothing behind.
        self._files = slot, stacks = _memory_file("place"), _memory_file("stacks")
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
        os.posix_fallocate(slot, 0, SLOT_BYTES)
        clock, memory = clock_of(device), mmap.mmap(slot, SLOT_BYTES)
        host = isinstance(clock, HostClock)
        self.place = Place(memory) if host else DevicePlace(clock, memory)

    def start(self, cfg: Config, mesh: Mesh, plan: Plan, share: Share) -> None:
        """Have the ranks watched in this layout, and no longer in another one; collective."""
        if self._files is None:
            return
        world = world_from_env()
        first = world.rank - world.local_rank
        mine = json.dumps([first, time.time_ns(), os.getpid(), *self._files])
        told = [json.loads(text) for text in share(mine)]
        self._end()
        if world.local_rank:
            return
        shape, rank_of = mesh.shape, plan.rank_of
        spec = watch.Spec(
            parent=os.getpid(),
            run_dir=cfg.run.dir,
            token=str(told[0][1]),
            watchdog_s=cfg.run.watchdog_s,
            nodes=sorted({node for node, *_ in told}),
            node=first,
            ranks=[[r, *rest] for r, (node, _, *rest) in enumerate(told) if node == first],
            shape={"tp": shape.tp, "pp": shape.pp, "dp": shape.dp, "order": shape.order},
            rank_of=list(rank_of),
            tied=cfg.model.tied_embeddings and rank_of[0] != rank_of[-1],
        )
        self._board = watch.Board(spec)
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(asdict(spec)).encode())
            file.seek(0)
            command = [sys.executable, "-S", "-E", watch.__file__]
            try:
                self._process = subprocess.Popen(command, stdin=file)
            except OSError as error:  # no reason not to train
                print(f"rank {world.rank}: no watchdog: {error}", file=sys.stderr, flush=True)

    def _end(self) -> None:
        if self._process is not None:
            self._process.send_signal(watch.END)
            try:
                self._process.wait(1.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> Watching:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.place.at(Phase.END)
        self._end()
        self.place.close()


def _memory_file(name: str) -> int:
    """A file without a name; in memory where this Python knows how."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"megalite_{name}")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
