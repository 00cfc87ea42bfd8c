"""Prints a pipeline schedule, checked and simulated."""

from __future__ import annotations

import pathlib
import sys

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import argparse
import json
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from megalite.errors import ConfigError, ScheduleError
from megalite.schedule.action import Plan
from megalite.schedule.costs import LEAST, MOST, Costs, MemoryLimit
from megalite.schedule.generators import build_schedule, check_request
from megalite.schedule.lost_time import LostTime, lost_time
from megalite.schedule.lower import lower
from megalite.schedule.render import render_text, to_csv
from megalite.schedule.simulate import Timeline, simulate_step
from megalite.schedule.svg import render_svg
from megalite.schedule.validate import validate


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    args = _Parser(prog="show_schedule.py", description=__doc__)
    args.add_argument("--schedule", required=True, help="name, e.g. 1f1b, or file:PATH")
    args.add_argument("--pp", type=int, required=True, help="pipeline ranks")
    args.add_argument("--microbatches", type=int, required=True)
    args.add_argument("--virtual-stages", type=int, default=1, help="stages a rank")
    args.add_argument(
        "--costs",
        type=costs,
        default=(1.0, 1.0, 1.0, 0.0),
        metavar="F,I,W[,COMM]",
        help="time of a rank's whole share of a microbatch, and of one message (default 1,1,1,0)",
    )
    args.add_argument(
        "--memory",
        type=memory,
        metavar="UNITS[,OPEN_W]",
        help="for auto: the most microbatches in flight on a rank, and what a microbatch between "
        "I and W counts of one (default: no limit, 1)",
    )
    args.add_argument("--format", choices=("text", "json", "csv", "svg"), default="text")
    args.add_argument("--messages", action="store_true", help="show the messages as well")
    return args


def costs(text: str) -> tuple[float, float, float, float]:
    try:
        forward, input_grad, weight, *comm = (float(part) for part in text.split(","))
        (message,) = comm or [0.0]
        Costs.equal(1, 1, forward, input_grad, weight, message)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not F,I,W or F,I,W,COMM: three or four times, each 0 or within "
            f"{LEAST:g} to {MOST:g}, such as 1,1,1,0.1"
        ) from error
    return forward, input_grad, weight, message


def memory(text: str) -> MemoryLimit:
    try:
        units, *open_w = (float(part) for part in text.split(","))
        return MemoryLimit(units, *(open_w and _only(open_w)))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not UNITS or UNITS,OPEN_W: at least 1 microbatch, and a share of 0 to 1, "
            "such as 4 or 4,0.5"
        ) from error


def _only(values: list[float]) -> tuple[float]:
    (value,) = values
    return (value,)


def joined(argv: Sequence[str]) -> list[str]:
    """``--flag=-1,2`` for ``--flag -1,2``, which argparse takes for two flags."""
    words: list[str] = []
    for word in argv:
        if words and words[-1].startswith("--") and re.match(r"-[0-9.]", word):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def describe(plan: Plan, shown: Plan, times: Costs, timeline: Timeline) -> dict[str, Any]:
    """The figures of a lowered plan; ``shown`` is the plan whose actions are listed."""
    report, share = validate(plan), plan.num_microbatches / plan.pp
    return {
        "schedule": plan.name,
        "pp": plan.pp,
        "num_stages": plan.num_stages,
        "num_microbatches": plan.num_microbatches,
        "actions": [[str(a) for a in actions] for actions in shown.actions],
        "makespan": timeline.makespan,
        "ideal": share * sum(map(sum, (times.forward, times.input_grad, times.weight_grad))),
        "bubble_fraction": timeline.bubble_fraction,
        "span_bubble_fraction": timeline.span_bubble_fraction,
        "peak_in_flight": list(report.peak_in_flight),
        "peak_open_w": list(report.peak_open_w),
    }


def headings(facts: dict[str, Any], lost: Sequence[LostTime], used: str) -> tuple[str, ...]:
    def numbers(values: Iterable[float]) -> str:
        return ", ".join(f"{v:.6g}" for v in values)

    causes = {
        name.replace("_", " "): [getattr(rank, name) for rank in lost]
        for name in ("warm_up_and_drain", "imbalance", "communication", "data_parallel")
    }
    least = 1e-9 * facts["makespan"]  # what additions leave is no time
    idle = [f"{name} {numbers(t)}" for name, t in causes.items() if max(t) > least]

    return (
        f"{facts['schedule']}: {facts['pp']} ranks, {facts['num_stages']} stages, {used}",
        f"makespan {facts['makespan']:g} (ideal {facts['ideal']:g}), "
        f"bubble {facts['bubble_fraction']:.2%}, span bubble {facts['span_bubble_fraction']:.2%}",
        f"microbatches in flight at most, by rank: {numbers(facts['peak_in_flight'])}",
        f"weight gradients put off at most, by rank: {numbers(facts['peak_open_w'])}",
        f"idle, by rank: {'; '.join(idle) or 'never'}",
    )


def show(args: argparse.Namespace) -> str:
    check_request(args.schedule, args.pp, args.microbatches, args.virtual_stages)
    if args.memory is not None and args.schedule != "auto":
        raise ConfigError("--memory", f"{args.schedule} keeps to no limit", "Use --schedule auto")
    times = Costs.equal(args.pp, args.virtual_stages, *args.costs)
    plan = build_schedule(
        args.schedule, args.pp, args.microbatches, args.virtual_stages, times, args.memory
    )
    lowered = lower(plan)
    shown = lowered if args.messages else plan.compute_only()
    timeline = simulate_step(lowered, times)
    facts = describe(lowered, shown, times, timeline)
    title, figures, *others = headings(facts, lost_time(lowered, times), plan.microbatches)
    match args.format:
        case "json":
            return json.dumps(facts)
        case "csv":
            return to_csv(shown).rstrip("\n")
        case "svg":
            return render_svg(timeline, title, f"{figures}; {others[0]}").rstrip("\n")
        case _:
            comments = "\n".join(f"# {line}" for line in (title, figures, *others))
            return f"{comments}\n{render_text(shown)}"


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(joined(sys.argv[1:] if argv is None else argv))
    try:
        text = show(args)
    except (ConfigError, ScheduleError) as error:
        print(f"show_schedule.py: {error}", file=sys.stderr)
        return 2
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
