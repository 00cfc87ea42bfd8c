"""The forkserver of ``launch/elastic.py`` and the workers that it forks.

The server imports this module, and with ``launch/preload.py`` all that is heavy, once: a worker
then starts in milliseconds. No process of it outlives the launcher, not even after kill -9.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from megalite.resilience.stop import Control

SERVER = os.getpid()
LAUNCHER, FORKS_FOR = "MEGALITE_LAUNCHER", "MEGALITE_FORKS_FOR"
"""Variables that hold the pid of the launcher: for its workers, and for the server alone."""
_ROOT = Path(__file__).resolve().parent.parent
_STOPS = {signal.SIGTERM, signal.SIGUSR1}


def tie_to(parent: int) -> None:
    """Have the kernel end this process with its parent (Linux); at once if that is gone."""
    if sys.platform.startswith("linux"):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def work(script: str, argv: list[str], env: dict[str, str]) -> None:
    """The life of a worker: ``script`` with its flags, in the environment of torch's agent and with
    the variables of ``env``; an empty one is taken out.

    It ends here, without a word to the launcher but its exit code: torch's own hand-over of return
    values blocks for good when a worker is killed in it.
    """
    tie_to(SERVER)
    for name, value in env.items():
        if value:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)
    launcher = int(env[LAUNCHER])
    control = Control.of_worker()
    _part_from_signals(control, launcher)
    # The number of the set of workers, the same on all nodes; torch's counts restarts of a node.
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(control.round)
    if int(os.environ["LOCAL_WORLD_SIZE"]) > 1 and "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(1)
    code = _run(script, argv)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(script: str, argv: list[str]) -> int:
    path = Path(script).resolve()
    sys.argv = [script, *argv]
    try:
        if path.parent == _ROOT / "launch" and path.suffix == ".py":
            importlib.import_module(f"launch.{path.stem}").main(argv)
        else:
            sys.path.insert(0, str(path.parent))
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except Exception as error:
        from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

        traceback.print_exc()
        ErrorHandler().record_exception(error)
        return 1
    return 0


def _part_from_signals(control: Control, launcher: int) -> None:
    """Signals that reach all processes of a job at once, as Slurm sends them, are for the launcher.

    A worker that is sent TERM alone dies of it, as it would by default, a moment later: only then
    is it sure that the launcher was not asked to stop.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    for number in _STOPS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher's, from the terminal

    def wait() -> None:
        while True:
            found = signal.sigwaitinfo(_STOPS)
            deadline = time.monotonic() + 0.3
            while found.si_pid != launcher and time.monotonic() < deadline and not control.stop:
                time.sleep(0.01)
            if found.si_pid == launcher or not control.stop:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {found.si_signo})
                os.kill(os.getpid(), found.si_signo)

    threading.Thread(target=wait, name="signals", daemon=True).start()


def _serve() -> None:
    """Be the server, where this is imported by it."""
    launcher = os.environ.pop(FORKS_FOR, "")
    if launcher:
        tie_to(int(launcher))
        for number in (*_STOPS, signal.SIGHUP, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)


_serve()
