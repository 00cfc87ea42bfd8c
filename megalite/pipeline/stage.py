"""One stage of the pipeline on one rank: runs a microbatch forward, back, or back in two parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from megalite.grads import GradSink, WeightProduct
from megalite.rows import Rows


class StageModule(Protocol):
    """What a model provides; ``model.gpt.GPTStage`` is one."""

    def __call__(
        self, x: Tensor, targets: Tensor | None = None, rows: Rows | None = None
    ) -> Tensor: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def hidden_shape(self, micro_batch_size: int, seq_length: int) -> tuple[int, ...]: ...


@dataclass
class _Saved:
    """What a microbatch leaves between F and B: its input, and the end of its graph."""

    x: Tensor
    end: torch.autograd.graph.GradientEdge
    weights: list[WeightProduct] | None = None


class Stage:
    """Stage ``index`` of ``num_stages``.

    Args:
        module: the layers; called as ``module(x, targets, rows)``.
        sink: where the layers' gradients go.
        loss_scale: d(total)/d(summed loss), by which the last stage's backward starts.
        scale: 0-d on the device, a further factor of that.

    ``microbatch`` is the one whose pass was the last to begin.
    """

    def __init__(
        self,
        module: StageModule,
        index: int,
        num_stages: int,
        sink: GradSink,
        dtype: torch.dtype,
        device: torch.device,
        loss_scale: float = 1.0,
        scale: Tensor | None = None,
    ) -> None:
        self.module, self.index, self.sink = module, index, sink
        self.first, self.last = index == 0, index == num_stages - 1
        self.dtype, self.device = dtype, device
        self.loss_scale, self.scale = loss_scale, scale
        self.microbatch = 0
        self._saved: dict[int, _Saved] = {}

    def forward(
        self,
        microbatch: int,
        x: Tensor,
        targets: Tensor | None = None,
        rows: Rows | None = None,
    ) -> Tensor:
        """The output of a microbatch: hidden states for the next stage, or the summed loss.

        With gradients enabled, what B needs is kept until then. Keeping the end of the graph
        instead of the output lets the output's memory go as soon as it is sent.
        """
        self.microbatch = microbatch
        if not torch.is_grad_enabled():
            return self._call(x, targets, rows)
        x = x if self.first else x.detach().requires_grad_()
        out = self._call(x, targets, rows)
        end = torch.autograd.graph.get_gradient_edge(out)
        self._saved[microbatch] = _Saved(x, end)
        return out.detach()

    def _call(self, x: Tensor, targets: Tensor | None, rows: Rows | None) -> Tensor:
        out = self.module(x, targets, rows)
        # A stage without layers gives back its input, whose memory the executor uses again.
        return out.clone() if out is x else out

    def backward(self, microbatch: int, grad: Tensor | None) -> Tensor | None:
        """B: all gradients. Returns that of the input, or None on the first stage."""
        saved = self._saved.pop(microbatch)
        self._run(saved, grad)
        return None if self.first else saved.x.grad

    def input_grad(self, microbatch: int, grad: Tensor | None) -> Tensor | None:
        """I: the gradient of the input; the weight products are put off to W."""
        saved = self._saved[microbatch]
        self.sink.queue = []
        self._run(saved, grad)
        saved.weights, self.sink.queue = self.sink.queue, None
        return None if self.first else saved.x.grad

    @torch.no_grad()
    def weight_grad(self, microbatch: int) -> None:
        """W: the weight products of an earlier I."""
        saved = self._saved.pop(microbatch)
        assert saved.weights is not None
        for product in saved.weights:
            product.run(self.sink)

    def _run(self, saved: _Saved, grad: Tensor | None) -> None:
        if grad is None:
            dtype = torch.promote_types(self.dtype, torch.float32)
            grad = torch.full((), self.loss_scale, dtype=dtype, device=self.device)
            if self.scale is not None:
                grad *= self.scale
        torch.autograd.backward([saved.end], [grad])

    def live(self, microbatch: int) -> bool:
        """Whether a backward pass of the microbatch is to come."""
        return microbatch in self._saved

    @property
    def live_microbatches(self) -> int:
        """Microbatches between F and the end of B or W; 0 at the end of a step."""
        return len(self._saved)
