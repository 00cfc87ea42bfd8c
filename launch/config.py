"""The whole configuration of a run: sections, value rules, and how a bad one is reported."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from data.config import DataConfig, sources
from launch.layouts import at_change, chain
from megalite import parallel_config
from megalite.config import Value, differences, load, suggest, values_of
from megalite.errors import ConfigError, ScheduleError
from megalite.optim.config import LARGEST_SCALE, SMALLEST_SCALE, OptimConfig
from megalite.parallel_config import ModelFacts, ParallelConfig
from megalite.schedule.generators import FILE, build_schedule
from megalite.schedule.lower import lower
from megalite.schedule.validate import validate
from model.config import PRESETS, GPTConfig

CONFIG, DATA = "config.yaml", "data.json"
"""In ``run.dir``: the resolved configuration, and which data it was."""


@dataclass(frozen=True)
class TrainConfig:
    """Steps, batches and numbers."""

    steps: int = 100
    """Steps of the whole run, and of the learning-rate schedule."""
    global_batch_size: int = 32
    """Sequences that one step consumes, over all ranks."""
    micro_batch_size: int = 4
    """Sequences that one rank computes at a time."""
    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "bf16"
    """What layers compute in; gradients and master weights are fp32 (fp64 with fp64)."""
    seed: int = 1234
    """Of initial weights, the order of samples and dropout."""
    eval_every: int = 0
    """Evaluate on held-out data after every so many steps; 0: never."""
    eval_batches: int = 4
    """Global batches of one evaluation."""
    deterministic: bool = False
    """Only algorithms that give the same bits again."""
    loss_scale: float = 65536.0
    """The first loss scale of fp16."""
    loss_scale_interval: int = 1000
    """Steps without an overflow after which the loss scale of fp16 doubles."""
    bad_step: Literal["stop", "skip", "replay"] = "stop"
    """What to do at a step whose loss or gradient is not finite."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state is written and taken up."""

    every: int = 0
    """Save after every so many steps, and at the end; 0: never."""
    keep: int = 2
    """How many of the newest checkpoints are kept."""
    keep_every: int = 0
    """Keep checkpoints of multiples of this step for good; 0: none."""
    async_save: bool = False
    """Write while training goes on."""
    resume: str = "auto"
    """auto: the newest of run.dir, if any. none, or a checkpoint's directory: where the run begins;
    a restart goes on from the newest of run.dir that has begun so."""


@dataclass(frozen=True)
class RunConfig:
    """Where a run lives and what it records."""

    dir: str = "runs/default"
    """Directory of everything that the run leaves."""
    name: str = ""
    """Name for the logs; empty: that of the directory."""
    trace: bool = False
    """Write a Chrome trace a rank, and what the report and wandb show of it."""
    trace_spans: int = 100_000
    """Most spans that a rank keeps: at the limit every second step goes, then every fourth, ..."""
    record: bool = False
    """Write statistics and hashes of tensors for tools/compare_runs.py."""
    record_every: int = 0
    """Record the first step and each multiple of this; 0: each of the first 100 steps, then every
    10th, from 1,000 on every 100th, and so on."""
    watchdog_s: float = 10.0
    """Report a stall so many seconds after the slowest action expected; 0: never."""
    stop_at: int = 0
    """End cleanly, with a checkpoint, after this step; 0: never."""
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """Weights & Biases; auto: online with a key, else offline."""


