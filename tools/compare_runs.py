"""Find the first place at which two recorded runs part, in whatever layouts they were trained.

Both need --run.record True; exits 0 if they agree, 1 if they part or drift apart, 2 for
bad input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from launch.compare import compare_runs
from megalite.errors import ConfigError


def _tolerance(text: str) -> float:
    if not 0 <= (value := float(text)) < 1:
        raise ValueError(text)
    return value


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("run_a", metavar="RUN_A", type=Path, help="what --run.dir was")
    parser.add_argument("run_b", metavar="RUN_B", type=Path)
    parser.add_argument(
        "--tolerance",
        type=_tolerance,
        metavar="X",
        help="relative; by default half of the digits of the coarser dtype",
    )
    parser.add_argument(
        "--exact", action="store_true", help="every bit counts (for two runs of one layout)"
    )
    parser.add_argument("--json", action="store_true", help="for a program")
    args = parser.parse_args(argv)
    try:
        runs = compare_runs(args.run_a, args.run_b, args.tolerance, exact=args.exact)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(runs.json() if args.json else runs.text())
    return 0 if runs.found.agrees else 1


if __name__ == "__main__":
    sys.exit(main())
