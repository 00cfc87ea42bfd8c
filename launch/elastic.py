"""Trains under torch's elastic agent: ``python launch/elastic.py [torchrun's flags] SCRIPT ...``.

Restarts take a fraction of a second, a job goes on with fewer nodes, and USR1 and TERM save before
it ends: docs/recovery.md. Exit codes: 0 done, 2 bad input, 75 stopped on request, 1 all else.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Each worker runs this file again, so it holds nothing but the start.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

if __name__ == "__main__":
    from launch.launcher import main

    main(sys.argv[1:])
