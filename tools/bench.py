"""Side-by-side benchmarks, in one run: `tools/bench.py NAME [--json]`, or `all`.

Exits 0 if every goal is met, 1 if not, 2 for an unknown name.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from megalite.errors import ConfigError
from tools.benches import find_benches
from tools.benches.rows import Row, to_json, to_text


def main(argv: Sequence[str] | None = None) -> int:
    args = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    args.add_argument("name", metavar="NAME", help="a bench, or all")
    args.add_argument("--json", action="store_true", help="one JSON object in place of a table")
    given = args.parse_args(argv)
    try:
        benches = find_benches(given.name)
    except ConfigError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    rows: list[Row] = [row for run in benches for row in run()]
    found = to_json(rows)
    found["ok"] = found["ok"] and bool(rows)  # of nothing measured no goal is met
    if given.json:
        print(json.dumps(found))
    else:
        print(to_text(rows))
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
