"""Ranks for a bench: processes forked from this one, joined over gloo on this machine."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from megalite.mesh import TorchTransport


class BenchError(Exception):
    """A rank raised, died or hung; the message says which, and its traceback."""


def schedule_in_real_time() -> bool:
    """Let this process and its later threads run as soon as they are woken, if that is allowed.

    A rank that has slept or waited then does not queue behind what else the machine does.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        return False
    return True


def run_ranks(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout_s: float = 900.0,
    real_time: bool = False,
) -> list[Any]:
    """``body(transport, *args)`` on every rank, one thread each; what it returns, by rank.

    ``real_time`` schedules the ranks so where it is allowed: for stages that sleep, whose
    processor time is small.

    This process must not have computed anything: a fork is safe only from one thread. What
    ``body`` returns must be plain numbers and containers.

    Raises:
        BenchError: with the first error of a rank; the others are ended.
    """
    context = multiprocessing.get_context("fork")
    # What is loaded by now never goes: looking through it again takes 0.1 s a collection.
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        pipes, ranks = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            told = (theirs, os.getpid(), f"{folder}/store", rank, world_size, real_time, body, args)
            process = context.Process(target=_be_rank, args=told)
            process.start()
            theirs.close()
            pipes.append(ours)
            ranks.append(process)
        try:
            return _collect(pipes, time.monotonic() + timeout_s)
        finally:
            for process in ranks:
                process.join(5.0)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    found: dict[int, Any] = {}
    waiting = dict(enumerate(pipes))
    while waiting:
        left = max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait(list(waiting.values()), left)
        if not ready:
            raise BenchError(f"no end of ranks {sorted(waiting)}")
        for rank, pipe in list(waiting.items()):
            if pipe in ready:
                try:
                    error, found[rank] = pipe.recv()
                except EOFError:
                    error = "died"
                if error:
                    raise BenchError(f"rank {rank}: {error}")
                del waiting[rank]
    return [found[rank] for rank in sorted(found)]


def _be_rank(
    pipe: Connection,
    parent: int,
    store: str,
    rank: int,
    world_size: int,
    real_time: bool,
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """The life of a forked process."""
    die_with_parent = 1
    ctypes.CDLL(None).prctl(die_with_parent, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    faulthandler.enable()  # what kills a rank without a word says where
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if real_time:
        schedule_in_real_time()
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        found = body(TorchTransport(torch.device("cpu"), 60.0), *args)
        gc.collect()  # groups that are alive when the process group goes can abort the process
        dist.barrier()
        dist.destroy_process_group()
        pipe.send((None, found))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
        os._exit(1)
