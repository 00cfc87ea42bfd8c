"""AdamW on flat buckets, with master weights where the model is in less than fp32."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.data_parallel.bucket import FlatParameters
from megalite.errors import ConfigError
from megalite.optim.config import OptimConfig
from megalite.slices import Piece

Buffers = dict[str, list[Tensor]]
"""Flat tensors, one a bucket, by what goes before the names of the parameters in them."""
MASTER, MOMENTS = "optim.master.", ("exp_avg", "exp_avg_sq")


def apex_state() -> str:
    """Which ``apex`` is installed: ``complete``, or why NVIDIA's fused kernels are not there.

    PyPI's ``apex`` is another project, whose import fails with the very error that a missing
    module gives; so look at the files, and import nothing.
    """
    found = importlib.util.find_spec("apex")
    if found is None:
        return "absent"
    folders = found.submodule_search_locations or []
    if not any(Path(folder, "multi_tensor_apply").is_dir() for folder in folders):
        return "another package of that name, not NVIDIA's (PyPI's apex is a web toolkit)"
    if importlib.util.find_spec("amp_C") is None:
        return "NVIDIA's, built without its CUDA extensions (APEX_CPP_EXT=1 APEX_CUDA_EXT=1)"
    return "complete"


def choose_backend(
    wanted: str,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    skips: bool = False,
) -> str:
    """``torch`` or ``apex`` for ``optim.backend``, with weights updated in ``dtype``.

    ``skips``: a step that is not finite must leave the weights as they are, which apex cannot.

    Raises:
        ConfigError: apex is asked for and cannot serve.
    """
    state = apex_state() if wanted != "torch" else "absent"
    usable = state == "complete" and device.type == "cuda" and dtype != torch.float64 and not skips
    if wanted == "apex" and not usable:
        why = f"apex is {state}"
        if state == "complete":
            why = f"apex needs CUDA and fp32, not {device.type} and {dtype}"
            if skips:
                why = "apex cannot leave a step out, as fp16 and train.bad_step=skip or replay do"
        raise ConfigError(
            "optim.backend",
            f"apex was asked for, but {why}",
            "Use optim.backend=torch, or build NVIDIA's apex from source",
        )
    return "apex" if usable and wanted in ("apex", "auto") else "torch"


def learning_rate(cfg: OptimConfig, step: int, num_steps: int) -> float:
    """The rate of step ``step``, 1 .. num_steps: linear warm-up that reaches ``lr`` at step
    ``warmup_steps``, then the schedule, which ends at ``min_lr`` with the last step."""
    if step <= cfg.warmup_steps:
        return cfg.lr * (step / cfg.warmup_steps)
    if cfg.lr_schedule == "constant":
        return cfg.lr
    done = (step - cfg.warmup_steps) / max(1, num_steps - cfg.warmup_steps)
    left = 1.0 - done if cfg.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * left


class AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) over this rank's buckets.

    State is one flat tensor a bucket and moment, of what this replica updates of the bucket: all,
    or with ZeRO-1 its share. Where weights are bf16 or fp16, ``master`` is the fp32 copy of that
    part, which is what is updated; else it is the weight itself.

    Args:
        skips: steps that are not finite are to be left out.
        state: what ``buffers`` gave of another optimizer with the same buckets, to be used as it
            is; else masters begin as the weights are, and moments as zero.
    """

    def __init__(
        self,
        flat: FlatParameters,
        cfg: OptimConfig,
        skips: bool = False,
        state: Buffers | None = None,
    ) -> None:
        self.flat, self.cfg = flat, cfg
        self.masters: list[Tensor] = []
        for n, bucket in enumerate(flat.buckets):
            wide = bucket.updated(bucket.weight)
            if wide.dtype != bucket.grad.dtype:
                wide = state[MASTER][n] if state else wide.to(bucket.grad.dtype)
            wide.grad = bucket.updated(bucket.grad)
            self.masters.append(wide)
        groups = [
            {
                "params": [
                    m for m, b in zip(self.masters, flat.buckets, strict=True) if b.decay is d
                ],
                "weight_decay": cfg.weight_decay if d else 0.0,
            }
            for d in (True, False)
        ]
        # A rank whose stages are empty holds nothing, and torch wants a group all the same.
        wide = self.masters[0] if self.masters else torch.empty(0)
        self.backend = choose_backend(cfg.backend, wide.device, wide.dtype, skips)
        self.inner = self._make([g for g in groups if g["params"]] or groups[:1])
        self._copies = [
            (b.updated(b.weight), m)
            for b, m in zip(flat.buckets, self.masters, strict=True)
            if b.weight.dtype != m.dtype
        ]
        self._init_state(state)

    def _make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        options: dict[str, Any] = {"lr": 0.0, "betas": self.cfg.betas, "eps": self.cfg.eps}
        if self.backend == "apex":
            from apex.optimizers import FusedAdam

            fused: torch.optim.Optimizer = FusedAdam(groups, adam_w_mode=True, **options)
            return fused
        return torch.optim.AdamW(groups, fused=True, **options)

    def _init_state(self, given: Buffers | None) -> None:
        """Make the moments now: what a checkpoint is loaded into, and what memory is counted."""
        for n, master in enumerate(self.masters):
            self.inner.state[master] = {
                "step": torch.zeros((), device=master.device),
                **{
                    moment: given[f"optim.{moment}."][n] if given else torch.zeros_like(master)
                    for moment in MOMENTS
                },
            }

    def step(self, lr: float, factor: Tensor, finite: Tensor) -> None:
        """Update the weights from the buckets' gradients times ``factor``. With ZeRO-1 they are
        then under way from replica to replica: ``FlatParameters.current`` waits.

        Where ``finite`` is 0 nothing changes (except with apex, which cannot skip; the run then
        ends before anything is saved). Both are 0-d and stay on the device.
        """
        grads = [b.updated(b.grad) for b in self.flat.buckets]
        if not grads:
            return
        torch._foreach_mul_(grads, factor.to(grads[0].dtype))
        for group in self.inner.param_groups:
            group["lr"] = lr
        self.inner.found_inf = 1.0 - finite.float()  # type: ignore[attr-defined]
        self.inner.step()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model's weights, and start to give them to all replicas."""
        if self._copies:
            weights, masters = zip(*self._copies, strict=True)
            torch._foreach_copy_(list(weights), list(masters))
        self.flat.gather()

    def buffers(self) -> Buffers:
        """The state, without masters that are the weights themselves."""
        found = {f"optim.{m}.": [self.inner.state[w][m] for w in self.masters] for m in MOMENTS}
        copied = any(b.weight.dtype != b.grad.dtype for b in self.flat.buckets)
        return {MASTER: self.masters, **found} if copied else found

    def pieces(self, share: bool = False) -> Iterator[Piece]:
        """The state on this rank, or its share of that, by global name:
        ``optim.{master,exp_avg,exp_avg_sq}.<name>``."""
        for prefix, buffers in self.buffers().items():
            for bucket, flat in zip(self.flat.buckets, buffers, strict=True):
                yield from bucket.pieces(bucket.share(flat) if share else flat, prefix)

    def set_num_steps(self, step: int) -> None:
        """How many updates the moments have seen, for their bias correction."""
        for state in self.inner.state.values():
            state["step"].fill_(float(step))
        for group in self.inner.param_groups:
            group["step"] = step  # where apex counts
