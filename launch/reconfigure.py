"""Another layout in mid-run, without a restart: the same processes move what they hold.

``Layouts`` knows what is asked for and when. ``prepare`` decides on all ranks whether it can be;
until then nothing has moved and the old layout goes on. ``Change.carry_out`` does it: from the
first byte on there is no way back but the checkpoint that was written just before.
"""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from launch.build import Training, build, hold
from launch.config import Config, layout_problems
from launch.job import share_text
from launch.layouts import changed, changes_of, layout_at, to_plain
from launch.profile import Split, resolve
from launch.record import Recorder
from launch.recording import recorded
from launch.request import Mailbox, Request, parse
from launch.state import Share, save_state
from megalite.checkpoint.background import Saved, Saver
from megalite.checkpoint.load import Checkpoint
from megalite.checkpoint.manifest import together
from megalite.checkpoint.reshard import Inventory, Links, Resharding, buffers_of, inventory, reshard
from megalite.data_parallel.bucket import FlatParameters
from megalite.errors import CheckpointError, ConfigError, ScheduleError
from megalite.mesh import Mesh
from megalite.mesh_shape import MeshShape
from megalite.optim.adamw import Buffers
from megalite.parallel_config import ParallelConfig, mesh_shape
from megalite.place import Phase
from megalite.schedule.action import Plan

_MB = 1e6
T = TypeVar("T")


class Layouts:
    """Which layout the run is to have: at first, and after each step.

    Attributes:
        asked: what the command line and its file say.
        now: the layout that runs, with what is measured left open.
        live: what checkpoints keep of changes, for ``layout_at``.
    """

    def __init__(self, cfg: Config, found: Checkpoint | None, mesh: Mesh) -> None:
        """``found`` is what the run is taken up from; a layout of it that these ranks cannot have
        gives way to the one that is asked for."""
        self.asked = self.now = cfg.parallel
        self.live: dict[str, Any] | None = None
        self._scheduled = changes_of(cfg.parallel)
        if found:
            stored = found.extra.get("live")
            wanted = layout_at(self.asked, found.step, stored)
            if not layout_problems(replace(cfg, parallel=wanted), mesh.shape.world_size):
                self.go_on(wanted)
        self.mailbox = Mailbox(Path(cfg.run.dir), mesh.rank == 0, self._has)

    def first(self, cfg: Config, mesh: Mesh) -> tuple[Config, Mesh]:
        """The configuration and the mesh of the first layout, given those that are asked for."""
        shape = mesh_shape(self.now, mesh.shape.world_size)
        if shape == mesh.shape:
            return replace(cfg, parallel=self.now), mesh
        made = mesh.reshaped(shape)
        mesh.close()
        return replace(cfg, parallel=self.now), made

    def __enter__(self) -> Layouts:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # else a restart may carry out what was asked for
            self.mailbox.close()

    def go_on(self, parallel: ParallelConfig) -> None:
        """From here on the run has this layout."""
        if parallel != self.now:
            self.live = {"asked": to_plain(self.asked), "now": to_plain(parallel)}
        self.now = parallel

    def due(self, step: int, recorder: Recorder, share: Share) -> Wanted | None:
        """What is to change after this step; collective where a request was made."""
        if step in self._scheduled:
            return Wanted(self._scheduled[step], None)
        if not recorder.requested:
            return None
        recorder.requested = False
        request = parse(share(self.mailbox.take())[0])
        return Wanted(request.values, request) if request else None

    def saved(self, ended: Sequence[Saved]) -> None:
        """Saves that have ended in the layout of now: with one that is good a request is done."""
        if any(saved.error is None for saved in ended):
            self.mailbox.settle()

    def _has(self, values: Mapping[str, str]) -> bool:
        try:
            return changed(self.now, values) == self.now
        except ConfigError:
            return False


@dataclass(frozen=True)
class Wanted:
    """Fields of ``parallel`` that are to change, as text, and the request, if one asks."""

    values: Mapping[str, str]
    request: Request | None

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.values.items())


