"""Says which layout to use, how fast it is and what memory it takes, before a GPU is rented."""

from __future__ import annotations

import pathlib
import sys

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megalite.errors import ConfigError, ScheduleError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    from tools.planning.request import add_arguments

    args = _Parser(prog="plan.py", description=__doc__, allow_abbrev=False)
    commands = args.add_subparsers(dest="command", required=True)
    ranked = commands.add_parser("rank", help="the fastest layouts that fit, and why not others")
    add_arguments(ranked)
    ranked.add_argument("--top", type=int, default=5, help="layouts ranked for certain")
    ranked.add_argument("--json", action="store_true")
    ranked.add_argument("--page", type=Path, metavar="HTML", help="write a page")
    ranked.add_argument("--write", type=Path, metavar="DIR", help="write config and sbatch command")
    told = commands.add_parser("explain", help="where time and memory of a layout go")
    add_arguments(told)
    told.add_argument("--json", action="store_true")
    checked = commands.add_parser("check", help="a training configuration: does it fit, how fast")
    checked.add_argument("--config", required=True)
    checked.add_argument("--world-size", required=True, type=int)
    checked.add_argument("--gpu", required=True)
    checked.add_argument("--framework", default="megalite")
    checked.add_argument("--cluster", default="")
    _predict(commands.add_parser("predict", help="add predictions to a CSV of runs"))
    measured = commands.add_parser("measure", help="time this machine and write a hardware file")
    measured.add_argument("--out", required=True, type=Path, metavar="YAML")
    _fit(commands.add_parser("fit", help="fit the constants to a folder of measured runs"))
    return args


def _predict(args: argparse.ArgumentParser) -> None:
    args.add_argument("--csv", required=True, type=Path, help="rows as in docs/planner.md")
    args.add_argument("--out", required=True, type=Path)


def _fit(args: argparse.ArgumentParser) -> None:
    args.add_argument("--data", required=True, type=Path, help="a folder of CSV tables")
    args.add_argument("--rounds", type=int, default=0, help="of fitting; 0: report errors only")
    args.add_argument("--left-out", action="store_true", help="also fit without each fifth")


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    args, flags = parser().parse_known_args(words)
    if flags and args.command != "check":
        parser().error(f"unknown: {' '.join(flags)}")
    try:
        print(run(args, flags), flush=True)
    except (ConfigError, ScheduleError) as error:
        print(f"plan.py: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"plan.py: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def run(args: argparse.Namespace, flags: list[str]) -> str:
    """What a command prints; torch is imported by ``measure`` alone."""
    match args.command:
        case "predict":
            from tools.planning.table import predict_file

            rows = predict_file(args.csv, args.out)
            return f"{rows} rows predicted: {args.out}"
        case "measure":
            from tools.planning.measure import measure

            if not args.out.absolute().parent.is_dir():
                fix = "Make it, or name another"
                raise ConfigError("--out", f"there is no folder {args.out.parent}", fix)
            return measure(args.out)
        case "fit":
            from tools.planning import fitting

            tables = fitting.read_tables(args.data)
            if args.rounds:
                fitting.save(fitting.fit_tables(tables, args.rounds))
            unseen = fitting.left_out(tables, 2) if args.left_out else None
            return fitting.report(tables, unseen)
        case "rank":
            from tools.planning.commands import rank_command

            return rank_command(args)
        case "explain":
            from tools.planning.commands import explain_command

            return explain_command(args)
        case "check":
            from tools.planning.commands import check_command

            return check_command(args, flags)
        case _:
            raise AssertionError(args.command)


if __name__ == "__main__":
    sys.exit(main())
