"""Every rank of a layout in one process, and what each holds."""

from __future__ import annotations

from dataclasses import dataclass

from launch.build import build_stages, make_plan
from launch.config import Config
from megalite.data_parallel.bucket import FlatParameters
from megalite.mesh import Mesh
from megalite.parallel_config import mesh_shape
from megalite.rng import initialize
from model.gpt import GPTStage


@dataclass
class Held:
    """What one rank holds: its stages, with initial weights, in flat memory."""

    mesh: Mesh
    gpt: dict[int, GPTStage]
    flat: FlatParameters


def hold(cfg: Config, world_size: int) -> list[Held]:
    """The stages of every rank of a layout, in the order of ranks."""
    shape = mesh_shape(cfg.parallel, world_size)
    plan = make_plan(cfg, shape.dp)
    found = []
    for rank in range(world_size):
        mesh = Mesh.at(shape, rank)
        gpt = build_stages(cfg, mesh, plan)
        flat = FlatParameters(
            {s: list(module.parameters()) for s, module in gpt.items()},
            mesh.dp,
            cfg.parallel.zero1,
        )
        initialize(flat.parameters(), cfg.train.seed)
        found.append(Held(mesh, gpt, flat))
    return found
