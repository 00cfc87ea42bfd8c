"""Trains a GPT: ``torchrun --nproc-per-node N launch/pretrain_gpt.py --config FILE [--a.b c ...]``.

Read ``main`` from top to bottom: every line is used once.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from data.config import sources
from data.dataset import Mixture, TokenDataset, check_tokenizer
from data.loader import EvalLoader, TokenLoader
from data.prepare import ensure_prepared
from data.tokenizer import Tokenizer
from launch.build import SUM_DTYPES, Training, build, describe, skips_steps
from launch.config import Config, check, fit, load_config, report_config_error, resolve_vocab
from launch.job import die, joined, share_text
from launch.profile import TIMED_STEPS, Split, resolve, stage_times
from launch.reconfigure import Change, Layouts, prepare
from launch.record import Recorder
from launch.recording import recorded
from launch.run_dir import check_named_checkpoint, check_run_dir
from launch.sample import sample
from launch.state import (
    Position,
    abandoned_after,
    find_checkpoint,
    open_saver,
    restore,
    save_state,
)
from launch.tracing import TraceFiles
from launch.watching import Watching
from launch.world import world_from_env
from megalite.errors import ConfigError
from megalite.mesh import Mesh, local_device, make_deterministic
from megalite.optim.adamw import choose_backend, learning_rate
from megalite.parallel_config import mesh_shape
from megalite.pipeline.executor import Batch
from megalite.place import Phase
from megalite.resilience.stop import Control


def main(argv: list[str]) -> None:
    try:
        cfg, world = load_config(argv), world_from_env()
        if Control.of_worker().fits:
            cfg = fit(cfg, world.size)
        check(cfg, world.size)
        if cfg.train.deterministic:
            make_deterministic()
        device, dtype = local_device(world.local_rank), SUM_DTYPES[cfg.train.dtype]
        choose_backend(cfg.optim.backend, device, dtype, skips_steps(cfg))
        ensure_prepared(cfg.data)
        train_data, held_out, tokenizer = open_data(cfg)
        cfg = resolve_vocab(cfg, tokenizer.vocab_size)
        check_named_checkpoint(cfg)
        told = check_run_dir(cfg, train_data)
        if world.rank == 0:
            print("\n".join(told), end="\n" if told else "", flush=True)
    except ConfigError as error:
        report_config_error(error)
    try:
        with joined(mesh_shape(cfg.parallel, world.size), world) as mesh:
            run(cfg, mesh, train_data, held_out, tokenizer)
    except BaseException as error:  # whatever it is, the other ranks must not wait for this one
        die(error, world)


def open_data(cfg: Config) -> tuple[Mixture, list[TokenDataset], Tokenizer]:
    """The training mixture, the held-out sets and the tokenizer of all of them."""
    named = sources(cfg.data)
    train_data = Mixture.open(named)
    train_data.check(cfg.model.seq_length)
    evaluates = cfg.train.eval_every > 0
    held_out = [TokenDataset.open(d, "val") for _, d in named] if evaluates else []
    tokenizer = Tokenizer.load(cfg.data.tokenizer or train_data.datasets[0].tokenizer_path)
    for dataset in train_data.datasets:
        check_tokenizer(dataset, tokenizer)
    return train_data, held_out, tokenizer


def run(
    cfg: Config, mesh: Mesh, train_data: Mixture, held_out: list[TokenDataset], tokenizer: Tokenizer
) -> None:
    """The whole run, a phase for each layout that it has."""
    watching = Watching(cfg.run.watchdog_s, mesh.device)
    found = find_checkpoint(cfg, mesh, Path(cfg.run.dir, "checkpoints"), share_text(mesh))
    layouts = Layouts(cfg, found, mesh)
    asked, cfg, mesh = cfg, *layouts.first(cfg, mesh)
    cfg, plan, profile = resolve(cfg, mesh)
    share, place = share_text(mesh), watching.place
    watching.start(cfg, mesh, plan, share)
    training = build(cfg, mesh, plan, timed=profile is not None, eod=tokenizer.eod, place=place)
    position = restore(training, found, share) if found else Position.first(cfg)
    training = recorded(training, position.step)
    shown = asked if layouts.live else cfg
    left = abandoned_after(cfg, found)
    recorder = Recorder(shown, training, position, train_data, share, left)
    with watching, recorder, layouts:
        for text in layouts.mailbox.dropped:
            recorder.event("request_dropped", step=position.step, text=text)
            recorder.say(text)
        if found:
            recorder.event("restore", step=position.step, path=str(found.path))
            recorder.say(f"going on from {found.path}")
        while change := train(training, profile, train_data, held_out, layouts, recorder):
            training, profile = change.carry_out(training, layouts, recorder), change.profile
            watching.start(training.cfg, training.mesh, training.plan, share_text(training.mesh))
        place.at(Phase.SAMPLING)
        if cfg.train.eval_every and recorder.position().step == cfg.train.steps:
            start, vocab = [tokenizer.eod], tokenizer.vocab_size
            text = tokenizer.decode(sample(training, start, 200, vocab, seed=cfg.train.seed))
            recorder.say(f"\nsampled from the model:\n\n{text}\n")
        recorder.say(f"files of this run: {cfg.run.dir}")


def train(
    training: Training,
    profile: Split | None,
    train_data: Mixture,
    held_out: list[TokenDataset],
    layouts: Layouts,
    recorder: Recorder,
) -> Change | None:
    """The steps of one layout: to the end of the run, or to a change that all have agreed to."""
    cfg, mesh, place = training.cfg, training.mesh, training.place
    share = share_text(mesh)
    saver, done = open_saver(training, share), recorder.position().step
    last = min(cfg.train.steps, cfg.run.stop_at or cfg.train.steps)
    batches = {
        "seq_length": cfg.model.seq_length,
        "global_batch_size": cfg.train.global_batch_size,
        "micro_batch_size": cfg.train.micro_batch_size,
        "dp_index": mesh.dp.index,
        "dp_size": mesh.dp.size,
    }
    loader = TokenLoader(train_data, seed=cfg.train.seed, **batches)

    def look(step: int) -> None:
        place.at(Phase.EVALUATION)
        limit = cfg.train.eval_batches
        loaders = [EvalLoader(d, max_batches=limit, **batches) for d in held_out]
        recorder.evaluation(step, *evaluate(training, loaders))

    with loader, TraceFiles(training) as traces:
        recorder.say(describe(training))
        if profile:
            recorder.say(profile.profile())
        if recorder.owes_evaluation():
            look(done)
        recorder.resume_clock()
        for step in range(done + 1, last + 1):
            training.request = layouts.mailbox.is_full()
            train_step(training, loader, recorder, step)
            place.at(Phase.BETWEEN)
            traces.after_step()
            training.control.stepped(step)
            if profile and step == min(done + TIMED_STEPS, last):
                recorder.say(profile.compare(stage_times(training)))
            stops = recorder.stop_asked and step < last
            # Before the save, so that no restart leaves one out. A stop has no time for it, so that
            # the run makes it when it is taken up.
            if is_due(step, cfg.train.eval_every, cfg.train.steps) and not stops:
                look(step)
            saves = is_due(step, cfg.checkpoint.every, last) or step == cfg.run.stop_at or stops
            if saves:
                place.at(Phase.SAVE)
                save_state(training, recorder.position(), saver, layouts.live)
            recorder.saves(ended := saver.finished())
            layouts.saved(ended)
            if stops:
                break
            wanted = layouts.due(step, recorder, share) if step < last else None
            change = prepare(wanted, training, layouts, recorder, saver, saves) if wanted else None
            if change:
                return change
            recorder.resume_clock()
        place.at(Phase.SAVE)
        saver.wait()
        recorder.saves(saver.finished(), last=True)
        if recorder.stop_asked and recorder.position().step < last:
            recorder.say(f"stopped on request after step {recorder.position().step}")
            recorder.event("stop", step=recorder.position().step)
            training.control.mark_stopped()
    return None


def train_step(training: Training, loader: TokenLoader, recorder: Recorder, step: int) -> None:
    """Step number ``step`` (from 1); nothing in it waits for the device."""
    trace, place = training.trace, training.place
    place.step(step)
    with trace.step(step):
        with trace.span("data"):
            batch = to_device(loader.batch(step - 1), training.mesh.device)
            batch.step = step
            if training.cfg.model.dropout:
                samples = torch.from_numpy(loader.sample_ids(step - 1))
                batch.samples = samples.to(training.mesh.device, non_blocking=True)
        lr = learning_rate(training.cfg.optim, step, training.cfg.train.steps)
        totals = training.step(batch, lr)
        place.at(Phase.RECORD)
        with trace.span("record"):
            recorder.step(step, lr, totals)


def evaluate(training: Training, loaders: list[EvalLoader]) -> tuple[float, float]:
    """Mean held-out loss in nats a token, and UTF-8 bytes a token."""
    device = training.mesh.device
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for loader in loaders:
        for i in range(loader.num_batches):
            total += training.losses(to_device(loader.batch(i), device))
    summed, count = total.tolist()
    return summed / count, sum(loader.utf8_bytes for loader in loaders) / count


def to_device(batch: tuple[torch.Tensor, torch.Tensor], device: torch.device) -> Batch:
    tokens, targets = (t.to(device, non_blocking=True) for t in batch)
    return Batch(tokens, targets)


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something done every so many steps, and at the end, is done after this one."""
    return every > 0 and (step % every == 0 or step == last)


if __name__ == "__main__":
    main(sys.argv[1:])