class Refused(Exception):
    """A change of layout that cannot be; the old one goes on."""


@dataclass
class Change:
    """A change that every rank has agreed to."""

    wanted: Wanted
    parallel: ParallelConfig
    cfg: Config
    mesh: Mesh
    plan: Plan
    profile: Split | None
    moves: Resharding
    began: float

    def carry_out(self, training: Training, layouts: Layouts, recorder: Recorder) -> Training:
        """Move everything into a training of the new layout, and leave the old one empty."""
        training.place.at(Phase.CHANGE)
        old, share = training.mesh, share_text(self.mesh)
        position, eod = recorder.position(), next(iter(training.gpt.values())).eod
        before = recorder.layout
        links = Links(self.mesh, self.moves.pairs())
        planned = self._estimate(links, training, recorder)
        begin = time.perf_counter()
        state, held = buffers_of(training.flat, training.optimizer), training.flat

        def fill(flat: FlatParameters) -> Buffers:
            training.place.at(Phase.MOVE)
            return reshard(self.moves, links, held, state, flat)

        new = build(
            self.cfg,
            self.mesh,
            self.plan,
            timed=self.profile is not None,
            eod=eod,
            fill=fill,
            place=training.place,
        )
        training.place.at(Phase.CHANGED)
        new.optimizer.set_num_steps(position.updates)
        if new.loss_scale and training.loss_scale:
            new.loss_scale.restore(training.loss_scale.state())
        sent = torch.tensor([float(links.sent_bytes)], dtype=torch.float64, device=old.device)
        self.mesh.world.all_reduce(sent).wait()
        moved_s, moved = time.perf_counter() - begin, int(sent)
        links.close()
        new = recorded(new, position.step)
        layouts.go_on(self.parallel)
        recorder.follow(new, share)
        if self.mesh is not old:
            gc.collect()
            old.close()
        pause = time.perf_counter() - self.began
        text = (
            f"the layout is {recorder.layout}: {moved / _MB:.2f} MB moved in {moved_s:.2f} s, "
            f"{pause:.2f} s of pause"
        )
        measured = {"moved_bytes": moved, "move_s": moved_s, "pause_s": pause}
        recorder.event(
            "layout", step=position.step, before=before, **planned, **measured, **recorder.where
        )
        recorder.say(text)
        if self.wanted.request:
            layouts.mailbox.answer(self.wanted.request, True, text)
        return new

    def _estimate(self, links: Links, training: Training, recorder: Recorder) -> dict[str, float]:
        """Say what will move, and how long it takes from the last step to the next."""
        total, most = self.moves.total_bytes(), max(self.moves.traffic(), default=0)
        pause = time.perf_counter() - self.began + most * links.seconds_a_byte()
        to = f"{self.mesh.shape}, {self.cfg.parallel.schedule}"
        recorder.say(
            f"changing the layout from {recorder.layout} to {to}: {total / _MB:.2f} MB to move, "
            f"{most / _MB:.2f} MB through the busiest rank, about {pause:.2f} s of pause"
        )
        return {"planned_bytes": total, "planned_pause_s": pause}


def prepare(
    wanted: Wanted,
    training: Training,
    layouts: Layouts,
    recorder: Recorder,
    saver: Saver,
    saves: bool,
) -> Change | None:
    """Decide whether the layout can change after the step that is done; collective.

    Writes a checkpoint of this step unless that ``saves`` anyway, and waits for it. Where the
    answer is no, says why.
    """
    share = share_text(training.mesh)
    training.place.at(Phase.CHANGE)
    try:
        change = _agree(wanted, training, layouts, share)
        training.place.at(Phase.SAVE)
        if not saves:
            save_state(training, recorder.position(), saver, layouts.live)
        saver.wait()
        recorder.saves(saver.finished())
        try:
            _together(share, recorder.check_saved)
        except Refused as error:
            _close(change.mesh, training.mesh)
            recorder.save_error = None  # it was needed for the change alone
            raise Refused(f"no checkpoint can be written: {error}") from error
    except Refused as error:
        step, text = recorder.position().step, f"the layout stays, without {wanted}: {error}"
        recorder.event("layout_refused", step=step, wanted=dict(wanted.values), why=str(error))
        recorder.say(text)
        if wanted.request:
            layouts.mailbox.answer(wanted.request, False, text)
        return None
    return change


