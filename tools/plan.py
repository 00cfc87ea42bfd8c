"""Says which layout to use, how fast it is and what memory it takes, before a GPU is rented."""

from __future__ import annotations

import pathlib
import sys

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megalite.errors import ConfigError, ScheduleError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    args = _Parser(prog="plan.py", description=__doc__)
    commands = args.add_subparsers(dest="command", required=True)
    _predict(commands.add_parser("predict", help="add predictions to a CSV of runs"))
    return args


def _predict(args: argparse.ArgumentParser) -> None:
    args.add_argument("--csv", required=True, type=Path, help="rows as in docs/planner.md")
    args.add_argument("--out", required=True, type=Path)


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(sys.argv[1:] if argv is None else argv)
    try:
        print(run(args), flush=True)
    except (ConfigError, ScheduleError) as error:
        print(f"plan.py: {error}", file=sys.stderr)
        return 2
    return 0


def run(args: argparse.Namespace) -> str:
    """What a command prints."""
    match args.command:
        case "predict":
            from tools.planning.table import predict_file

            rows = predict_file(args.csv, args.out)
            return f"{rows} rows predicted: {args.out}"
        case _:
            raise AssertionError(args.command)


if __name__ == "__main__":
    sys.exit(main())
