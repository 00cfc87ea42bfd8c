"""What each command of ``tools/plan.py`` prints."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from launch.config import load_config, violations
from megalite.errors import ConfigError
from megalite.planner.candidates import Request
from megalite.planner.estimate import Estimator
from megalite.planner.search import Ranking, rank
from tools.planning.explain import explanation, timeline
from tools.planning.files import CONFIG, command_of, data_flag, write
from tools.planning.models import find_model, shape_of
from tools.planning.page import render
from tools.planning.request import BYTES, estimator_of, machine_of, request_of
from tools.planning.words import GB, explanation_text, layout_json, ranking_json, ranking_text


def rank_command(args: argparse.Namespace) -> str:
    request = request_of(args, args.top)
    found = rank(request)
    best = Estimator(found.best[0].job, request.machine)
    lines = []
    if args.write:
        model = find_model(args.model)
        lines = [f"written: {p}" for p in write(found.best[0], model, args.dtype, args.write)]
        lines[0] += f" ({data_flag(found.best[0])})"
    if args.page:
        config = (args.write or Path("plan")) / CONFIG
        page = render(found, timeline(best), command_of(found.best[0], config))
        args.page.write_text(page, encoding="utf-8")
        lines.append(f"written: {args.page}")
    if args.json:
        return json.dumps(ranking_json(found))
    return "\n".join([ranking_text(found), *lines])


def explain_command(args: argparse.Namespace) -> str:
    request = request_of(args, 1)
    found: Ranking = rank(request)
    e = Estimator(found.best[0].job, request.machine)
    told = explanation(e)
    return json.dumps(told) if args.json else explanation_text(told)


def check_command(args: argparse.Namespace, flags: list[str]) -> str:
    """A training configuration: whether it is legal and fits, and what a better one would bring.

    Raises:
        ConfigError: if it is not legal, or does not fit.
    """
    cfg = load_config(["--config", args.config, *flags])
    for error in violations(cfg, args.world_size):
        raise error
    args.dtype = cfg.train.dtype if cfg.train.dtype in BYTES else "fp32"
    shape = shape_of(cfg.model)
    machine = machine_of(args)
    request = Request(shape, machine, args.world_size, cfg.train.global_batch_size, best=1)
    parallel = replace(cfg.parallel, schedule=_searched(cfg.parallel.schedule))
    e = estimator_of(request, parallel, cfg.train.micro_batch_size)
    found = e.estimate()
    if found.peak_bytes > request.memory:
        least = rank(request).best[0]
        raise ConfigError(
            "parallel",
            f"rank {found.worst_rank} of the pipeline needs {found.peak_bytes / GB:.1f} GB of "
            f"{request.memory / GB:.0f}",
            f"What fits: {json.dumps(layout_json(least))}",
        )
    best = rank(request).best[0]
    gain = 1 - best.step_s / found.step_s
    text = explanation_text(explanation(e))
    better = layout_json(best)
    kept = ("tp", "pp", "virtual_stages", "schedule", "micro_batch_size", "recompute")
    words = " ".join(f"{name}={better[name]}" for name in kept)
    note = f"{gain:.1%} faster: {words}" if gain > 0.005 else "no layout is faster"
    free = request.memory - found.peak_bytes
    if found.peak_bytes > request.cap:
        note += f"\nwarning: only {free / GB:.1f} GB ({free / request.memory:.1%}) stay free"
    return f"{text}\n\n{note}"


def _searched(schedule: str) -> str:
    """What is simulated in place of a schedule that is made for costs, or read from a file."""
    return "1f1b" if schedule == "auto" or schedule.startswith("file:") else schedule
