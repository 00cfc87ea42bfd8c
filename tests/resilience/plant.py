"""A fault that makes one layer's output, or the gradient there, infinite in one microbatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from launch.build import Training


def plant(
    training: Training, *, layer: str, microbatch: int, way: str, times: int = 1
) -> RemovableHandle:
    """On this rank, if it has the layer, or the part of one (``layers.2.mlp``); ``times`` passes of
    that microbatch are hit."""
    left = [times]
    for index, gpt in training.gpt.items():
        stage = training.executor.stages[index]
        for block in gpt.blocks:
            name = getattr(block, "name", "")
            if name != layer and not layer.startswith(f"{name}."):
                continue
            module = block.get_submodule(layer.removeprefix(name).removeprefix("."))

            def hit(x: Tensor) -> Tensor:
                bad = torch.zeros_like(x)
                bad[-1, -1, 0] = torch.inf
                return x + bad

            def after(_: Any, __: Any, out: Tensor, stage: Any = stage) -> Tensor | None:
                if not torch.is_grad_enabled() or stage.microbatch != microbatch or not left[0]:
                    return None
                left[0] -= 1
                if way == "F":
                    return hit(out)
                out.register_hook(hit)
                return None

            # Before the watch's own hook: what a layer gives is what is watched.
            return module.register_forward_hook(after, prepend=True)
    raise AssertionError(f"{layer} is not on this rank")
