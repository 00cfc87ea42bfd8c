"""The traces of a run: one clock for all ranks at the start, a file a rank at the end."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch

from launch.build import Training
from megalite.clock import clock_offset
from megalite.mesh import Mesh
from megalite.schedule.action import Plan
from megalite.trace import Origin, write_trace


class TraceFiles:
    """Writes what ``training.trace`` has recorded to ``run.dir/trace``; without ``run.trace`` it
    does nothing.

    Collective at both ends, but for a run that fails: then each rank writes what it has.
    """

    def __init__(self, training: Training) -> None:
        self.training, self.mesh = training, training.mesh
        self.active = training.cfg.run.trace
        self.folder = Path(training.cfg.run.dir, "trace")

    def __enter__(self) -> None:
        if not self.active:
            return
        if self.mesh.rank == 0:
            for old in self.folder.glob("rank_*.json"):
                old.unlink()
        self.first = clock_offset(self.mesh.world, self.mesh.device)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if not self.active:
            return
        mesh, trace = self.mesh, self.training.trace
        last = clock_offset(mesh.world, mesh.device) if error is None else None
        origin = origin_of(mesh, self.training.plan)
        write_trace(self.folder, trace, origin, self.first, last)
        if error is None:
            # Whoever goes on may read all files.
            mesh.world.all_reduce(torch.zeros(1, device=mesh.device)).wait()


def origin_of(mesh: Mesh, plan: Plan) -> Origin:
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
    )
