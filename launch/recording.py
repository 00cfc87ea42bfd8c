"""``run.record``: hooks on a GPT from outside, and a file a rank for ``tools/compare_runs.py``.

Nothing of this is in the way of a run that does not record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from torch import Tensor, nn

from launch.build import Training
from launch.config import Config
from launch.partition import layers_of
from megalite.comparison.record import (
    FOLDER,
    MADE,
    RECEIVED,
    Entry,
    Origin,
    file_of,
    head_line,
    step_line,
)
from megalite.mesh import Axis
from megalite.metrics import Lines, cut_back
from megalite.optim.clip import StepTotals
from megalite.pipeline.executor import Batch
from megalite.pipeline.watched import WatchedStage
from megalite.slices import Piece, get_slice
from megalite.statistics import statistics
from megalite.tensor_parallel.embedding import padded_rows
from model.gpt import GPTStage

PARTS = ("attention_norm", "attention", "mlp_norm", "mlp")


def is_recorded(step: int, every: int) -> bool:
    """Whether a step is recorded: the first one and each multiple of ``every``; with 0 each of
    the first 100, then every 10th, from 1,000 on every 100th, and so on."""
    every = every or 10 ** max(0, len(str(step - 1)) - 2)
    return step == 1 or step % every == 0


def places(num_layers: int) -> tuple[str, ...]:
    """Where a model is looked at, in the order of a forward pass."""
    layers = (f"layers.{n}{part}" for n in range(num_layers) for part in (*_dotted(PARTS), ""))
    return ("embedding", *layers, "final_norm", "logits", "loss")


def _dotted(names: Iterable[str]) -> Iterator[str]:
    return (f".{name}" for name in names)


@dataclass(frozen=True)
class _Place:
    """A place in a stage, and how its tensor is cut over tp: along "rows", "columns", or not.

    ``columns`` is the global width of one that is cut along columns, ``valid`` how many of this
    rank's exist. ``forward`` and ``backward`` say whether the stage computes what is seen there.
    """

    name: str
    stage: int
    tp: Axis
    cut: str = ""
    columns: int = 0
    valid: int = 0
    forward: str = MADE
    backward: str = MADE

    def of(self, x: Tensor) -> tuple[Tensor, tuple[int, int], tuple[int, int]]:
        """What of x exists globally, the global shape, and where x begins in it."""
        rows, _, columns = x.shape
        if self.cut == "rows":
            return x, (rows * self.tp.size, columns), (self.tp.index * rows, 0)
        if self.cut == "columns":
            return x[..., : self.valid], (rows, self.columns), (0, self.tp.index * columns)
        return x, (rows, columns), (0, 0)


class Recording:
    """What this rank records of the running step, and its file.

    Follows the run from ``step`` (done) on.
    """

    def __init__(self, training: Training, step: int) -> None:
        self.cfg, self.mesh, self.step = training.cfg, training.mesh, step
        self._path = file_of(Path(self.cfg.run.dir, FOLDER), self.mesh.rank)
        self._active, self._forward = False, False
        self._microbatch: int | None = None
        self._seen: dict[Entry, Tensor] = {}
        self._written: tuple[Entry, ...] = ()
        self._stage_of = {
            get_slice(p).name: b.stage for b in training.flat.buckets for p in b.params
        }
        ranges = layers_of(self.cfg, training.plan)
        for number, gpt in training.gpt.items():
            self._attach(gpt, number, ranges[number])
            stage = training.executor.stages[number]
            assert isinstance(stage, WatchedStage)
            stage.watcher = self

    def begin(self) -> None:
        """A step of training begins."""
        self.step += 1
        self._active = is_recorded(self.step, self.cfg.run.record_every)

    def clear(self) -> None:
        """Its passes begin, perhaps once more."""
        self._seen.clear()

    @contextmanager
    def at(self, microbatch: int, *, forward: bool) -> Iterator[None]:
        """The stages' hooks belong to this microbatch."""
        if not self._active:
            yield
            return
        self._microbatch, self._forward = microbatch, forward
        try:
            yield
        finally:
            self._microbatch = None

    def parameters(self, phase: str, pieces: Iterable[Piece]) -> None:
        """Take the numbers of a tensor of each parameter, or of this rank's part of it."""
        if not self._active:
            return
        for piece in pieces:
            flat = piece.tensor.dim() < 2
            shape, offset = (
                ((1, *piece.shape), (0, *piece.offset))
                if flat
                else (
                    piece.shape,
                    piece.offset,
                )
            )
            x = piece.tensor.view(1, 1, -1) if flat else piece.tensor.unsqueeze(1)
            entry = Entry(
                phase,
                piece.name,
                MADE,
                self._stage_of[piece.name],
                -1,
                (0,),
                (shape[0], shape[1]),
                (offset[0], offset[1]),
                (x.shape[0], x.shape[2]),
                piece.owner,
            )
            self._seen[entry] = statistics(x.detach(), *entry.offset)

    def write(self) -> None:
        """The step is over: add it to the file. Waits for the device."""
        if not self._active:
            return
        self._active = False
        entries = tuple(self._seen)
        empty = torch.empty(0, 5, dtype=torch.int64)
        words = torch.cat(list(self._seen.values())).cpu() if self._seen else empty
        self._seen.clear()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with closing(Lines(self._path)) as lines:
            if entries != self._written:
                lines.add(head_line(self.step, self._origin(), entries))
                self._written = entries
            lines.add(step_line(self.step, words.numpy()))

    def _origin(self) -> Origin:
        cfg, mesh = self.cfg, self.mesh
        return Origin(
            rank=mesh.rank,
            world_size=mesh.shape.world_size,
            pp=mesh.pp.index,
            dp=mesh.dp.index,
            tp=mesh.tp.index,
            layout=f"{mesh.shape}, {cfg.parallel.schedule}",
            dtype=cfg.train.dtype,
            num_samples=cfg.train.global_batch_size,
            places=places(cfg.model.num_layers),
        )

    def _samples(self, microbatch: int) -> tuple[int, ...]:
        """The row of the global batch of each row of a microbatch; -1: there is none."""
        train, dp = self.cfg.train, self.mesh.dp
        first = (microbatch * dp.size + dp.index) * train.micro_batch_size
        rows = range(first, first + train.micro_batch_size)
        return tuple(row if row < train.global_batch_size else -1 for row in rows)

    def _look(self, place: _Place, x: Tensor) -> None:
        """Take the numbers of x, and later those of the gradient that arrives there.

        What is computed once more in a backward pass is not looked at again, but only there may
        be the graph through which its gradient comes.
        """
        microbatch = self._microbatch
        if microbatch is None:
            return
        if self._forward:
            self._add("forward", place.forward, place, microbatch, x)
        if x.requires_grad:
            x.register_hook(lambda g: self._add("backward", place.backward, place, microbatch, g))

    def _add(self, phase: str, role: str, place: _Place, microbatch: int, x: Tensor) -> None:
        x, shape, offset = place.of(x.detach())
        if x.shape[-1]:
            entry = Entry(
                phase,
                place.name,
                role,
                place.stage,
                microbatch,
                self._samples(microbatch),
                shape,
                offset,
                (x.shape[0], x.shape[2]),
                True,
            )
            self._seen[entry] = statistics(x, *offset)

    def _attach(self, gpt: GPTStage, stage: int, layers: range) -> None:
        tp = gpt.layout.tp
        cut = "rows" if gpt.layout.cut_sequence else ""

        def place(name: str, forward: str = MADE, backward: str = MADE) -> _Place:
            return _Place(name, stage, tp, cut, forward=forward, backward=backward)

        blocks = list(zip(layers, gpt.blocks, strict=True))
        entered = f"layers.{layers.start - 1}" if layers.start else "embedding"
        empty = not blocks and not gpt.last
        if not gpt.first:
            backward = RECEIVED if empty else MADE
            _before(gpt, self._look, place(entered, forward=RECEIVED, backward=backward))
        elif empty:
            _after(gpt, self._look, place(entered, backward=RECEIVED))
        else:
            first = gpt.blocks[0] if blocks else gpt.norm
            assert first is not None
            _before(first, self._look, place(entered))
        for number, block in blocks:
            for part in PARTS:
                _after(block.get_submodule(part), self._look, place(f"layers.{number}.{part}"))
            handed_on = number == layers[-1] and not gpt.last
            backward = RECEIVED if handed_on else MADE
            _after(block, self._look, place(f"layers.{number}", backward=backward))
        if gpt.norm is not None:
            _after(gpt.norm, self._look, place("final_norm"))
            self._attach_loss(gpt, stage, tp)

    def _attach_loss(self, gpt: GPTStage, stage: int, tp: Axis) -> None:
        assert gpt.head is not None
        valid = gpt.head.shape[0] - padded_rows(gpt.head)
        vocab = get_slice(gpt.head).shape[0]
        logits_place = _Place("logits", stage, tp, "columns", vocab, valid)
        loss_place = _Place("loss", stage, tp)
        inner = gpt.token_losses

        def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
            self._look(logits_place, logits)
            losses = inner(logits, targets)
            self._look(loss_place, losses.detach().unsqueeze(-1))
            return losses

        gpt.token_losses = token_losses  # type: ignore[method-assign]


