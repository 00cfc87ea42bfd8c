"""The trainer, whose rank 2 raises in step 3."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

from launch import pretrain_gpt  # noqa: E402

step_of = pretrain_gpt.train_step


def failing(training: Any, loader: Any, recorder: Any, step: int) -> None:
    if step == 3 and os.environ["RANK"] == "2":
        raise ZeroDivisionError("planted in rank 2")
    step_of(training, loader, recorder, step)


pretrain_gpt.train_step = failing
pretrain_gpt.main(sys.argv[1:])
