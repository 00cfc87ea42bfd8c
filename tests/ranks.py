"""Runs a test body on many ranks: processes forked from a server that never computes.

A fork costs milliseconds where importing torch costs a second a rank, but it is safe only from a
process without threads. pytest itself runs backward passes, which start some; so the first call
starts a server that imports what ranks need and does nothing else. Results come back by file.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from ast import literal_eval
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import Pipe as make_pipe
from pathlib import Path
from typing import Any, NoReturn

PRELOAD: tuple[str, ...] = (
    "torch",
    "torch.distributed",
    "torch._dynamo",  # which the first optimizer would import, 1.2 s a rank
    "hypothesis",
    "pytest",
    "launch.pretrain_gpt",  # with what it imports late
    "sentencepiece",
    "typeguard",
    "tyro.constructors",
    "tests.counting",
    "tests.nccl_rules",
)
# What a rank reports when another one has gone: never the first true error.
ECHOES = (
    "Connection closed",
    "Connection reset",
    "Connection refused",
    "Connection was likely closed",
    "Broken pipe",
    "Peer is gone",
)


class RankError(Exception):
    """A rank raised, died or hung; the message holds every rank's traceback or stacks."""


@dataclass(frozen=True)
class _Job:
    """One call of ``run_ranks``; ``payload`` is only read by the ranks."""

    world_size: int
    transport: str
    timeout_s: float
    group_timeout_s: float
    folder: str
    module: str
    file: str
    sys_path: list[str]
    full_exit: bool
    wants_exits: bool
    payload: bytes = field(repr=False)


def run_ranks(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    transport: str = "gloo",
    timeout_s: float = 60.0,
    group_timeout_s: float = 20.0,
    silent: bool = False,
    full_exit: bool = False,
) -> list[Any]:
    """``body(transport, *args)`` on every rank; the results in the order of ranks.

    Args:
        body: a function of a module (it is passed by name). It gets a ready ``Transport`` and
            must close what it made of it; ``with Mesh...`` or ``mesh.close()``.
        args: copied to every rank by pickle.
        transport: ``gloo``, ``nccl_rules`` (see ``tests.nccl_rules``), or ``none``: then the body
            gets the number of its rank instead, and nothing is joined.
        timeout_s: of the whole call. Then every rank's stacks are dumped into the error.
        group_timeout_s: of one collective or message.
        silent: a rank that prints or warns, also from C++, is an error. Otherwise the output of
            the ranks is printed here.
        full_exit: ranks end as a Python process does, with every destructor. That takes 0.25 s of
            CPU a rank; otherwise they end at once when their groups are closed.
    Raises:
        RankError: with the first true error of any rank. Groups left open are an error.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = _make_job(
            folder,
            body,
            args,
            world_size=world_size,
            transport=transport,
            timeout_s=timeout_s,
            group_timeout_s=group_timeout_s,
            full_exit=full_exit,
        )
        problem = _server().run(job)
        assert not isinstance(problem, dict)
        logs = [_read(Path(folder, f"log{rank}")) for rank in range(world_size)]
        if problem is None and silent and any(logs):
            problem = "a rank was to be silent"
        if problem is not None:
            raise RankError(problem + "".join(map(_output, range(world_size), logs)))
        for rank, log in enumerate(logs):
            print(_output(rank, log), end="")
        return [
            pickle.loads(Path(folder, f"result{rank}").read_bytes()) for rank in range(world_size)
        ]


def run_exits(
    world_size: int, body: Callable[..., Any], *args: Any, timeout_s: float = 60.0
) -> tuple[list[int], list[str]]:
    """``body(rank, *args)`` on processes that end as it likes; for whole programs.

    Nothing is joined. Warnings are no errors. At the first exit code that is not 0 the others are
    ended, as a launcher does.

    Returns:
        The exit codes (negative: a signal) and the outputs in the order of ranks.
    Raises:
        RankError: if they do not end within ``timeout_s``.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = _make_job(
            folder,
            body,
            args,
            world_size=world_size,
            transport="none",
            timeout_s=timeout_s,
            full_exit=True,
            wants_exits=True,
        )
        codes = _server().run(job)
        logs = [_read(Path(folder, f"log{rank}")) for rank in range(world_size)]
        if not isinstance(codes, dict):
            raise RankError(f"{codes}" + "".join(map(_output, range(world_size), logs)))
        return [codes[rank] for rank in range(world_size)], logs


