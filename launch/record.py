"""What a run tells the world about its steps: files, console, wandb; from world rank 0 only."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from data.dataset import Mixture
from launch.build import Training
from launch.config import Config
from launch.figures import Figures
from launch.layouts import to_plain
from launch.page import write_page
from launch.progress import Progress
from launch.run_dir import write_run_dir, write_schedule
from launch.state import Position, Share
from launch.tracking import Tracker
from launch.world import why_started
from megalite.checkpoint.background import Saved
from megalite.checkpoint.load import set_aside
from megalite.errors import CheckpointError
from megalite.lagged import Lagged, Reading
from megalite.metrics import (
    EvalRecord,
    EventLog,
    MetricsLog,
    RunLock,
    StepRecord,
    read_lines,
)
from megalite.optim.clip import StepTotals, Told
from megalite.resilience.bad_steps import BadSteps, Where
from megalite.resilience.stragglers import Stragglers


class Recorder:
    """Follows a run from ``position`` on. Every rank has one, so that all know where the run is
    and all see a bad step; rank 0's writes.

    A step's numbers are read from the device one step later.

    Args:
        cfg: as asked for, which is what ``run.dir`` says of its run.
        abandoned_after: checkpoints of later steps are of another past, and are set aside. None:
            the run goes on, and sets aside what was passed over because it is damaged.

    Attributes:
        requested: a rank knows of a request to the run; the same on all ranks.
        stop_asked: a rank was asked to end the run; the same on all.
    """

    def __init__(
        self,
        cfg: Config,
        training: Training,
        position: Position,
        data: Mixture,
        share: Share,
        abandoned_after: int | None = None,
    ) -> None:
        mesh = training.mesh
        self.requested = False
        self._bad_steps = BadSteps(cfg.train.bad_step, cfg.train.dtype == "fp16")
        self.cfg = cfg
        self._position, self._lagged = position, Lagged()
        self._since = time.perf_counter()
        self.stop_asked = False
        self._files: tuple[MetricsLog, EventLog] | None = None
        self._tracker: Tracker | None = None
        self._progress = Progress(cfg.train.steps, mesh.rank)
        self.save_error: CheckpointError | None = None
        self._begun, self._num_skipped = position.step, 0
        left: list[Path] = []
        if mesh.rank == 0:
            run, lock = cfg.run, RunLock(cfg.run.dir)
            write_run_dir(cfg, data)
            left = self._set_aside(abandoned_after)
            log = MetricsLog.open(run.dir, position.step, lock)
            self._files = log, EventLog(run.dir)
            self._tracker = Tracker(run.dir, run.name, run.wandb, asdict(cfg))
        self.follow(training, share)
        self.event("start", step=position.step, why=why_started(), **self.where)
        self._say_of_the_past(left, goes_on=abandoned_after is None)

    def _set_aside(self, abandoned_after: int | None) -> list[Path]:
        """What the run does not go on from; of what it could not go on from, as far as that can be
        moved."""
        directory = Path(self.cfg.run.dir, "checkpoints")
        if abandoned_after is not None:
            return set_aside(directory, abandoned_after)
        try:
            return set_aside(directory, self._position.step)
        except CheckpointError as error:
            self.say(f"a checkpoint that was passed over stays where it is: {error}")
            return []

    def _say_of_the_past(self, left: list[Path], goes_on: bool) -> None:
        step, paths = self._position.step, [str(path) for path in left]
        if paths:
            why = "passed over" if goes_on else "of another past"
            self.event("set_aside", step=step, why=why, paths=paths)
            self.say(f"{why}, and set aside: {', '.join(paths)}")
        if self._files and goes_on and step and (problem := self._files[0].gap(step)):
            self.event("record_damaged", step=step, problem=problem)
            self.say(f"warning: {problem}; the weights are not touched by that")

    def follow(self, training: Training, share: Share) -> None:
        """From here on the run's layout is that of ``training``."""
        cfg, mesh, plan = training.cfg, training.mesh, training.plan
        self._watch, self._share = training.watch, share
        self._figures = Figures(cfg, mesh, plan, training.trace)
        self._stragglers = Stragglers(mesh.shape)
        self.layout = f"{mesh.shape}, {cfg.parallel.schedule}"
        self.where = {
            "layout": self.layout,
            "world_size": mesh.shape.world_size,
            "parallel": to_plain(cfg.parallel),
        }
        if mesh.rank == 0:
            write_schedule(Path(self.cfg.run.dir), plan)

    def step(self, step: int, lr: float, totals: StepTotals) -> None:
        """A step has been queued on the device; take the numbers of the one before.

        Raises:
            FloatingPointError: on every rank, if that one's loss or gradient is not finite.
        """
        now = time.perf_counter()
        host = {"lr": lr, "step_time_s": now - self._since, "replays": totals.replays}
        self._lagged.push(step, totals.stacked(), **host)
        self._since = now
        self._figures.gather(step)
        for reading in self._lagged.pop():
            self._take(reading)

    def position(self) -> Position:
        """Where the run is, once all steps so far are done and recorded."""
        for reading in self._lagged.flush():
            self._take(reading)
        if self._files:
            self._files[0].sync()
        return self._position

    def owes_evaluation(self) -> bool:
        """Whether one was due after the step from which the run goes on, and was left out, as by a
        stop, which has no time for it; collective, the same on all ranks."""
        step, every = self._position.step, self.cfg.train.eval_every
        if not step or not every or step % every:
            return False
        path = Path(self.cfg.run.dir, "eval.jsonl")
        made = self._files is not None and any(e["step"] == step for e in read_lines(path)[-1:])
        return self._share("made" if made else "")[0] == ""

    def evaluation(self, step: int, val_loss: float, bytes_per_token: float) -> None:
        """Mean held-out loss in nats a token."""
        position = self.position()
        record = EvalRecord.of(step, val_loss, bytes_per_token, position.tokens)
        self._progress.evaluation(record)
        if self._files and self._tracker:
            self._files[0].write_eval(record)
            values = {k: v for k, v in asdict(record).items() if k not in ("step", "tokens")}
            self._tracker.log(step, values)
        self.resume_clock()

    def resume_clock(self) -> None:
        """What happened since the last step is not to count as time of the next."""
        self._since = time.perf_counter()

    def saves(self, ended: list[Saved], last: bool = False) -> None:
        """Say how saves went. The run goes on without one that failed.

        Args:
            last: no step follows.
        Raises:
            CheckpointError: the last of them failed, and no step follows.
        """
        for saved in ended:
            self.save_error = saved.error
            told = {"step": saved.step, "path": str(saved.path)}
            if saved.error is None:
                times = {"seconds": saved.seconds, "stalled_s": saved.stalled_s}
                self.event("save", **told, **times)
            else:
                self.event("save_failed", **told, problem=str(saved.error))
                self.say(f"the checkpoint of step {saved.step} failed: {saved.error}")
            if saved.warning:
                self.event("save_warning", **told, problem=saved.warning)
                self.say(saved.warning)
        if last:
            self.check_saved()

    def check_saved(self) -> None:
        """Raises:
        CheckpointError: if the last save failed.
        """
        if self.save_error is not None:
            raise self.save_error

    def event(self, name: str, **fields: Any) -> None:
        if self._files:
            self._files[1].write(name, **fields)

    def say(self, text: str) -> None:
        self._progress.note(text)

    def _take(self, reading: Reading) -> None:
        told, replays = Told(*reading.values), int(reading.host["replays"])
        self.requested = told.requests > 0
        self.stop_asked |= told.stops > 0
        loss, tokens, norm, finite = told[:4]
        before, seconds = self._position, reading.host["step_time_s"]
        self._position = Position(
            reading.step,
            before.samples + self.cfg.train.global_batch_size,
            before.tokens + int(tokens),
            before.updates + int(finite),
            before.begun,
        )
        record = StepRecord(
            step=reading.step,
            loss=loss,
            grad_norm=norm,
            lr=reading.host["lr"],
            tokens=self._position.tokens,
            samples=self._position.samples,
            step_time_s=seconds,
            tokens_per_s=tokens / seconds,
            skipped=not finite,
            layout=self.layout,
        )
        self._num_skipped += record.skipped
        self._progress.step(record)
        figures = self._figures.of_step(reading.step, record.tokens_per_s)
        if self._files and self._tracker:
            self._files[0].write(record)
            values = {k: v for k, v in asdict(record).items() if k not in ("step", "layout")}
            self._tracker.log(reading.step, {**values, **figures})
        self._compare_ranks(reading.step)
        self._judge(reading.step, told, replays)

    def _compare_ranks(self, step: int) -> None:
        """Name ranks that have become slow, where a traced run has just looked at all."""
        passes, self._figures.passes = self._figures.passes, []
        for slow in self._stragglers.look(passes) if passes else ():
            times = {"rank": slow.rank, "ratio": slow.ratio, **passes[slow.rank]._asdict()}
            self.event("straggler", step=step, **times, text=slow.text)
            self.say(slow.text)

    def _judge(self, step: int, told: Told, replays: int) -> None:
        """Say what was wrong with a step, and end the run if it is not to go on.

        All ranks were told the same, so all come to the same.
        """
        found = self._bad_steps.judge(step, told, replays)
        if found is None:
            return
        fields: dict[str, Any] = {"loss": told.loss, "grad_norm": told.grad_norm}
        if self.cfg.train.dtype == "fp16":
            fields["loss_scale"] = told.scale
        text = found.text
        if found.where is not Where.NOWHERE:
            place = self._watch.first(step, self._share, found.where is Where.KEPT)
            fields["place"] = str(place) if place else ""
            text += f"; first not finite on {place}" if place else ""
        self.event(found.event, step=step, **fields)
        if found.ends:
            raise FloatingPointError(f"{text}; nothing of it is saved")
        self.say(text)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if error is None:
                done = self.position().step - self._begun
                if self._num_skipped:
                    self.say(
                        f"{self._num_skipped} of {done} steps since step {self._begun} were skipped"
                    )
        finally:
            self._progress.close()
            if self._tracker:
                run_dir = Path(self.cfg.run.dir)
                self._tracker.attach(
                    lambda: write_page(run_dir, run_dir / "report.html", quick=True)
                )
                self._tracker.finish(0 if error is None else 1)
            for file in self._files or ():
                file.close()
