"""Commands that answer before torch could be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BODY = (
    "import runpy, sys\nsys.argv = sys.argv[1:]\n"
    "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
    "finally:\n    assert 'torch' not in sys.modules, 'torch was imported'\n    print('no torch')\n"
)


def run_without_torch(tool: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of ``tools/`` from another directory; fails if it imports torch."""
    done = subprocess.run(
        [sys.executable, "-c", _BODY, str(ROOT / "tools" / tool), *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
    )
    assert done.stdout.endswith("no torch\n"), done.stderr
    return done
