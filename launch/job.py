"""Joins the process group of a job, and leaves it: cleanly, or at once with the error shown."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from launch.config import report_config_error
from launch.world import World
from megalite.errors import ConfigError
from megalite.mesh import Mesh, TorchTransport, backend_of, local_device
from megalite.mesh_shape import MeshShape

COLLECTIVE_LIMIT_S = 600.0
SECONDHAND_PATIENCE_S = 10.0


@contextmanager
def joined(shape: MeshShape, world: World, limit_s: float = COLLECTIVE_LIMIT_S) -> Iterator[Mesh]:
    """The mesh of this job. A process that is alone joins nothing.

    Whatever was made with the mesh, or with others over the same ranks, must be out of reach when
    the context ends, or gloo may abort the process at exit; their groups are closed here.
    """
    device = local_device(world.local_rank)
    end_with_launcher()
    if world.size == 1:
        yield Mesh.single(device)
        return
    _init(device, world, limit_s)
    transport = TorchTransport(device, limit_s)
    yield Mesh.create(shape, transport)
    gc.collect()
    dist.barrier()
    transport.close()
    dist.destroy_process_group()


def end_with_launcher() -> None:
    """Have the kernel end this process when torchrun's agent dies, even by kill -9 (Linux)."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or not sys.platform.startswith("linux"):
        return
    pr_set_pdeathsig, parent = 1, os.getppid()
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def _init(device: torch.device, world: World, limit_s: float) -> None:
    limit = timedelta(seconds=limit_s)
    store, rank, size = next(rendezvous("env://", world.rank, world.size, timeout=limit))
    # After a restart the agent's store still holds the addresses of the dead.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"attempt_{attempt}", store)
    dist.init_process_group(
        backend_of(device), store=store, rank=rank, world_size=size, timeout=limit
    )


def share_text(mesh: Mesh) -> Callable[[str], list[str]]:
    """A function that gives every rank the text of every rank, in order; collective."""

    def share(text: str) -> list[str]:
        data = text.encode()
        longest = torch.tensor([len(data)], device=mesh.device)
        mesh.world.all_reduce(longest, "max").wait()
        room = max(1, int(longest))
        mine = torch.tensor(list(data.ljust(room, b"\0")), dtype=torch.uint8, device=mesh.device)
        whole = mine.new_empty(room * mesh.world.size)
        mesh.world.all_gather(whole, mine).wait()
        parts = whole.cpu().view(mesh.world.size, room)
        return [bytes(part.tolist()).rstrip(b"\0").decode() for part in parts]

    return share


def is_secondhand(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone."""
    if isinstance(error, (dist.DistError, ConnectionError)):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        word in said for word in ("gloo", "nccl", "connection closed", "connection reset")
    )


def die(error: BaseException, world: World) -> NoReturn:
    """End this process now, with the error as the last thing that it prints; 2 for bad input.

    No clean-up: the other ranks are in the middle of messages with this one. The launcher ends
    them when it sees this one gone, and repeats the error from the file that it named.
    """
    if isinstance(error, ConfigError):
        try:
            report_config_error(error)
        except SystemExit:
            os._exit(2)
    if isinstance(error, KeyboardInterrupt):
        os._exit(130)
    if is_secondhand(error):
        # A peer died first and has more to say. The launcher, which has seen that, ends us.
        time.sleep(SECONDHAND_PATIENCE_S)
    text = "".join(traceback.format_exception(error))
    where = f"rank {world.rank} (local rank {world.local_rank})"
    sys.stdout.flush()
    sys.stderr.write(f"\n{where} failed:\n{text}")
    sys.stderr.flush()
    try:
        from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

        ErrorHandler().record_exception(error)
    finally:
        os._exit(1)