# --- the caller's side -------------------------------------------------------------------------


def _make_job(
    folder: str,
    body: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    wants_exits: bool = False,
    group_timeout_s: float = 20.0,
    **options: Any,
) -> _Job:
    module = sys.modules[body.__module__]
    if "<" in body.__qualname__ or body.__module__ == "__main__":
        raise TypeError(f"{body.__qualname__} must be a function of a module: ranks import it")
    filters = [] if wants_exits else list(warnings.filters)
    return _Job(
        folder=folder,
        module=module.__name__,
        file=str(module.__file__),
        sys_path=sys.path,
        group_timeout_s=group_timeout_s,
        wants_exits=wants_exits,
        payload=pickle.dumps((body, args, filters)),
        **options,
    )


class _Server:
    """The handle of the fork server in the process that calls ``run_ranks``."""

    def __init__(self) -> None:
        self.pipe, theirs = make_pipe()
        self.owner = os.getpid()
        root = str(Path(__file__).resolve().parent.parent)
        code = "import sys; sys.path[:] = eval(sys.argv[3]); import tests.ranks as r; r.serve()"
        told = [theirs.fileno(), os.getpid(), [root, *sys.path], PRELOAD]
        # A session of its own: Ctrl-C ends this process, and the server sees the pipe close.
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *map(repr, told)],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        theirs.close()

    def run(self, job: _Job) -> str | dict[int, int] | None:
        """None if every rank has left a result, else what went wrong; or the exit codes."""
        try:
            self.pipe.send(job)
            if not self.pipe.poll(job.timeout_s + 60.0):
                raise RankError("the fork server does not answer")
            return self.pipe.recv()  # type: ignore[no-any-return]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the server and, as their parent's death is their end, its ranks."""
        self.pipe.close()
        self.process.kill()
        self.process.wait()


_running: list[_Server] = []


def _server() -> _Server:
    if _running and (_running[0].process.poll() is not None or _running[0].owner != os.getpid()):
        _running.clear()
    if not _running:
        _running.append(_Server())
    return _running[0]


@atexit.register
def close_server() -> None:
    """End the fork server, if this process has started one; the next call starts another."""
    while _running:
        server = _running.pop()
        if server.owner == os.getpid():
            server.close()


# --- the server's side -------------------------------------------------------------------------


