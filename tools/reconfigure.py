"""Asks a running job for another layout, and prints what it says.

The job does it between two steps if it can, without a restart: docs/reconfigure.md. Exits with 0
once the job has the new layout, 1 if it says no or nothing in time, 2 if the request is not made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from launch.config import CONFIG, layout_problems, load_config
from launch.layouts import changed, from_plain
from launch.request import Request, ask, wait_for_answer
from megalite.errors import ConfigError
from megalite.metrics import is_locked, read_lines
from megalite.parallel_config import ParallelConfig, num_stages

_SECTION = "--parallel."


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the job's --run.dir")
    parser.add_argument(
        "--wait-s",
        "--wait_s",
        type=float,
        default=600.0,
        metavar="S",
        help="wait so long for the job's answer; 0: not at all",
    )
    parser.epilog = "The layout: --parallel.FIELD VALUE ..., fields that are not named stay."
    args, flags = parser.parse_known_args(argv)
    try:
        request = make_request(args.run_dir, flags)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if args.wait_s <= 0:
        print("asked; events.jsonl will say what came of it")
        return 0
    answer = wait_for_answer(args.run_dir, request, args.wait_s)
    print(answer.text if answer else f"the job has said nothing in {args.wait_s:g} s")
    return 0 if answer and answer.done else 1


def make_request(run_dir: Path, flags: Sequence[str]) -> Request:
    """Check what is asked of the job that runs in a directory, and ask.

    Raises:
        ConfigError: if no job runs there, or it could not have that layout.
    """
    values = values_of(flags)
    if not is_locked(run_dir):
        fix = "Name the --run.dir of a job that runs, on this host or over a shared directory"
        raise ConfigError("RUN_DIR", f"no job runs in {run_dir}", fix)
    told = [event for event in read_lines(run_dir / "events.jsonl") if "parallel" in event]
    if not told:
        raise ConfigError("RUN_DIR", f"the job in {run_dir} has not begun", "Ask in a moment")
    now = from_plain(told[-1]["parallel"])
    cfg = load_config(["--config", str(run_dir / CONFIG)])
    wanted = replace(cfg, parallel=without_counts(changed(now, values), values))
    for error in layout_problems(wanted, int(told[-1]["world_size"])):
        raise error
    return ask(run_dir, values)


def values_of(flags: Sequence[str]) -> dict[str, str]:
    """Field -> text of ``--parallel.field value`` or ``--parallel.field=value``.

    Raises:
        ConfigError: for anything else.
    """
    found: dict[str, list[str]] = {}
    name = ""
    for word in flags:
        if word.startswith(_SECTION):
            name, equals, value = word.removeprefix(_SECTION).partition("=")
            name = name.replace("-", "_")
            found[name] = [value] if equals else []
        elif word.startswith("--") or not name:
            raise ConfigError(word, "is no part of a layout", "Write --parallel.FIELD VALUE ...")
        else:
            found[name].append(word)
    if not found:
        raise ConfigError("parallel", "nothing is to change", "Write --parallel.FIELD VALUE ...")
    for name, words in found.items():
        if not words:
            raise ConfigError(f"parallel.{name}", "has no value", "Write one behind it")
    return {name: ",".join(words) for name, words in found.items()}


def without_counts(parallel: ParallelConfig, given: dict[str, str]) -> ParallelConfig:
    """Counts of layers that were measured for the layout that runs are not asked for again."""
    counts = parallel.partition
    if "partition" in given or isinstance(counts, str) or len(counts) == num_stages(parallel):
        return parallel
    return replace(parallel, partition="uniform")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