def _agree(wanted: Wanted, training: Training, layouts: Layouts, share: Share) -> Change:
    """Raises:
    Refused: the same on every rank.
    """
    began, old = time.perf_counter(), training.mesh
    world_size = old.shape.world_size

    def legal() -> tuple[ParallelConfig, Config, MeshShape]:
        parallel = changed(layouts.now, wanted.values)
        if parallel == layouts.now:
            raise ValueError("that is the layout already")
        cfg = replace(training.cfg, parallel=parallel)
        for error in layout_problems(cfg, world_size):
            raise error
        return parallel, cfg, mesh_shape(parallel, world_size)

    parallel, cfg, shape = _together(share, legal)
    mesh = old.reshaped(shape)
    try:
        try:
            cfg, plan, profile = resolve(cfg, mesh)
        except (ConfigError, ScheduleError) as error:  # plans are the same on every rank
            raise Refused(str(error).splitlines()[0]) from error
        moves = _moves(training, cfg, shape, plan, share)
    except Refused:
        _close(mesh, old)
        raise
    return Change(wanted, parallel, cfg, mesh, plan, profile, moves, began)


def _moves(
    training: Training, cfg: Config, shape: MeshShape, plan: Plan, share: Share
) -> Resharding:
    """What goes where, from what every rank says that it holds and would hold."""
    rank = training.mesh.rank

    def mine() -> list[str]:
        future = hold(cfg, Mesh.at(shape, rank, torch.device("meta")), plan)
        sides = (training, future)
        return [inventory(side.flat, side.optimizer).to_text() for side in sides]

    held, wanted = _together(share, mine)
    node = share(f"{platform.node()} {os.environ.get('GROUP_RANK', '')}")
    room = [int(text) for text in share(str(free_memory(training.mesh.device)))]
    read = [[Inventory.from_text(t) for t in share(text)] for text in (held, wanted)]
    numbers = [node.index(name) for name in node]
    moves = _together(share, lambda: Resharding(read[0], read[1], numbers))
    _check_memory(moves, room, shared=training.mesh.device.type == "cpu")
    return moves


def _check_memory(moves: Resharding, room: list[int], shared: bool) -> None:
    """Whether every rank, or all of a node where they share it, has the memory for the change.

    Raises:
        Refused: that names the rank; the same on all, for all have the same numbers.
    """
    sizes = zip(moves.peaks(), moves.wanted, moves.held, strict=True)
    needs = [max(0, peak, after.nbytes) - before.nbytes for peak, after, before in sizes]
    for rank, need in enumerate(needs):
        node = [r for r, n in enumerate(moves.node) if n == moves.node[rank]] if shared else [rank]
        total = sum(max(0, needs[r]) for r in node)
        if need > 0 and total > room[rank]:
            who = f"the ranks {node} of its node need" if shared else "it needs"
            raise Refused(
                f"rank {rank} has {room[rank] / _MB:.0f} MB of memory left, and {who} "
                f"{total / _MB:.0f} MB more on the way"
            )


def free_memory(device: torch.device) -> int:
    """Bytes that can be had on the device, or of the host."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":") for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 2**62  # a host that does not say


def _together(share: Share, action: Callable[[], T]) -> T:
    """``manifest.together``, whose error is here a refusal."""
    try:
        return together(share, action)
    except CheckpointError as error:
        problem = error.problem.removeprefix("ConfigError: ").removeprefix("ValueError: ")
        raise Refused(problem) from error


def _close(mesh: Mesh, old: Mesh) -> None:
    if mesh is not old:
        mesh.close()
