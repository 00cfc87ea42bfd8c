"""What a checkpoint of a run holds, and how a run takes it up again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launch.build import Training
from launch.config import Config
from megalite.checkpoint.load import Checkpoint, load_latest, open_checkpoint, prune
from megalite.checkpoint.save import save
from megalite.errors import CheckpointError, ConfigError
from megalite.mesh import Mesh
from megalite.slices import Piece

Share = Callable[[str], list[str]]


@dataclass(frozen=True)
class Position:
    """How far a run is: steps done, samples and tokens seen, updates of the weights."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    updates: int = 0


def state_pieces(training: Training, share: bool = False) -> Iterator[Piece]:
    """Every tensor of the state on this rank, copies that another rank owns included.

    ``share``: only this replica's share, so that the replicas of a stage have each element once.
    """
    yield from training.flat.weight_pieces(share)
    yield from training.optimizer.pieces(share)


def save_state(
    training: Training,
    position: Position,
    directory: Path,
    share: Share,
    live: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint of this position and remove those that are no longer kept; collective.

    Every replica writes its share, with and without ZeRO-1: more disks, and less for each.
    ``live`` is what ``launch.layouts.layout_at`` is to know of a change of layout.
    """
    cfg, mesh = training.cfg, training.mesh
    extra = {
        "position": asdict(position),
        "layout": str(mesh.shape),
        "model": asdict(cfg.model),
        "loss_scale": training.loss_scale.state() if training.loss_scale else None,
        **({"live": live} if live else {}),
    }
    path = save(
        directory,
        position.step,
        state_pieces(training, share=True),
        extra,
        rank=mesh.rank,
        world_size=mesh.shape.world_size,
        share=share,
    )
    if mesh.rank == 0:
        prune(directory, cfg.checkpoint.keep, cfg.checkpoint.keep_every)
    return path


def find_checkpoint(cfg: Config, mesh: Mesh, directory: Path, share: Share) -> Checkpoint | None:
    """The checkpoint that ``checkpoint.resume`` asks for, if there is one; collective."""
    wanted = cfg.checkpoint.resume
    if wanted == "none":
        return None
    with _as_bad_input():
        if wanted != "auto":
            return open_checkpoint(Path(wanted))
        found, bad = load_latest(
            directory, rank=mesh.rank, world_size=mesh.shape.world_size, share=share
        )
    if mesh.rank == 0:
        for error in bad:
            print(f"passed over a bad checkpoint: {error}", file=sys.stderr, flush=True)
    return found


def restore(training: Training, checkpoint: Checkpoint, share: Share) -> Position:
    """Fill weights and optimizer from a checkpoint of any layout; collective."""
    with _as_bad_input():
        checkpoint.read(state_pieces(training), share=share)
    position = Position(**checkpoint.extra["position"])
    training.optimizer.set_num_steps(position.updates)
    scaled = checkpoint.extra.get("loss_scale")
    if training.loss_scale and scaled:
        training.loss_scale.restore(scaled)
    return position


@contextmanager
def _as_bad_input() -> Iterator[None]:
    """A checkpoint that is damaged or does not fit is what the user gave, not a fault of ours."""
    try:
        yield
    except CheckpointError as error:
        raise ConfigError(
            "checkpoint.resume",
            str(error),
            "Name a good checkpoint, or begin anew in another --run.dir",
        ) from error