def serve() -> None:
    """The main loop of the fork server; returns when its pipe closes."""
    pipe = Connection(int(sys.argv[1]))
    die_with_parent(int(sys.argv[2]))
    for name in literal_eval(sys.argv[4]):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            answer = _run_job(job, pipe)
        except Exception:
            answer = f"the fork server failed:\n{traceback.format_exc()}"
        pipe.send(answer)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` (a pid) ends, however it ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _run_job(job: _Job, pipe: Connection) -> str | dict[int, int] | None:
    sys.path[:] = job.sys_path
    _import(job.module, job.file)
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"importing {job.module} has left the fork server with {threads} threads"
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        server = os.getpid()
        pids: dict[int, int] = {}
        for rank in range(job.world_size):
            if (pid := os.fork()) == 0:
                pipe.close()
                _be_rank(job, rank, listener, server)
            pids[pid] = rank
    return _watch(job, pids)


def _import(name: str, file: str) -> None:
    """Import a module as the caller knows it, also where its name is not on the path."""
    if name in sys.modules:
        return
    with suppress(ModuleNotFoundError):
        importlib.import_module(name)
        return
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _watch(job: _Job, pids: dict[int, int]) -> str | dict[int, int] | None:
    """Wait for all ranks; at the first failure or the time limit, end them all and report."""
    deadline = time.monotonic() + job.timeout_s
    living = {os.pidfd_open(pid): pid for pid in pids}
    codes: dict[int, int] = {}
    hung: list[int] = []
    try:
        while living and not hung and not any(codes.values()):
            _reap(living, pids, codes, deadline)
            if time.monotonic() > deadline:
                hung = [pids[pid] for pid in living.values()]
        if living:
            # For a rank that is about to fail as well to say so.
            _reap(living, pids, codes, time.monotonic() + 0.1)
            for pid in living.values():
                os.kill(pid, signal.SIGUSR1)
            time.sleep(0.2)
    finally:
        for pid in living.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pidfd in living:
            os.close(pidfd)
    if job.wants_exits and not hung:
        return {rank: codes.get(rank, -signal.SIGKILL) for rank in pids.values()}
    return _report(job, codes, hung)


def _reap(
    living: dict[int, int], pids: dict[int, int], codes: dict[int, int], until: float
) -> None:
    """Wait for at least one rank to end, or for ``until``."""
    ready, _, _ = select.select(list(living), [], [], max(0.0, until - time.monotonic()))
    for pidfd in ready:
        pid = living.pop(pidfd)
        os.close(pidfd)
        codes[pids[pid]] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _report(job: _Job, codes: dict[int, int], hung: list[int]) -> str | None:
    """The story of a job: the first true error first, then what every other rank was at."""
    if not hung and not any(codes.values()):
        return None
    folder = Path(job.folder)
    told: list[tuple[bool, float, str]] = []
    for rank in range(job.world_size):
        error, stacks = _read(folder / f"error{rank}"), _read(folder / f"stacks{rank}")
        when, _, text = error.partition("\n")
        if error:
            echo = any(words in text for words in ECHOES)
            told.append((echo, float(when), f"rank {rank} raised:\n{text}"))
        elif codes.get(rank):
            after = ", after its body had returned" * (folder / f"result{rank}").exists()
            told.append((False, 1e18, f"rank {rank} {_ended(codes[rank])}{after}\n{stacks}"))
        elif rank not in codes:
            told.append((True, 1e18, f"rank {rank} was still running:\n{stacks}"))
    late = ", ".join(map(str, sorted(hung)))
    head = f"no end within {job.timeout_s:g} s of ranks {late}\n" if hung else ""
    return head + "\n".join(text for _, _, text in sorted(told))


def _ended(code: int) -> str:
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _output(rank: int, log: str) -> str:
    # Without the C++ stacks that follow when a rank has gone.
    lines = [line for line in log.splitlines() if not line.startswith("frame #")]
    return f"\n--- output of rank {rank}\n" + "\n".join(lines) + "\n" if lines else ""


# --- a rank ------------------------------------------------------------------------------------


def _be_rank(job: _Job, rank: int, listener: socket.socket, server: int) -> NoReturn:
    """The life of a forked process."""
    die_with_parent(server)
    folder = Path(job.folder)
    log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stacks = (folder / f"stacks{rank}").open("w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    try:
        body, args, filters = pickle.loads(job.payload)
        warnings.filters[:] = filters  # type: ignore[index]
        with _TRANSPORTS[job.transport](job, rank, listener) as transport:
            result = pickle.dumps(body(transport, *args))
        (folder / f"result{rank}").write_bytes(result)
    except BaseException as error:
        if job.wants_exits and isinstance(error, SystemExit):
            raise
        when = time.monotonic()
        (folder / f"error{rank}").write_text(f"{when}\n{traceback.format_exc()}")
        sys.stdout.flush()
        # At once: an orderly end would wait for ranks that wait for this one.
        os._exit(1)
    if job.full_exit:
        sys.exit(0)
    sys.stdout.flush()
    os._exit(0)


@contextmanager
def _gloo(job: _Job, rank: int, listener: socket.socket) -> Iterator[Any]:
    """A fresh default process group, destroyed in the order that does not abort."""
    import torch
    import torch.distributed as dist

    from megalite.mesh import TorchTransport

    torch.set_num_threads(1)
    limit = timedelta(seconds=job.group_timeout_s)
    port = listener.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        port,
        job.world_size,
        is_master=rank == 0,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if rank == 0 else None,
    )
    if rank != 0:
        listener.close()
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=job.world_size, timeout=limit
    )
    yield TorchTransport(torch.device("cpu"), job.group_timeout_s)
    if (left := len(dist.distributed_c10d._world.pg_map) - 1) > 0:
        raise RuntimeError(f"{left} groups were left open: close what new_group made")
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def _nccl_rules(job: _Job, rank: int, listener: socket.socket) -> Iterator[Any]:
    import torch

    from tests.nccl_rules import NcclRulesTransport

    torch.set_num_threads(1)
    listener.close()
    transport = NcclRulesTransport(
        rank, job.world_size, Path(job.folder), timeout_s=job.group_timeout_s
    )
    yield transport
    transport.close()


@contextmanager
def _none(job: _Job, rank: int, listener: socket.socket) -> Iterator[int]:
    listener.close()
    yield rank


_TRANSPORTS = {"gloo": _gloo, "nccl_rules": _nccl_rules, "none": _none}
