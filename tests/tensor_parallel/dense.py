"""Numbers by name, and a rank's part of them: the same in every layout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalite.grads import GradSink, main_grad
from megalite.mesh import Axis, Mesh, Transport
from megalite.mesh_shape import MeshShape
from megalite.slices import get_slice
from megalite.tensor_parallel.linear import Layout


def drawn(name: str, *shape: int) -> Tensor:
    seed = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=seed, dtype=torch.float64)


def leaf(name: str, *shape: int) -> Tensor:
    return drawn(name, *shape).requires_grad_()


def grad(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def part(param: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of a tensor of the parameter's global shape."""
    at = get_slice(param)
    for dim, (start, size) in enumerate(zip(at.offset, at.extent, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole


def fill(*params: nn.Parameter) -> None:
    """Values by global name; padding is zero."""
    with torch.no_grad():
        for param in params:
            at = get_slice(param)
            param.zero_()
            at.valid(param).copy_(part(param, drawn(at.name, *at.shape)))


def take(x: Tensor, tp: Axis, dim: int = 0) -> Tensor:
    """This rank's equal share of a dim."""
    return x.detach().chunk(tp.size, dim)[tp.index].clone()


def summed_grad(param: Tensor, tp: Axis) -> Tensor:
    """The gradient of a slice, where it is partial summed over the ranks that hold the slice."""
    at, mine = get_slice(param), main_grad(param)
    if not at.partial:
        return mine
    room = mine.new_zeros((at.slot[1], *mine.shape))
    room[at.slot[0]] = mine
    tp.all_reduce(room).wait()
    return room[at.slot[0]]


def layout_of(tp: Axis, sequence_parallel: bool, dtype: torch.dtype = torch.float64) -> Layout:
    return Layout(tp, sequence_parallel, dtype, torch.device("cpu"), GradSink())


@torch.no_grad()
def run_queue(layout: Layout) -> None:
    """Compute the weight products that were put off."""
    for product in layout.sink.queue or []:
        product.run(layout.sink)
    layout.sink.queue = None


class Differences(dict[str, float]):
    """Name -> largest |a - b|."""

    def add(self, name: str, got: Tensor, expected: Tensor) -> None:
        assert got.shape == expected.shape, f"{name}: {got.shape} is not {expected.shape}"
        self[name] = float((got.detach() - expected.detach()).abs().max()) if got.numel() else 0.0


# With the second, the ranks of a tp group are no neighbours, and no group is the default one.
SHAPES = (MeshShape(tp=4), MeshShape(tp=2, dp=2, order=("pp", "tp", "dp")))


def meshes(transport: Transport | None) -> list[Mesh]:
    """One mesh of each tp size that a world of 4 can have, and of tp 1."""
    if transport is None:
        return [Mesh.single()]
    return [Mesh.create(shape, transport) for shape in SHAPES]
