"""What a checkpoint of a run holds, and how a run takes it up again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from launch.build import Training
from megalite.checkpoint.background import Saver
from megalite.checkpoint.load import Checkpoint, load_latest, open_checkpoint
from megalite.errors import CheckpointError, ConfigError
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


def open_saver(training: Training, directory: Path, share: Share) -> Saver:
    """What writes the checkpoints of this layout, as ``checkpoint`` says."""
    cfg, mesh = training.cfg.checkpoint, training.mesh
    return Saver(
        directory,
        rank=mesh.rank,
        world_size=mesh.shape.world_size,
        share=share,
        background=cfg.async_save,
        keep=cfg.keep,
        keep_every=cfg.keep_every,
    )


def save_state(training: Training, position: Position, saver: Saver) -> None:
    """Write a checkpoint of this position, or begin to; collective.

    Every replica writes its share, with and without ZeRO-1: more disks, and less for each.
    """
    extra = {
        "position": asdict(position),
        "layout": str(training.mesh.shape),
        "model": asdict(training.cfg.model),
        "loss_scale": training.loss_scale.state() if training.loss_scale else None,
    }
    saver.save(position.step, state_pieces(training, share=True), extra)


def find_checkpoint(training: Training, directory: Path, share: Share) -> Checkpoint | None:
    """The checkpoint that ``checkpoint.resume`` asks for, if there is one; collective."""
    wanted = training.cfg.checkpoint.resume
    if wanted == "none":
        return None
    mesh = training.mesh
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
