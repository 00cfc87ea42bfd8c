"""Where gradients go: straight into a flat fp32 (or fp64) sum, past autograd's own ``.grad``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megalite.collectives import start_gather
from megalite.mesh import Axis


def main_grad(param: Tensor) -> Tensor:
    """The sum that the gradient of ``param`` is added to, in the parameter's local shape."""
    found = getattr(param, "main_grad", None)
    if found is None:
        found = torch.zeros_like(param, dtype=torch.promote_types(param.dtype, torch.float32))
        param.main_grad = found  # type: ignore[attr-defined]
    assert isinstance(found, Tensor)
    return found


@dataclass
class WeightProduct:
    """The weight gradients of linears that share one input: dW = dY^T X for each weight.

    ``x`` is (n, d_in), or this rank's part of it along dim 0 where ``gather`` names the axis.
    ``dys`` are (n, d_out) each.
    """

    weights: tuple[Tensor, ...]
    dys: tuple[Tensor, ...]
    x: Tensor
    gather: Axis | None = None

    def run(self, sink: GradSink) -> None:
        x = self.x
        if self.gather is not None:
            x, work = start_gather(x, self.gather)
            work.wait()
        for weight, dy in zip(self.weights, self.dys, strict=True):
            total = main_grad(weight)
            if total.dtype == x.dtype:
                total.addmm_(dy.t(), x)
            else:
                total.add_(dy.t() @ x)
            sink.ready(weight)


@dataclass
class GradSink:
    """Takes the gradients of one stage.

    ``on_ready(param)`` is called each time a microbatch has added to a parameter's sum; ``queue``
    holds the weight products put off to W, or is None while B computes them at once.
    """

    on_ready: Callable[[Tensor], None] | None = None
    queue: list[WeightProduct] | None = field(default=None)

    def ready(self, param: Tensor) -> None:
        if self.on_ready is not None:
            self.on_ready(param)

    def add(self, param: Tensor, grad: Tensor) -> None:
        """Add ``grad``, of the parameter's shape and any float dtype."""
        main_grad(param).add_(grad)
        self.ready(param)

    def add_rows(self, param: Tensor, index: Tensor, rows: Tensor) -> None:
        """Add ``rows`` (n, d) to the rows number ``index`` (n,) of the sum."""
        total = main_grad(param)
        total.index_add_(0, index, rows.to(total.dtype))
        self.ready(param)

    def add_product(self, product: WeightProduct) -> None:
        """Compute a weight product now, or put it off to W."""
        if self.queue is None:
            product.run(self)
        else:
            self.queue.append(product)

    def watch(self, param: nn.Parameter) -> nn.Parameter:
        """Take the gradient that autograd computes for ``param``."""

        def take(p: Tensor) -> None:
            assert p.grad is not None
            grad, p.grad = p.grad, None
            self.add(p, grad)

        param.register_post_accumulate_grad_hook(take)
        return param
