"""The trainer, whose rank 1 stops in step 4 until that is reported: a script for any launcher."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from launch import pretrain_gpt  # noqa: E402
from tests.launch.stalling import Planted, plant  # noqa: E402

run_dir = sys.argv[sys.argv.index("--run.dir") + 1]
plant((Planted(1, 4, "backward", 2),), run_dir)
pretrain_gpt.main(sys.argv[1:])
