"""Prints a pipeline schedule, checked and simulated."""

from __future__ import annotations

import pathlib
import sys

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import argparse
import json
from collections.abc import Sequence
from typing import Any, NoReturn

from megalite.errors import ConfigError
from megalite.schedule.action import Plan
from megalite.schedule.generators import build_schedule
from megalite.schedule.lower import lower
from megalite.schedule.render import render_text, to_csv
from megalite.schedule.simulate import simulate
from megalite.schedule.validate import validate


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    args = _Parser(prog="show_schedule.py", description=__doc__)
    args.add_argument("--schedule", required=True, help="name, e.g. 1f1b")
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
    args.add_argument("--format", choices=("text", "json", "csv"), default="text")
    args.add_argument("--messages", action="store_true", help="show the messages as well")
    return args


def costs(text: str) -> tuple[float, float, float, float]:
    values = [float(part) for part in text.split(",")]
    if len(values) not in (3, 4) or not all(0 <= v < float("inf") for v in values):
        raise ValueError(text)
    forward, input_grad, weight, *comm = values
    return forward, input_grad, weight, comm[0] if comm else 0.0


def describe(plan: Plan, shown: Plan, times: tuple[float, float, float, float]) -> dict[str, Any]:
    """The figures of a lowered plan; ``shown`` is the plan whose actions are listed."""
    report = validate(plan)
    share = [1 / len(plan.stages_of(rank)) for rank in plan.rank_of]
    forward, input_grad, weight = ([t * part for part in share] for t in times[:3])
    timeline = simulate(plan, forward, input_grad, weight, times[3])
    return {
        "schedule": plan.name,
        "pp": plan.pp,
        "num_stages": plan.num_stages,
        "num_microbatches": plan.num_microbatches,
        "actions": [[str(a) for a in actions] for actions in shown.actions],
        "makespan": timeline.makespan,
        "ideal": plan.num_microbatches * sum(times[:3]),
        "bubble_fraction": timeline.bubble_fraction,
        "span_bubble_fraction": timeline.span_bubble_fraction,
        "peak_in_flight": list(report.peak_in_flight),
        "peak_open_w": list(report.peak_open_w),
    }


def summary(facts: dict[str, Any]) -> str:
    def numbers(values: Sequence[float]) -> str:
        return ", ".join(f"{v:g}" for v in values)

    return (
        f"# {facts['schedule']}: {facts['pp']} ranks, {facts['num_stages']} stages, "
        f"{facts['num_microbatches']} microbatches\n"
        f"# makespan {facts['makespan']:g} (ideal {facts['ideal']:g}), "
        f"bubble {facts['bubble_fraction']:.2%}, span bubble {facts['span_bubble_fraction']:.2%}\n"
        f"# microbatches in flight at most, by rank: {numbers(facts['peak_in_flight'])}\n"
        f"# weight gradients put off at most, by rank: {numbers(facts['peak_open_w'])}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        plan = build_schedule(args.schedule, args.pp, args.microbatches, args.virtual_stages)
    except ConfigError as error:
        print(f"show_schedule.py: {error}", file=sys.stderr)
        return 2
    lowered = lower(plan)
    shown = lowered if args.messages else plan
    facts = describe(lowered, shown, args.costs)
    match args.format:
        case "json":
            print(json.dumps(facts))
        case "csv":
            print(to_csv(shown), end="")
        case _:
            print(f"{summary(facts)}\n{render_text(shown)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
