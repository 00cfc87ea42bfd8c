"""Parallel linears against dense ones by plain autograd, in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megalite.grads import main_grad
from megalite.mesh import Axis, Transport
from megalite.slices import get_slice
from megalite.tensor_parallel.embedding import vocab_weight
from megalite.tensor_parallel.linear import (
    ColumnParallelLinear,
    Cut,
    Layout,
    RowParallelLinear,
    vocab_logits,
)
from tests.ranks import run_ranks
from tests.tensor_parallel.dense import (
    Differences,
    drawn,
    fill,
    grad,
    layout_of,
    leaf,
    meshes,
    part,
    run_queue,
    summed_grad,
    take,
)

S, B, D_IN = 4, 3, 8
OUTPUTS = {"q": (16, 8), "k": (4, 2), "up": (12, 12)}  # features, parts; k is copied at tp 4
ROW_IN, ROW_OUT = 8, 6
VOCAB = 13


def column(layout: Layout, put_off: bool) -> Differences:
    """Three outputs of one column-parallel linear against three dense linears."""
    tp, cut, found = layout.tp, layout.cut_sequence, Differences()
    module = ColumnParallelLinear(layout, "c", D_IN, OUTPUTS, bias=True, std=1.0)
    fill(*module.parameters())
    whole = leaf("x", S, B, D_IN)
    x = (take(whole, tp) if cut else whole.detach().clone()).requires_grad_()
    dense: dict[str, Tensor] = {}
    expected: list[Tensor] = []
    dys: list[Tensor] = []
    for (name, (d, _)), held in zip(OUTPUTS.items(), module.weights, strict=True):
        weight, bias = leaf(f"c.{name}.weight", d, D_IN), leaf(f"c.{name}.bias", d)
        dense |= {f"c.{name}.weight": weight, f"c.{name}.bias": bias}
        y, dy = nn.functional.linear(whole, weight, bias), drawn(f"dy {name}", S, B, d)
        y.backward(dy)
        at = get_slice(held)
        columns = slice(at.offset[0], at.offset[0] + at.extent[0])
        expected.append(y[..., columns])
        # What uses a copy of an output has a part of that output's gradient.
        share = (0.25, 0.75)[at.replica] if at.partial else 1.0
        dys.append(dy[..., columns] * share)
    layout.sink.queue = [] if put_off else None
    ys = module(x)
    torch.autograd.backward(ys, dys)
    run_queue(layout)
    for name, got, want in zip(OUTPUTS, ys, expected, strict=True):
        found.add(f"y {name}", got, want)
    found.add("dx", grad(x), take(grad(whole), tp) if cut else grad(whole))
    for param in module.parameters():
        name = get_slice(param).name
        found.add(f"d {name}", summed_grad(param, tp), part(param, grad(dense[name])))
    return found


def row(layout: Layout, put_off: bool) -> Differences:
    """A row-parallel linear, whose input is cut by features, against a dense one."""
    tp, cut, found = layout.tp, layout.cut_sequence, Differences()
    module = RowParallelLinear(layout, "r", ROW_IN, ROW_OUT, bias=True, std=1.0)
    assert module.bias is not None
    fill(module.weight, module.bias)
    whole, weight = leaf("row x", S, B, ROW_IN), leaf("r.weight", ROW_OUT, ROW_IN)
    bias, dy = leaf("r.bias", ROW_OUT), drawn("row dy", S, B, ROW_OUT)
    expected = nn.functional.linear(whole, weight, bias)
    expected.backward(dy)
    x = take(whole, tp, 2).requires_grad_()
    layout.sink.queue = [] if put_off else None
    y = module(x)
    y.backward(take(dy, tp) if cut else dy)
    run_queue(layout)
    found.add("y", y, take(expected, tp) if cut else expected)
    found.add("dx", grad(x), take(grad(whole), tp, 2))
    found.add("dw", main_grad(module.weight), take(grad(weight), tp, 1))
    found.add("db", summed_grad(module.bias, tp), grad(bias))
    return found


def not_split(layout: Layout, put_off: bool) -> Differences:
    """A column-parallel linear whose whole input goes on into a row-parallel one: what stands
    between them is cut by features and is nowhere gathered."""
    tp, cut, found = layout.tp, layout.cut_sequence, Differences()
    first = ColumnParallelLinear(layout, "c", D_IN, {"up": (ROW_IN, 8)}, bias=True, std=1.0)
    second = RowParallelLinear(layout, "r", ROW_IN, ROW_OUT, bias=True, std=1.0)
    params = [*first.parameters(), *second.parameters()]
    fill(*params)
    dense = {get_slice(p).name: leaf(get_slice(p).name, *get_slice(p).shape) for p in params}
    whole, dy = leaf("x", S, B, D_IN), drawn("row dy", S, B, ROW_OUT)
    hidden = nn.functional.linear(whole, dense["c.up.weight"], dense["c.up.bias"]).sin()
    expected = nn.functional.linear(hidden, dense["r.weight"], dense["r.bias"])
    expected.backward(dy)
    x = (take(whole, tp) if cut else whole.detach().clone()).requires_grad_()
    layout.sink.queue = [] if put_off else None
    y = second(first(x)[0].sin())
    y.backward(take(dy, tp) if cut else dy)
    run_queue(layout)
    found.add("y", y, take(expected, tp) if cut else expected)
    found.add("dx", grad(x), take(grad(whole), tp) if cut else grad(whole))
    for param in params:
        name = get_slice(param).name
        found.add(f"d {name}", summed_grad(param, tp), part(param, grad(dense[name])))
    return found


def logits(layout: Layout, put_off: bool) -> Differences:
    """The head: the vocabulary is cut, and padded to equal parts."""
    tp, cut, found = layout.tp, layout.cut_sequence, Differences()
    head = vocab_weight(layout, "head", VOCAB, D_IN, 1.0)
    fill(head)
    whole, weight = leaf("x", S, B, D_IN), leaf("head", VOCAB, D_IN)
    expected, dy = nn.functional.linear(whole, weight), drawn("dl", S, B, VOCAB)
    expected.backward(dy)
    x = (take(whole, tp) if cut else whole.detach().clone()).requires_grad_()
    y = vocab_logits(x, layout, head)
    at = get_slice(head)
    local = torch.zeros_like(y)
    local[..., : at.extent[0]] = dy[..., at.offset[0] :][..., : at.extent[0]]
    y.backward(local)
    found.add("y", y[..., : at.extent[0]], expected[..., at.offset[0] :][..., : at.extent[0]])
    found.add("dx", grad(x), take(grad(whole), tp) if cut else grad(whole))
    found.add("dw", at.valid(main_grad(head)), part(head, grad(weight)))
    found.add("padding", main_grad(head)[at.extent[0] :], torch.zeros_like(head)[at.extent[0] :])
    return found


CHECKS = {f.__name__: f for f in (column, row, not_split, logits)}
Measured = dict[tuple[str, int, bool, bool], Differences]


def measure(transport: Transport | None) -> tuple[Measured, Measured]:
    """Every check at every tp size; and again without the sum of input gradients over tp."""
    found, broken = Measured(), Measured()
    made = meshes(transport)
    for mesh in made:
        tp = mesh.tp
        for name, check in CHECKS.items():
            for cut in (False, True):
                for put_off in (False, True):
                    key = name, tp.size, cut, put_off
                    found[key] = check(layout_of(tp, cut), put_off)
        alone = Axis(tp.name, tp.index, tp.size)
        for name, check in CHECKS.items():
            broken[name, tp.size, False, False] = check(layout_of(alone, False), False)
    for mesh in made:
        mesh.close()
    return found, broken


@pytest.fixture(scope="module")
def measured() -> tuple[Measured, Measured]:
    """The worst of all ranks."""
    found, broken = measure(None)
    for rank in run_ranks(4, measure):
        for target, source in zip((found, broken), rank, strict=True):
            for key, differences in source.items():
                old = target.setdefault(key, Differences())
                for name, size in differences.items():
                    old[name] = max(size, old.get(name, 0.0))
    return found, broken


@pytest.mark.parametrize("put_off", [False, True], ids=["at-once", "put-off"])
@pytest.mark.parametrize("cut", [False, True], ids=["whole-sequence", "cut-sequence"])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("check", CHECKS)
def test_a_parallel_linear_is_a_dense_one(
    check: str, tp: int, cut: bool, put_off: bool, measured: tuple[Measured, Measured]
) -> None:
    differences = measured[0][check, tp, cut, put_off]
    assert len(differences) >= 4
    for name, size in differences.items():
        assert size <= 1e-12, f"{name} differs by {size:.1e}"


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("check", CHECKS)
def test_without_the_sums_over_tp_the_difference_is_seen(
    check: str, tp: int, measured: tuple[Measured, Measured]
) -> None:
    differences = measured[1][check, tp, False, False]
    assert differences["y" if check in ("row", "not_split") else "dx"] > 1e-2


def test_the_bias_of_a_row_parallel_linear_is_added_once() -> None:
    layout = layout_of(Axis("tp"), False)
    module = RowParallelLinear(layout, "r", ROW_IN, ROW_OUT, bias=True, std=1.0)
    assert module.bias is not None
    fill(module.weight, module.bias)
    x = drawn("row x", S, B, ROW_IN)
    once = module(x)
    assert bool(module.bias.abs().min() > 1e-2), "so that a second bias would be seen"
    with torch.no_grad():
        module.bias.mul_(2)
    assert float((module(x) - once).detach().abs().max()) > 1e-2


def test_without_biases_there_are_none() -> None:
    layout = layout_of(Axis("tp"), False)
    column = ColumnParallelLinear(layout, "c", D_IN, OUTPUTS, bias=False, std=1.0)
    row = RowParallelLinear(layout, "r", ROW_IN, ROW_OUT, bias=False, std=1.0)
    assert len(list(column.parameters())) == 3
    assert len(list(row.parameters())) == 1
    fill(*column.parameters(), *row.parameters())
    q, _, _ = column(drawn("x", S, B, D_IN))
    torch.testing.assert_close(q, drawn("x", S, B, D_IN) @ drawn("c.q.weight", 16, D_IN).t())
    assert row(drawn("row x", S, B, ROW_IN)).shape == (S, B, ROW_OUT)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_every_row_is_on_as_many_ranks_as_its_part_has_copies(parts: int, tp: int) -> None:
    cuts = [Cut.of(16, parts, Axis("tp", i, tp)) for i in range(tp)]
    copies = max(1, tp // parts)
    held = [r for c in cuts for r in range(c.start, c.start + c.rows)]
    assert sorted(held) == sorted(list(range(16)) * copies)
    for c in cuts:
        assert c.copies == copies
        same = [o for o in cuts if o.start == c.start]
        assert sorted(o.replica for o in same) == list(range(copies))
        assert {o.slot for o in same} == {c.slot}
    if copies > 1:
        assert sorted({c.slot for c in cuts}) == [(i, parts) for i in range(parts)]


@pytest.mark.parametrize(("parts", "tp"), [(3, 2), (6, 4), (3, 4)])
def test_parts_that_no_number_of_copies_spreads_are_refused(parts: int, tp: int) -> None:
    with pytest.raises(ValueError, match=f"{parts} parts cannot be spread over tp={tp}"):
        Cut.of(12, parts, Axis("tp", 0, tp))


def test_only_a_cut_sequence_makes_the_gradient_of_replicated_parameters_partial() -> None:
    for tp, cut, partial in ((1, True, False), (2, False, False), (2, True, True)):
        layout = layout_of(Axis("tp", tp - 1, tp), cut)
        at = get_slice(layout.replicated("n", (4,), ("constant", 1.0)))
        assert (at.partial, at.replica, at.decay) == (partial, tp - 1, False)
        assert replace(at, replica=0).counted
        assert at.counted is (tp == 1)
