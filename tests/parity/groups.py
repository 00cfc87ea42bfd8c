"""Several layouts of equally many ranks in one call: to start ranks costs most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from launch.config import Config
from megalite.mesh import Mesh, Transport
from megalite.parallel_config import mesh_shape
from tests.nccl_rules import NcclRulesTransport
from tests.parity.faults import undo
from tests.parity.harness import Fault, Outcome, differences, join, one_process, train
from tests.parity.matrix import Case
from tests.ranks import run_ranks

TOLERANCE = {
    "initial": 0.0,
    "loss": 1e-12,
    "norm": 1e-10,
    "grads": 1e-10,
    "weights": 1e-10,
    "eval": 1e-12,
}
Job = tuple[str, Config, Fault | None]


def rank_of_all(transport: Transport, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """One rank's share of each run."""
    rules = transport.device_rules if isinstance(transport, NcclRulesTransport) else nullcontext
    found = []
    for name, cfg, fault in jobs:
        mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
        try:
            found.append(train(cfg, mesh, fault, rules))
        except Exception as error:
            raise RuntimeError(f"in the layout {name}") from error
        finally:
            undo()
            mesh.close()
    return found


def run_all(ranks: int, jobs: Sequence[Job], transport: str = "gloo") -> list[list[dict[str, Any]]]:
    """All ranks' shares of each run."""
    limit = 60.0 + 20.0 * len(jobs)
    found = run_ranks(ranks, rank_of_all, jobs, transport=transport, timeout_s=limit)
    return [[rank[n] for rank in found] for n in range(len(jobs))]


def few_steps(case: Case) -> int:
    """With ZeRO-1 the weights of the first step are gathered during the second."""
    return 2 if case.zero1 else 1


def outcomes(
    cases: Sequence[Case],
    dtype: str = "fp64",
    transport: str = "gloo",
    steps: Callable[[Case], int] = lambda case: 3,
) -> list[tuple[Case, Outcome, Outcome]]:
    """Each layout, of equally many ranks, with its outcome and that of one process."""
    cfgs = [case.cfg(steps(case), dtype) for case in cases]
    jobs = [(str(case), cfg, None) for case, cfg in zip(cases, cfgs, strict=True)]
    runs = run_all(cases[0].ranks, jobs, transport)
    return [
        (case, join(run), one_process(cfg))
        for case, cfg, run in zip(cases, cfgs, runs, strict=True)
    ]


def wrong(
    cases: Sequence[Case],
    transport: str = "gloo",
    steps: Callable[[Case], int] = lambda case: 3,
) -> list[str]:
    """What is not as in one process, in words."""
    found = []
    for case, got, expected in outcomes(cases, "fp64", transport, steps):
        for what, (size, where) in differences(got, expected).items():
            if not size <= TOLERANCE[what]:
                found.append(f"{case.ranks} ranks, {case}: {what} differs by {size:.1e} at {where}")
    return found
