"""The launcher of one node: the forkserver, signals and the exit code."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from launch.config import check, load_config
from launch.forked import FORKS_FOR, LAUNCHER, work
from launch.scratch import scratch
from megalite.errors import ConfigError
from megalite.resilience.stop import VARIABLE, Control

if TYPE_CHECKING:
    from argparse import Namespace

    from launch.agent import Agent
    from launch.leader import Limits

ROOT = Path(__file__).resolve().parent.parent
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_SAME_TERM_S = 0.2


def main(argv: list[str]) -> NoReturn:
    """Ends the process with the exit code of the job."""
    with scratch() as folder:
        tempfile.tempdir = str(folder)  # of multiprocessing's socket, which would stay behind
        try:
            code, text = _launch(argv, folder)
        except ConfigError as error:
            code, text = 2, str(error)
        except Exception:
            code, text = 1, traceback.format_exc()
        except SystemExit as end:  # of the parser, which has said why
            code, text = end.code if isinstance(end.code, int) else 1, ""
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    if text:
        print(text, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread that waits for a host which is gone must not hold this up


def _launch(argv: list[str], folder: Path) -> tuple[int, str]:
    """Exit code and last words of the job."""
    worker_env = _start_forkserver(folder)
    requests = Requests()
    # Imports torch, while the forkserver does so too.
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from launch.agent import Agent
    from launch.flags import interface_to, logs_of, parse, place_of
    from launch.meeting import Ended, Meeting

    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    args = parse(argv)
    place = place_of(args)
    _check_run(args, place.num_workers, place.limits)
    control = Control.create(folder / "control", place.num_workers)
    meeting = Meeting(place, lambda: requests.asked)
    if place.limits.max_nodes > 1 and (name := interface_to(meeting.place)):
        worker_env.setdefault("GLOO_SOCKET_IFNAME", name)
    spec = WorkerSpec(
        role=args.role,
        local_world_size=place.num_workers,
        rdzv_handler=meeting,
        entrypoint=work,
        args=(args.training_script, args.training_script_args, worker_env),
        max_restarts=args.max_restarts,
        monitor_interval=args.monitor_interval,
    )
    agent = Agent(spec, logs_of(args, folder), meeting, control)
    requests.tell(agent)
    try:
        agent.run()
        code, text = _outcome(agent)
    except Ended as end:
        code, text = end.code, end.text
    except RendezvousError as error:
        code, text = 1, str(error)
    meeting.leave(code, text)
    return code, text


def _outcome(agent: Agent) -> tuple[int, str]:
    if agent.get_worker_group().state.name == "SUCCEEDED":
        return (75 if agent.stopped else 0), ""
    failure = agent.first_failure
    assert failure is not None
    if failure.code == 2:
        return 2, failure.text
    again = f" (the same {agent.repeats} times without a new step)" if agent.repeats > 1 else ""
    return 1, f"{failure.text}\nthe job ended with this error{again}"


def _start_forkserver(folder: Path) -> dict[str, str]:
    """Start it now: it takes as long to import torch as this process does.

    Returns:
        what its workers need in their environment; empty: to be taken out.
    """
    before = {name: os.environ.get(name, "") for name in ("PYTHONPATH", "PYTHONSAFEPATH")}
    # A server that is started again, after it was killed, needs them too.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), before["PYTHONPATH"]]))
    os.environ["PYTHONSAFEPATH"] = "1"
    os.environ[FORKS_FOR] = str(os.getpid())
    # torch would answer signals itself, by killing workers.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    multiprocessing.set_forkserver_preload(["launch.forked", "launch.preload"])
    # Signals that go to a whole job are for this process; what is ignored stays so after an exec.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    forkserver.ensure_running()
    return {**before, VARIABLE: str(folder / "control"), LAUNCHER: str(os.getpid())}


def _check_run(args: Namespace, num_workers: int, limits: Limits) -> None:
    """What can be found wrong with a training before any worker starts."""
    if Path(args.training_script).resolve() != ROOT / "launch" / "pretrain_gpt.py":
        return
    check(load_config(args.training_script_args), num_workers * limits.max_nodes)


def _let_go(patience_s: float = 1.0) -> None:
    """Give back the semaphores of torch's queues, which else are reported as lost.

    What the signal has interrupted may hold locks that this needs, so it is not waited for long.
    """
    thread = threading.Thread(target=multiprocessing.util._run_finalizers, daemon=True)  # type: ignore[attr-defined]
    thread.start()
    thread.join(patience_s)


class Requests:
    """What signals ask for: TERM, USR1 and INT to save and end, a second TERM or INT to end now."""

    def __init__(self) -> None:
        self.asked = False
        self._term_at: float | None = None
        self._agent: Agent | None = None
        for number in STOP_SIGNALS:
            signal.signal(number, self._hear)

    def tell(self, agent: Agent) -> None:
        self._agent = agent
        if self.asked:
            agent.ask_stop()

    def _hear(self, number: int, _: FrameType | None) -> None:
        self.asked = True
        if self._agent is not None:
            self._agent.ask_stop()
        if number in (signal.SIGTERM, signal.SIGINT):
            now = time.monotonic()
            if self._term_at is not None and now - self._term_at > _SAME_TERM_S:
                os.write(2, b"elastic: asked a second time: ended without a checkpoint\n")
                _let_go()
                os._exit(1)  # the kernel ends the forkserver and its workers
            self._term_at = self._term_at or now