@dataclass(frozen=True)
class Config:
    """Trains a GPT: --config FILE [--section.field value ...]. Flags override the file."""

    model: GPTConfig = field(default_factory=GPTConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run: RunConfig = field(default_factory=RunConfig)


_AT_LEAST = {
    "model.vocab_size": 0,
    "optim.lr": 0,
    "optim.min_lr": 0,
    "optim.warmup_steps": 0,
    "optim.weight_decay": 0,
    "optim.clip_grad_norm": 0,
    "train.steps": 0,
    "train.seed": 0,
    "train.eval_every": 0,
    "train.eval_batches": 1,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
    "checkpoint.keep_every": 0,
    "run.trace_spans": 1,
    "run.record_every": 0,
    "run.watchdog_s": 0,
    "run.stop_at": 0,
}
_POSITIVE = (
    "model.norm_eps",
    "model.rope_theta",
    "model.init_std",
    "optim.eps",
)
_BETWEEN = {
    "train.loss_scale": (SMALLEST_SCALE, LARGEST_SCALE),
    "train.loss_scale_interval": (1, 1 << 24),  # counted in fp32
}


def load_config(argv: Sequence[str]) -> Config:
    """The configuration of ``--config FILE [--section.field value ...]``, not yet ``check``ed.

    Raises:
        ConfigError: for unknown names and values of the wrong type.
    """
    path, flags = split_config(argv)
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    return load(Config, path, flags, {"model.preset": expand_preset}, console=first)


def split_config(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Take ``--config FILE`` or ``--config=FILE`` out of the flags."""
    paths: list[str] = []
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--config":
            paths.append(next(words, ""))
        elif word.startswith("--config="):
            paths.append(word.partition("=")[2])
        else:
            rest.append(word)
    if any(not path or path.startswith("--") for path in paths):
        raise ConfigError("--config", "no file is named", "Write --config FILE")
    if len(set(paths)) > 1:
        raise ConfigError("--config", f"two files: {' and '.join(paths)}", "Name one")
    return (paths[0] if paths else None), rest


def expand_preset(name: str) -> dict[str, Any]:
    """The model fields that ``model.preset`` stands for; fields given explicitly override them."""
    if name and name not in PRESETS:
        raise ConfigError(
            "model.preset", f"there is no preset {name!r}", suggest(name, list(PRESETS))
        )
    return {f"model.{key}": value for key, value in PRESETS.get(name, {}).items()}


def facts_of(model: GPTConfig) -> ModelFacts:
    return ModelFacts(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=model.kv_heads,
        ffn=model.ffn,
        seq_length=model.seq_length,
        vocab_size=model.vocab_size,
        tied=model.tied_embeddings,
    )


def num_microbatches(cfg: Config, dp: int) -> int:
    """Microbatches of a step on each dp rank; the last may have rows missing."""
    return math.ceil(cfg.train.global_batch_size / (cfg.train.micro_batch_size * dp))


def resolve_vocab(cfg: Config, tokenizer_size: int) -> Config:
    """``cfg`` with the tokenizer's vocabulary size where none is given.

    Raises:
        ConfigError: if the model has fewer rows than the tokenizer has tokens.
    """
    if cfg.model.vocab_size == 0:
        return replace(cfg, model=replace(cfg.model, vocab_size=tokenizer_size))
    if cfg.model.vocab_size < tokenizer_size:
        raise ConfigError(
            "model.vocab_size",
            f"{cfg.model.vocab_size} is less than the tokenizer's {tokenizer_size} tokens",
            f"Use {tokenizer_size} or more, or 0 for the tokenizer's own size",
        )
    return cfg


def fit(cfg: Config, world_size: int) -> Config:
    """``cfg`` in the legal layout nearest to its own, where ``world_size`` ranks cannot have that.

    The global batch and the order of samples know no layout, so they stay. Changes in mid-run that
    so few ranks cannot make are left out.
    """
    facts, parallel = facts_of(cfg.model), cfg.parallel
    if parallel_config.problems(parallel, facts, world_size):
        near = parallel_config.nearest_legal(parallel, facts, world_size, 1)
        parallel = near[0] if near else parallel
    if any(_changes(replace(cfg, parallel=parallel), world_size)):
        parallel = replace(parallel, reconfigure=())
    return replace(cfg, parallel=parallel)


def check(cfg: Config, world_size: int) -> None:
    """Raise the first of ``violations``, and say how many more there are."""
    found = violations(cfg, world_size)
    if found:
        first, more = found[0], len(found) - 1
        note = f" ({more} more: tools/check_layout.py lists them)" if more else ""
        raise ConfigError(first.field, first.problem, first.fix + note)


def violations(cfg: Config, world_size: int) -> list[ConfigError]:
    """Every rule of layouts and of values that a configuration breaks."""
    layout = layout_problems(cfg, world_size) or [*_changes(cfg, world_size)]
    return [*layout, *_bounds(cfg), *_model(cfg.model), *_data(cfg), *_files(cfg)]


def layout_problems(cfg: Config, world_size: int) -> list[ConfigError]:
    """Every rule about layouts that a configuration breaks, without its changes in mid-run."""
    found = parallel_config.problems(
        cfg.parallel,
        facts_of(cfg.model),
        world_size,
        cfg.train.global_batch_size,
        cfg.train.micro_batch_size,
    )
    return found or [*_schedule_file(cfg, world_size)]


def _changes(cfg: Config, world_size: int) -> Iterator[ConfigError]:
    """What is wrong with the layouts of ``parallel.reconfigure``, the first that cannot be."""
    try:
        for step, parallel in chain(cfg.parallel):
            found = layout_problems(replace(cfg, parallel=parallel), world_size)
            if found:
                yield from (at_change(step, error) for error in found)
                return
    except ConfigError as error:
        yield error


def _schedule_file(cfg: Config, world_size: int) -> Iterator[ConfigError]:
    """What is wrong with a schedule from a file, in a layout that breaks no rule."""
    parallel = cfg.parallel
    if not parallel.schedule.startswith(FILE):
        return
    m = num_microbatches(cfg, parallel_config.mesh_shape(parallel, world_size).dp)
    try:
        made = build_schedule(parallel.schedule, parallel.pp, m, parallel.virtual_stages)
        validate(lower(made), trains=True)
    except ConfigError as error:
        yield error
    except ScheduleError as error:
        flags = f"--schedule {parallel.schedule} --pp {parallel.pp} --microbatches {m}"
        flags += f" --virtual-stages {parallel.virtual_stages}"
        yield ConfigError(
            "parallel.schedule",
            str(error).splitlines()[0],
            f"tools/show_schedule.py {flags} shows where",
        )


def _bounds(cfg: Config) -> Iterator[ConfigError]:
    values: dict[str, Any] = values_of(cfg)
    for name, least in _AT_LEAST.items():
        if values[name] < least:
            yield ConfigError(name, f"{values[name]} is less than {least}", f"Use {least} or more")
    for name in _POSITIVE:
        if values[name] <= 0:
            yield ConfigError(name, f"{values[name]} is not above 0", "Use a number above 0")
    for name, (low, high) in _BETWEEN.items():
        if not low <= values[name] <= high:
            limits = f"[{low:.10g}, {high:.10g}]"  # exact: who takes one from here must be right
            yield ConfigError(name, f"{values[name]} is not in {limits}", "Use a number in between")
    optim = cfg.optim
    if optim.min_lr > optim.lr:
        yield ConfigError(
            "optim.min_lr",
            f"{optim.min_lr} is more than optim.lr={optim.lr}",
            f"Use {optim.lr} or less, or a higher optim.lr",
        )
    if not all(0 <= beta < 1 for beta in optim.betas):
        betas = " ".join(map(str, optim.betas))
        yield ConfigError("optim.betas", f"{betas} are not in [0, 1)", "Use such as 0.9 0.95")
    if cfg.train.seed >= 2**63:
        yield ConfigError("train.seed", f"{cfg.train.seed} has over 63 bits", "Use less than 2**63")


def _model(model: GPTConfig) -> Iterator[ConfigError]:
    if not 0 <= model.dropout < 1:
        yield ConfigError("model.dropout", f"{model.dropout} is not in [0, 1)", "Use such as 0.1")
    heads = model.num_heads
    if model.position == "rope" and heads > 0 and model.head_dim % 2:
        yield ConfigError(
            "model.hidden_size",
            f"model.position=rope turns pairs of features, but {model.hidden_size} / "
            f"{heads} heads is the odd number {model.head_dim}",
            f"Use a multiple of {2 * heads}, or model.position=learned",
        )


def _data(cfg: Config) -> Iterator[ConfigError]:
    if not cfg.data.path:
        yield ConfigError(
            "data.path", "no shards are named", "Name directories that tools/prepare_data.py made"
        )
    try:
        sources(cfg.data)
    except ConfigError as error:
        yield error


def _files(cfg: Config) -> Iterator[ConfigError]:
    if not cfg.run.dir:
        yield ConfigError("run.dir", "is empty", "Name a directory, such as runs/first")
    resume = cfg.checkpoint.resume
    # A run that has begun goes on from its own, so that the one that it began from may be gone.
    begun = os.path.isdir(Path(cfg.run.dir, "checkpoints"))
    if resume not in ("auto", "none") and not begun and not Path(resume).is_dir():
        yield ConfigError(
            "checkpoint.resume",
            f"there is no directory {resume!r}",
            "Use auto, none, or the directory of a checkpoint",
        )


def check_same_run(cfg: Config, saved_yaml: str | Path) -> list[tuple[str, Value, Value]]:
    """Whether a run dir whose resolved configuration is ``saved_yaml`` may be taken up by ``cfg``.

    Args:
        cfg: resolved (vocabulary included).
    Returns:
        The differences that are allowed, as (field, saved value, new value), for the log.
    Raises:
        ConfigError: that lists every other difference.
    """
    saved = load(Config, saved_yaml, [])
    found = [d for d in differences(saved, cfg) if d[0] != "model.preset"]
    free = [d for d in found if d[0].split(".")[0] in ("parallel", "checkpoint", "run")]
    fixed = [d for d in found if d not in free]
    if fixed:
        listed = ", ".join(f"{name} was {old} and is {new}" for name, old, new in fixed)
        raise ConfigError(
            fixed[0][0],
            f"{Path(saved_yaml).parent} holds another run: {listed}",
            "Use the saved values, or another --run.dir (--checkpoint.resume DIR starts there "
            "from a checkpoint)",
        )
    return free


def report_config_error(error: ConfigError, patience_s: float = 20.0) -> NoReturn:
    """Say once a node what is wrong, and exit with 2.

    Under torchrun local rank 0 hands the message to the agent, whose closing summary ends with
    it. The others wait to be ended, so that they neither repeat it nor count as failures of
    their own; if nobody does within ``patience_s``, they are the only ones to know it and report
    it too.
    """
    agent_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    told = False
    if agent_file:
        waiting = Path(agent_file).with_name("waiting")
        if os.environ.get("LOCAL_RANK", "0") != "0":
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
            _write(waiting, "")
            time.sleep(patience_s)
        told = _write(Path(agent_file), _agent_message(str(error)))
        others = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1
        deadline = time.monotonic() + patience_s / 4
        while told and len(_siblings(waiting)) < others and time.monotonic() < deadline:
            time.sleep(0.02)
    if not told:
        print(error, file=sys.stderr, flush=True)
    sys.exit(2)


def _agent_message(text: str) -> str:
    """What torch's elastic agent reads of a worker that failed."""
    extra = {"timestamp": str(int(time.time()))}
    return json.dumps({"message": {"message": text, "extraInfo": extra}})


def _siblings(path: Path) -> list[Path]:
    """The same file in the agent's folder of each local rank."""
    return list(path.parent.parent.glob(f"*/{path.name}"))


def _write(path: Path, text: str) -> bool:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError:
        return False
    return True
