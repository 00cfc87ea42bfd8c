"""The traces of a run: one clock for all ranks, a file a rank, renewed while the run lives."""

from __future__ import annotations

import sys
import time
from math import ceil
from pathlib import Path
from types import TracebackType

import torch

from launch.build import Training
from megalite.clock import clock_offset
from megalite.mesh import Mesh
from megalite.schedule.action import Plan
from megalite.trace import Offset, Origin, file_of, write_trace

PERIOD_S = 10.0
"""Between two writings, once a run has lasted so long."""
SHARE = 0.02
"""Of a run's time, what writing may take at most."""


class TraceFiles:
    """Writes what ``training.trace`` has recorded to ``run.dir/trace``; without ``run.trace`` it
    does nothing.

    Files are written after the second step, then after ever more steps until ``PERIOD_S`` lie
    between, and at the end: a run that is killed leaves those of a moment ago. Each is written
    aside and renamed, so at any time it is whole; those of an earlier start stay until then.

    Collective at the start, at each writing and at the end, but for a run that fails: then each
    rank writes what it has.
    """

    def __init__(self, training: Training) -> None:
        self.training, self.mesh = training, training.mesh
        self.active = training.cfg.run.trace
        self.folder = Path(training.cfg.run.dir, "trace")
        self._pause, self._waited = 2, 0  # steps between two writings, and since the last
        self._swept = False

    def __enter__(self) -> TraceFiles:
        if self.active:
            started = torch.tensor([time.time_ns()], device=self.mesh.device)
            self.mesh.world.broadcast(started, 0).wait()
            self._origin = origin_of(self.mesh, self.training.plan, int(started))
            self._first = clock_offset(self.mesh.world, self.mesh.device)
            self._since = time.monotonic()
        return self

    def after_step(self) -> None:
        """Between two steps, on all ranks alike: write, if it is time.

        All write at the same step and go on together, so that no step is measured while a
        neighbour writes. What it took and how long steps are say when the next time is.
        """
        self._waited += self.active
        if self._waited < self._pause:
            return
        begin = time.monotonic()
        step_s = (begin - self._since) / self._waited
        try:
            self._write(clock_offset(self.mesh.world, self.mesh.device))
        except OSError as error:
            # A full disk must not end a run for the sake of its trace.
            print(f"rank {self.mesh.rank}: trace not written: {error}", file=sys.stderr)
        took = time.monotonic() - begin
        figures = torch.tensor([took, step_s], dtype=torch.float64, device=self.mesh.device)
        self.mesh.world.all_reduce(figures, "max").wait()
        self._pause = next_pause(self._pause, *figures.tolist())
        self._waited, self._since = 0, time.monotonic()
        self._sweep()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if not self.active:
            return
        if error is not None:
            self._write(None)
            return
        self._write(clock_offset(self.mesh.world, self.mesh.device))
        # Whoever goes on may read all files.
        self.mesh.world.all_reduce(torch.zeros(1, device=self.mesh.device)).wait()
        self._sweep()

    def _write(self, now: Offset | None) -> None:
        trace = self.training.trace
        trace.finish()
        if trace.steps:
            write_trace(self.folder, trace, self._origin, self._first, now)

    def _sweep(self) -> None:
        """Once all ranks have written: remove files of ranks that only an earlier start had."""
        if self.mesh.rank == 0 and not self._swept and self.training.trace.steps:
            mine = {file_of(self.folder, rank) for rank in range(self.mesh.shape.world_size)}
            for old in set(self.folder.glob("rank_*.json")) - mine:
                old.unlink()
        self._swept = True


def next_pause(pause: int, write_s: float, step_s: float) -> int:
    """Steps from one writing to the next: at most twice as many as before, as many as last
    ``PERIOD_S``, or longer if writing would take more than its ``SHARE``."""
    wanted = max(PERIOD_S, write_s / SHARE) / max(step_s, 1e-9)
    return min(2 * pause, max(1, ceil(wanted)))


def origin_of(mesh: Mesh, plan: Plan, run: int = 0) -> Origin:
    """Where in a job this rank stands, and its part of the plan."""
    return Origin(
        mesh.rank,
        mesh.shape.world_size,
        {"pp": mesh.pp.index, "dp": mesh.dp.index, "tp": mesh.tp.index},
        f"{mesh.shape}, {plan.name}",
        {
            "name": plan.name,
            "num_microbatches": plan.num_microbatches,
            "rank_of": list(plan.rank_of),
        },
        [str(action) for action in plan[mesh.pp.index]],
        run,
    )