_Look = Callable[[_Place, Tensor], None]


def _before(module: nn.Module, look: _Look, place: _Place) -> None:
    def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        look(place, args[0])

    module.register_forward_pre_hook(hook)


def _after(module: nn.Module, look: _Look, place: _Place) -> None:
    def hook(_: nn.Module, args: object, out: Tensor) -> None:
        look(place, out)

    module.register_forward_hook(hook)


@dataclass
class RecordedTraining(Training):
    """A training whose steps are recorded."""

    recording: Recording = field(kw_only=True)

    def gradients(self, batch: Batch) -> StepTotals:
        self.recording.clear()
        totals = super().gradients(batch)
        self.recording.parameters("gradient", self.flat.grad_pieces())
        return totals

    def step(self, batch: Batch, lr: float) -> StepTotals:
        self.recording.begin()
        totals = super().step(batch, lr)
        with self.trace.span("statistics"):
            self.recording.parameters("weight", self.flat.weight_pieces())
            self.recording.write()
        return totals


def recorded(training: Training, step: int) -> Training:
    """``training``, of which ``step`` steps are done, as one that records if ``run.record``.

    A record of a run that is taken up is cut back to that step; each rank cuts its own file, and
    rank 0 those of ranks that are no more.
    """
    _cut_back(training.cfg, training.mesh.rank, training.mesh.shape.world_size, step)
    if not training.cfg.run.record:
        return training
    same = {f.name: getattr(training, f.name) for f in fields(training)}
    return RecordedTraining(**same, recording=Recording(training, step))


def _cut_back(cfg: Config, rank: int, world_size: int, step: int) -> None:
    folder = Path(cfg.run.dir, FOLDER)
    for path in folder.glob("rank_*.jsonl"):
        if path == file_of(folder, rank) or (rank == 0 and path >= file_of(folder, world_size)):
            cut_back(path, step)
