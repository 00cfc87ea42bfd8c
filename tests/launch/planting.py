"""The trainer, in which a layer's output or gradient becomes infinite on one rank.

PLANT holds JSON: rank, step, microbatch, layer, way ("F" or "B"), times.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])


from launch import pretrain_gpt  # noqa: E402
from tests.resilience.plant import plant  # noqa: E402

step_of = pretrain_gpt.train_step
wanted = json.loads(os.environ["PLANT"])
planted: list[Any] = []


def planting(training: Any, loader: Any, recorder: Any, step: int) -> None:
    if step == wanted["step"] and training.mesh.rank == wanted["rank"]:
        kind = {k: wanted[k] for k in ("layer", "microbatch", "way", "times")}
        planted.append(plant(training, **kind))
    step_of(training, loader, recorder, step)
    while planted:
        planted.pop().remove()


pretrain_gpt.train_step = planting
pretrain_gpt.main(sys.argv[1:])
