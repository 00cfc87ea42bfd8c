"""The communication of tensor parallelism against its definition, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megalite.collectives import (
    all_reduced,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
    start_gather,
    start_reduce_scatter,
)
from megalite.mesh import Axis, Mesh, Transport
from megalite.mesh_shape import MeshShape
from tests.ranks import run_ranks

# name -> the function; the shape of its input and of its output for n ranks; and, from what all
# ranks gave (inputs, output gradients), the output and the input gradient of rank i.
Expected = Callable[[list[Tensor], int], Tensor]
Case = tuple[Callable[[Tensor, Axis], Tensor], bool, bool, Expected, Expected]


def own(xs: list[Tensor], i: int) -> Tensor:
    return xs[i]


def summed(xs: list[Tensor], i: int) -> Tensor:
    return torch.stack(xs).sum(0)


def joined(xs: list[Tensor], i: int) -> Tensor:
    return torch.cat(xs)


def cut(xs: list[Tensor], i: int) -> Tensor:
    return xs[i].chunk(len(xs))[i]


def summed_and_cut(xs: list[Tensor], i: int) -> Tensor:
    return summed(xs, i).chunk(len(xs))[i]


CASES: dict[str, Case] = {
    "copy_to": (copy_to, True, True, own, summed),
    "reduce_from": (reduce_from, True, True, summed, own),
    "gather_from": (gather_from, False, True, joined, summed_and_cut),
    "reduce_scatter_to": (reduce_scatter_to, True, False, summed_and_cut, joined),
    "scatter_to": (scatter_to, True, False, cut, joined),
}
# With the second, the ranks of a tp group are no neighbours, and no group is the default one.
SHAPES = [MeshShape(tp=4), MeshShape(tp=2, dp=2, order=("pp", "tp", "dp"))]


def draw(seed: int, whole: bool, n: int, transposed: bool) -> Tensor:
    shape = (4, 3) if whole else (4 // n, 3)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.t().contiguous().t() if transposed else x


def measure(transport: Transport) -> dict[tuple[str, int, bool], tuple[float, float, bool]]:
    """(function, tp, transposed) -> how far output and input gradient are from what they should
    be, and whether the input has kept its values."""
    found = {}
    for shape in SHAPES:
        mesh = Mesh.create(shape, transport)
        n, i = mesh.tp.size, mesh.tp.index
        for name, (function, whole_in, whole_out, output, gradient) in CASES.items():
            for transposed in (False, True):
                xs = [draw(r, whole_in, n, transposed) for r in range(n)]
                gs = [draw(100 + r, whole_out, n, transposed) for r in range(n)]
                x = xs[i].clone().requires_grad_()
                y = function(x, mesh.tp)
                y.backward(gs[i])
                assert x.grad is not None
                off = float((y.detach() - output(xs, i)).abs().max())
                off_grad = float((x.grad - gradient(gs, i)).abs().max())
                same = torch.equal(x.detach(), xs[i]) and torch.equal(
                    gs[i], draw(100 + i, whole_out, n, transposed)
                )
                found[name, n, transposed] = off, off_grad, same
        mesh.close()
    return found


@pytest.fixture(scope="module")
def measured() -> list[dict[tuple[str, int, bool], tuple[float, float, bool]]]:
    return run_ranks(4, measure)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradient_are_those_of_the_definition(
    name: str,
    tp: int,
    transposed: bool,
    measured: list[dict[tuple[str, int, bool], tuple[float, float, bool]]],
) -> None:
    for rank in measured:
        off, off_grad, kept = rank[name, tp, transposed]
        assert off < 1e-14
        assert off_grad < 1e-14
        assert kept, "an input was changed in place"


def test_the_definitions_differ_from_each_other() -> None:
    xs = [draw(r, True, 4, False) for r in range(4)]
    outcomes = [f(xs, 1) for f in (own, summed, joined, cut, summed_and_cut)]
    for n, a in enumerate(outcomes):
        assert not any(a.shape == b.shape and torch.allclose(a, b) for b in outcomes[n + 1 :])


@pytest.mark.parametrize("name", CASES)
def test_on_an_axis_of_size_one_nothing_happens(name: str) -> None:
    x = torch.ones(4, 3, requires_grad=True)
    assert CASES[name][0](x, Axis("tp")) is x


def test_the_parts_are_copies_on_an_axis_of_size_one() -> None:
    x = torch.arange(6.0).view(3, 2)
    for start in (start_gather, start_reduce_scatter):
        out, work = start(x, Axis("tp"))
        work.wait()
        assert torch.equal(out, x)
        assert out.data_ptr() != x.data_ptr()
    assert all_reduced(x, Axis("tp")) is x
