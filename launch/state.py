"""What a checkpoint of a run holds, and how a run takes it up again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launch.build import Training
from launch.config import Config
from launch.stored import has_begun
from megalite.checkpoint.background import Saver
from megalite.checkpoint.load import Checkpoint, load_latest, open_checkpoint
from megalite.checkpoint.manifest import MANIFEST
from megalite.errors import CheckpointError, ConfigError
from megalite.mesh import Mesh
from megalite.slices import Piece

Share = Callable[[str], list[str]]
MASTER = "optim.master."


@dataclass(frozen=True)
class Position:
    """How far a run is: steps done, samples and tokens seen, updates of the weights.

    ``begun``: what ``checkpoint.resume`` named when the run began: a directory, "none", or empty.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    updates: int = 0
    begun: str = ""

    @classmethod
    def first(cls, cfg: Config) -> Position:
        return cls(begun="none" if cfg.checkpoint.resume == "none" else "")

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Position:
        """Raises:
        CheckpointError: if it does not say how far its run was.
        """
        told: Any = checkpoint.extra.get("position")
        with suppress(TypeError):
            position = cls(**told)
            counts = (position.step, position.samples, position.tokens, position.updates)
            whole = all(type(n) is int and n >= 0 for n in counts)
            if whole and position.step == checkpoint.step:
                return position
        problem = f"its run was at {told!r}, which is no position"
        raise CheckpointError(checkpoint.path / MANIFEST, problem)


def state_pieces(training: Training, share: bool = False) -> Iterator[Piece]:
    """Every tensor of the state on this rank, copies that another rank owns included.

    ``share``: only this replica's share, so that the replicas of a stage have each element once.
    """
    yield from training.flat.weight_pieces(share)
    yield from training.optimizer.pieces(share)


def _weights_only(training: Training) -> Iterator[Piece]:
    """What weights alone fill: the masters too, which are as fine as what is stored."""
    for piece in state_pieces(training):
        if not piece.name.startswith("optim."):
            yield piece
        elif piece.name.startswith(MASTER):
            yield replace(piece, name=piece.name.removeprefix(MASTER))


def open_saver(training: Training, share: Share, directory: Path | None = None) -> Saver:
    """What writes the checkpoints of this layout, as ``checkpoint`` says; of its run, if no
    ``directory`` is named."""
    cfg, mesh = training.cfg.checkpoint, training.mesh
    directory = directory or Path(training.cfg.run.dir, "checkpoints")
    return Saver(
        directory,
        rank=mesh.rank,
        world_size=mesh.shape.world_size,
        share=share,
        background=cfg.async_save,
        keep=cfg.keep,
        keep_every=cfg.keep_every,
    )


def save_state(
    training: Training, position: Position, saver: Saver, live: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint of this position, or begin to; collective.

    Every replica writes its share, with and without ZeRO-1: more disks, and less for each.
    ``live`` is what ``launch.layouts.layout_at`` is to know of a change of layout.
    """
    extra = {
        "position": asdict(position),
        "layout": str(training.mesh.shape),
        "model": asdict(training.cfg.model),
        "reset_at_document": training.cfg.data.reset_at_document,
        "loss_scale": training.loss_scale.state() if training.loss_scale else None,
        **({"live": live} if live else {}),
    }
    saver.save(position.step, state_pieces(training, share=True), extra)


def find_checkpoint(cfg: Config, mesh: Mesh, directory: Path, share: Share) -> Checkpoint | None:
    """The checkpoint that ``checkpoint.resume`` asks for, if there is one; collective.

    A directory, or none, is where a run begins: one that has begun so goes on from its newest
    checkpoint, or each restart and each requeue would lose what was done.
    """
    wanted, where = cfg.checkpoint.resume, {"rank": mesh.rank, "world_size": mesh.shape.world_size}
    begun = wanted == "auto" or (mesh.rank == 0 and has_begun(cfg))
    with _as_bad_input():
        if not share("begun" if begun else "")[0]:
            found = None if wanted == "none" else open_checkpoint(Path(wanted))
            if found:
                check_contents(found)
            return found
        found, bad = load_latest(directory, share=share, check=check_contents, **where)
    if mesh.rank == 0:
        for error in bad:
            print(f"passed over a bad checkpoint: {error}", file=sys.stderr, flush=True)
    return found


def check_contents(checkpoint: Checkpoint) -> None:
    """What a run needs besides files that are whole.

    Raises:
        CheckpointError: if the position or a part of the optimizer's state is missing.
    """
    Position.of(checkpoint)
    names = set(checkpoint.names)
    weights = {name for name in names if not name.startswith("optim.")}
    if weights == names:
        return  # an import
    kinds = {name.split(".")[1] for name in names - weights} | {"exp_avg", "exp_avg_sq"}
    for missing in sorted({f"optim.{k}.{w}" for k in kinds for w in weights} - names):
        raise CheckpointError(checkpoint.path / MANIFEST, f"{missing!r} is not stored")


def abandoned_after(cfg: Config, found: Checkpoint | None) -> int | None:
    """The step after which a run that begins as ``checkpoint.resume`` says leaves what ``run.dir``
    has of another past; None: it goes on, and leaves nothing."""
    wanted = cfg.checkpoint.resume
    if wanted == "auto" or (found and found.path != Path(wanted)):
        return None
    own = Path(cfg.run.dir, "checkpoints").resolve()
    return found.step if found and found.path.resolve().parent == own else -1


def restore(training: Training, checkpoint: Checkpoint, share: Share) -> Position:
    """Fill weights and optimizer from a checkpoint of any layout; collective.

    One without optimizer state, as imports are, gives weights of any dtype; the moments stay 0.
    """
    with _as_bad_input():
        if any(name.startswith("optim.") for name in checkpoint.names):
            checkpoint.read(state_pieces(training), share=share)
        else:
            checkpoint.read(_weights_only(training), cast=True, share=share)
    position = Position.of(checkpoint)
    if checkpoint.path == Path(training.cfg.checkpoint.resume):
        position = replace(position, begun=str(checkpoint.path.resolve()))
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
