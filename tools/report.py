"""Write the page of a run: curves, pipeline (planned and measured), layout, events, configuration.

One HTML file that fetches nothing; exits 0, or 2 if RUN_DIR is not that of a run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from launch.page import write_page
from megalite.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="what --run.dir was")
    parser.add_argument("--out", metavar="FILE", type=Path, help="instead of RUN_DIR/report.html")
    args = parser.parse_args(argv)
    out = args.out or args.run_dir / "report.html"
    try:
        write_page(args.run_dir, out)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"report of this run: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
