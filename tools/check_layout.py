"""Says whether a configuration can run on so many ranks, every reason why not, and what can.

Needs no GPU and no process group; exits 0, or 2 with the reasons.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from launch.config import Config, facts_of, load_config, num_microbatches, violations
from megalite.errors import ConfigError
from megalite.mesh_shape import AXES
from megalite.parallel_config import ParallelConfig, describe, mesh_shape, nearest_legal

MOST_SHOWN = 128
"""Ranks of which each is listed."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", required=True, help="a YAML file, as for training")
    parser.add_argument("--world-size", "--world_size", required=True, type=int, metavar="N")
    parser.epilog = "Any --section.field value goes on top of the file, as for training."
    args, flags = parser.parse_known_args(argv)
    try:
        cfg = load_config(["--config", args.config, *flags])
        found = violations(cfg, args.world_size)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if not found:
        print(layout(cfg, args.world_size))
        return 0
    print("\n".join(map(str, found)))
    if any(error.field.startswith("parallel.") for error in found):
        print(alternatives(cfg, args.world_size))
    return 2


def layout(cfg: Config, world_size: int) -> str:
    """What each rank is, the groups of each axis, and what one step does."""
    shape = mesh_shape(cfg.parallel, world_size)
    train, num = cfg.train, num_microbatches(cfg, shape.dp)
    missing = num * train.micro_batch_size * shape.dp - train.global_batch_size
    lines = [
        shape.table() if world_size <= MOST_SHOWN else f"{shape} ranks",
        *(f"{axis} groups: {_groups(shape.groups(axis))}" for axis in AXES),
        f"step: {train.global_batch_size} sequences, {num} microbatches of "
        f"{train.micro_batch_size} on each of {shape.dp} replicas, {missing} rows missing",
    ]
    return "\n".join(lines)


def _groups(groups: Sequence[tuple[int, ...]]) -> str:
    texts = [f"({' '.join(map(str, ranks))})" for ranks in groups]
    if sum(map(len, groups)) <= MOST_SHOWN:
        return " ".join(texts)
    return f"{len(groups)} of {len(groups[0])} ranks, the first {texts[0][:40]} ..."


def alternatives(cfg: Config, world_size: int) -> str:
    """The nearest legal layouts, each with the flags that lead to it."""
    near = nearest_legal(cfg.parallel, facts_of(cfg.model), world_size)
    lines = [f"  {describe(p, world_size)}:  {_flags(cfg.parallel, p)}" for p in near]
    if not lines:
        return "no layout fits: the model's own numbers, or the world size, have to change first"
    return "\n".join([f"nearest layouts of {world_size} ranks:", *lines])


def _flags(old: ParallelConfig, new: ParallelConfig) -> str:
    changed = [
        name
        for name in ParallelConfig.__dataclass_fields__
        if getattr(old, name) != getattr(new, name)
    ]
    return " ".join(f"--parallel.{name} {getattr(new, name)}" for name in changed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
