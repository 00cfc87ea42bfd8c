"""torch's elastic agent, with our meeting, workers from a forkserver and stops on request."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from launch.meeting import Ended, Meeting
from launch.world import WHY
from megalite.resilience.stop import Control

BAD_INPUT, STOPPED = 2, 75
SERVER_GONE = 255
"""What multiprocessing says of a worker whose forkserver is gone."""
SAME_FAILURES, SAME_KILLS = 3, 10
"""So many times in a row without a new step, and it is a crash that no restart mends. SIGKILL comes
from outside and may be chance."""


@dataclass(frozen=True)
class Failure:
    """How a set of workers ended; ``text`` names the rank."""

    code: int
    text: str
    kind: str
    """The same for two failures of one cause."""

    @property
    def said(self) -> str:
        """In a line: whose failure, and the last line of its error."""
        first, *rest = self.text.strip().splitlines()
        return f"{first}: {rest[-1].strip()}" if rest else first


class Agent(LocalElasticAgent):
    """Starts, watches and restarts the workers of one node.

    ``asked``: whether this node was asked to stop the job. ``run`` returns a result, or raises
    ``Ended`` where another node ended the job.
    """

    def __init__(
        self, spec: WorkerSpec, logs: LogsSpecs, meeting: Meeting, control: Control
    ) -> None:
        super().__init__(spec, logs, start_method="forkserver", shutdown_timeout=5)
        self._meeting, self._control = meeting, control
        self.asked = self.stopped = False
        self.first_failure: Failure | None = None
        self.repeats, self._best_step = 0, 0

    def ask_stop(self) -> None:
        """Save and end; may be called by a signal's handler."""
        self.asked = True
        self._control.ask_stop()

    # What LocalElasticAgent leaves to its subclasses, or asks of them with a store.

    def _assign_worker_ranks(
        self, store: object, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        first, size = self._meeting.first_rank, self._meeting.joined.world_size
        return [Worker(n, first + n, first + n, size, size) for n in range(spec.local_world_size)]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        limits, env = self._meeting.place.limits, worker_group.spec.args[2]
        env[WHY] = self._meeting.joined.why
        self._control.begin(self._meeting.joined.round, limits.min_nodes < limits.max_nodes)
        self._control.ask_stop(False)
        if self.asked:  # looked at last: a signal may come at any moment
            self._control.ask_stop()
        return self._forked(worker_group, SAME_FAILURES - 1)

    def _forked(self, worker_group: WorkerGroup, tries: int) -> dict[int, Any]:
        """Start the workers, also where the server is killed while it forks them: those that it
        has forked die with it, and the next try starts another one."""
        try:
            started: dict[int, Any] = super()._start_workers(worker_group)
            return started
        except (EOFError, ConnectionError) as error:
            if not tries:
                raise
            said = f"elastic: the process that forks workers is gone: {error!r}"
            print(said, file=sys.stderr, flush=True)
        return self._forked(worker_group, tries - 1)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = 5) -> None:
        # They have nothing to tidy up, and a stopped one would not even die of TERM.
        super()._shutdown(signal.SIGKILL, timeout)

    def _exit_barrier(self) -> None:
        """The meeting has its own."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = self._exit_codes()
        if any(code not in (None, 0) for code in codes):
            return self._failed(worker_group, codes)
        if all(code == 0 for code in codes):
            return self._finished(worker_group)
        plan = self._meeting.plan
        if (self.asked or plan.exits) and not any(self._control.steps):
            raise Ended(STOPPED, "stopped on request before the first step: nothing to save")
        if plan.regroup == "soft":
            self._control.ask_stop()
        return RunResult(WorkerState.HEALTHY)

    def _exit_codes(self) -> list[int | None]:
        assert self._pcontext is not None
        return [process.exitcode for process in self._pcontext._pc.processes]  # type: ignore[attr-defined]

    def _finished(self, worker_group: WorkerGroup) -> RunResult:
        """All have ended with 0: done, stopped for good, or stopped to let a node in."""
        if self._control.stopped:
            if not self.asked and self._meeting.goes_on():
                self._worker_group.state = WorkerState.STOPPED
                self._restart_workers(worker_group)
                return RunResult(WorkerState.HEALTHY)
            self.stopped = True
        done = {worker.global_rank: None for worker in worker_group.workers}
        return RunResult(WorkerState.SUCCEEDED, done)

    def _failed(self, worker_group: WorkerGroup, codes: list[int | None]) -> RunResult:
        assert self._pcontext is not None
        pids, files = self._pcontext.pids(), self._pcontext.error_files
        failures = {
            worker_group.workers[n].global_rank: ProcessFailure(n, pids[n], code, files[n])
            for n, code in enumerate(codes)
            if code
        }
        failure, before = failure_of(failures), self.first_failure
        step = max(self._control.steps)
        if before and before.kind == failure.kind and step <= self._best_step:
            self.repeats += 1
        else:
            self.first_failure, self.repeats = failure, 1
        self._best_step = max(step, self._best_step)
        most = SAME_KILLS if failure.code == -signal.SIGKILL else SAME_FAILURES
        # In a stop it is an error of the save: a job started anew would end as if it were saved.
        stops = failure.code == 1 and (self.asked or self._meeting.plan.exits)
        if failure.code == BAD_INPUT or stops or self.repeats >= most:
            self._remaining_restarts = 0
        self._meeting.why = failure.said
        print(f"elastic: {failure.said}", file=sys.stderr, flush=True)
        return RunResult(WorkerState.FAILED, failures=failures)


def failure_of(failures: dict[int, ProcessFailure]) -> Failure:
    """The earliest of the failures of a set of workers, by global rank."""
    rank, found = min(failures.items(), key=lambda item: item[1].timestamp)
    code = int(found.exitcode)
    text = message_of(found)
    if code == BAD_INPUT:
        return Failure(code, text, text)
    cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    if code == SERVER_GONE and not text:
        cause = "went with the process that forks workers, which is gone"
    head = f"rank {rank} (local rank {found.local_rank}) {cause}"
    last = text.strip().splitlines()[-1] if text.strip() else ""
    return Failure(code, f"{head}\n{text}".strip(), f"{rank} {code} {last}")


def message_of(failure: ProcessFailure) -> str:
    """What the worker wrote into the file of its error, if it could."""
    try:
        with open(failure.error_file, encoding="utf-8") as file:
            message = json.load(file)["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if isinstance(message, dict):
        extra = message.get("extraInfo", {})
        return str(extra.get("py_callstack") or message.get("message", ""))
    return str(message)
