"""A run's page from its directory: everything that the run has written, in one HTML file."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from launch.build import make_plan
from launch.config import Config, load_config
from launch.layouts import from_plain
from launch.partition import layers_of
from launch.run_dir import SCHEDULE
from megalite.errors import ConfigError, ScheduleError
from megalite.parallel_config import mesh_shape
from megalite.report.history import History, read_history
from megalite.report.measured import FILES, Traced, read_traces
from megalite.report.page import Layout, Run, render
from megalite.report.series import compact
from megalite.schedule.generators import FILE

_QUICK = 64_000_000  # bytes of traces that are read in seconds


def write_page(run_dir: Path, out: Path, *, quick: bool = False) -> Path:
    """Write the page of a run; returns ``out``.

    Args:
        quick: leave traces out that take long to read.
    Raises:
        ConfigError: if a file is missing or is not what a run writes.
    """
    write(out, render(read_run(run_dir, quick=quick)))
    return out


def read_run(run_dir: Path, *, quick: bool = False) -> Run:
    """All that the page shows.

    Raises:
        ConfigError: if a file is missing or is not what a run writes.
    """
    history = read_history(run_dir)
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise ConfigError(
            "RUN_DIR", f"there is no file {path}", "Name the directory of a run, its --run.dir"
        )
    cfg = load_config(["--config", str(path)])
    traced, untraced = traces(run_dir / "trace", cfg.run.trace, quick)
    return Run(
        name=cfg.run.name or run_dir.resolve().name,
        about=about(cfg),
        num_steps=cfg.train.steps,
        run_dir=cfg.run.dir,
        config=path.read_text(encoding="utf-8"),
        history=history,
        layout=layout(now(cfg, history), history.layout, run_dir),
        traced=traced,
        untraced=untraced,
    )


def traces(folder: Path, wanted: bool, quick: bool) -> tuple[Traced | None, str]:
    """The traced step to show, or why there is none though there should be one."""
    if quick and sum(path.stat().st_size for path in folder.glob(FILES)) > _QUICK:
        return None, "its traces take long to read: python tools/report.py RUN_DIR shows them"
    found = read_traces(folder)
    return found, "no trace of a step has been written" if wanted and not found else ""


def about(cfg: Config) -> str:
    """What trains, in a line."""
    model, train = cfg.model, cfg.train
    size = f"{compact(model.num_parameters())} parameters in {model.num_layers} layers"
    batch = f"{train.global_batch_size:,} sequences of {model.seq_length:,} tokens a step"
    return f"{size}, {train.dtype}, {batch}"


def now(cfg: Config, history: History) -> Config:
    """``cfg`` with the layout that the run had last, if it says."""
    told = [event["parallel"] for event in history.events if "parallel" in event]
    return replace(cfg, parallel=from_plain(told[-1])) if told else cfg


def layout(cfg: Config, text: str, run_dir: Path) -> Layout | None:
    """The layout that a run has written down as ``text``: its dp is not in the configuration."""
    found = re.search(r"\bdp (\d+)", text)
    if not found:
        return None
    dp, parallel = int(found[1]), cfg.parallel
    if parallel.schedule == "auto" or parallel.schedule.startswith(FILE):
        written = f"{FILE}{run_dir / SCHEDULE}"
        cfg = replace(cfg, parallel=replace(parallel, schedule=written))
    try:
        plan = make_plan(cfg, dp)
    except ScheduleError as error:
        raise ConfigError(
            "RUN_DIR", str(error).splitlines()[0], f"Restore {SCHEDULE} there"
        ) from error
    shape = mesh_shape(parallel, dp * parallel.tp * parallel.pp)
    return Layout(shape, replace(plan, name=parallel.schedule), layers_of(cfg, plan))


def write(path: Path, text: str) -> None:
    """Write the page, or raise ConfigError."""
    try:
        path.write_text(text, encoding="utf-8", errors="replace", newline="\n")
    except OSError as error:
        raise ConfigError("--out", f"{path}: {error.strerror}", "Name a file") from error
