"""What depends on places and samples, and what is computed twice: dropout, documents, recompute.

In any layout, alone and together, they take the steps of one process; with planted faults they
do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from launch.build import Training
from launch.config import Config
from megalite.dropout import Draw
from megalite.mesh import Mesh, Transport
from megalite.parallel_config import mesh_shape
from megalite.tensor_parallel.linear import Layout
from model import gpt as gpt_module
from model.config import GPTConfig
from model.documents import document_mask, places
from model.gpt import Block
from tests.nccl_rules import NcclRulesTransport
from tests.parity.harness import (
    GPT2,
    LLAMA,
    TRAIN,
    Fault,
    Outcome,
    config,
    differences,
    join,
    serial,
    train,
)
from tests.parity.test_layouts import SP, TOLERANCE, V2, V
from tests.ranks import run_ranks

# --- planted faults ----------------------------------------------------------------------------


class Forgetful(Layout):
    """A layout that takes each part of a cut sequence for its beginning."""

    def first_place(self, x: Tensor) -> int:
        return 0


def local_position(training: Training) -> None:
    for gpt in training.gpt.values():
        kept = gpt.layout
        forgetful = Forgetful(kept.tp, kept.sequence_parallel, kept.dtype, kept.device, kept.sink)
        gpt.layout = forgetful
        for block in gpt.blocks:
            assert isinstance(block, Block)
            block.layout = forgetful


def _with_samples(training: Training, change: Callable[[Tensor], Tensor]) -> None:
    run = training.executor.run

    def wrong(plan: Any, batch: Any, reducer: Any = None) -> Any:
        if batch.samples is not None:
            batch = replace(batch, samples=change(batch.samples))
        return run(plan, batch, reducer)

    training.executor.run = wrong  # type: ignore[method-assign]


def local_sample(training: Training) -> None:
    """Each microbatch counts its rows from 0."""
    _with_samples(training, lambda s: torch.arange(s.shape[1]).expand_as(s))


def own_mask_a_rank(training: Training) -> None:
    """Ranks that hold the same features drop others of them, as rank-local generators would."""
    _with_samples(training, lambda s: s + 1000 * training.mesh.tp.index)


def another_mask_again(training: Training) -> None:
    """What is computed in a backward pass draws anew."""
    keys = Draw.keys

    def wrong(self: Draw, name: str) -> Tensor:
        again = torch._C._current_graph_task_id() != -1
        return keys(self, f"{name} again" if again else name)

    Draw.keys = wrong  # type: ignore[method-assign]


def across_documents(training: Training) -> None:
    """Attention sees the whole row; positions start anew."""

    def wrong(starts: Tensor, dtype: torch.dtype) -> Tensor:
        return document_mask(torch.zeros_like(starts), dtype)

    gpt_module.document_mask = wrong


def positions_go_on(training: Training) -> None:
    """Not seen by rotary positions: within a document they only have distances."""
    gpt_module.places = lambda starts: places(torch.zeros_like(starts))


def gradient_of_one_input(training: Training) -> None:
    """A recomputed attention hands back the gradient of its queries only."""
    from megalite.recompute import _Recompute

    backward = _Recompute.backward

    def wrong(ctx: Any, grad: Tensor) -> Any:
        _, first, *rest = backward(ctx, grad)
        return None, first, *(None if r is None else torch.zeros_like(r) for r in rest)

    _Recompute.backward = staticmethod(wrong)  # type: ignore[method-assign, assignment]


# --- layouts -----------------------------------------------------------------------------------

DROP = {"dropout": 0.1}
RESET = {"reset_at_document": True}
FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}
ZB_H1 = {"schedule": "zb_h1"}
ZB_V = {**V, "schedule": "zb_v"}


@dataclass(frozen=True)
class Case:
    """Ranks, a model and a layout (dp is what is left), and a fault that must be seen."""

    ranks: int
    base: GPTConfig
    layout: dict[str, Any]
    fault: Fault

    @property
    def name(self) -> str:
        kind = "gpt2" if self.base.position == "learned" else "llama"
        words = "-".join(f"{k}={v}" for k, v in self.layout.items())
        return f"{self.ranks}-{kind}-{words}-{self.fault.__name__}"

    def cfg(self, steps: int = TRAIN.steps) -> Config:
        given = dict(self.layout)
        model = replace(self.base, dropout=given.pop("dropout", 0.0))
        return config(model, train=replace(TRAIN, steps=steps), **given)


CASES = [
    # each alone
    Case(2, GPT2, {"tp": 2, **DROP}, own_mask_a_rank),
    Case(2, LLAMA, {"tp": 2, **SP, **DROP}, local_position),
    Case(2, GPT2, {**DROP}, local_sample),
    Case(2, LLAMA, {"pp": 2, **V2, **DROP}, local_sample),
    Case(2, GPT2, {"pp": 2, **RESET}, across_documents),
    Case(2, LLAMA, {"tp": 2, **SP, **RESET}, across_documents),
    Case(2, GPT2, {"tp": 2, **SP, **RESET}, positions_go_on),
    Case(2, LLAMA, {"tp": 2, **SELECTIVE}, gradient_of_one_input),
    Case(4, GPT2, {"tp": 2, "pp": 2, **SP, **ZB_V, **SELECTIVE}, gradient_of_one_input),
    # together
    Case(2, GPT2, {"pp": 2, **ZB_H1, **FULL, **DROP}, another_mask_again),
    Case(2, GPT2, {"tp": 2, **SP, **FULL, **DROP}, another_mask_again),
    Case(4, GPT2, {"tp": 2, "pp": 2, **SP, **ZB_V, **FULL, **DROP}, another_mask_again),
    Case(4, LLAMA, {"tp": 4, **SP, **FULL, **DROP, **RESET}, local_position),
    Case(4, GPT2, {"tp": 2, "pp": 2, **V2, **FULL, **RESET}, across_documents),
    Case(4, LLAMA, {"pp": 2, **ZB_H1, **SELECTIVE, **DROP, **RESET}, local_sample),
    Case(4, LLAMA, {"tp": 4, **SELECTIVE, **RESET}, across_documents),
    Case(8, GPT2, {"tp": 2, "pp": 2, **SP, **V2, **FULL, **DROP, **RESET}, local_position),
    Case(8, LLAMA, {"tp": 4, "pp": 2, **SP, **ZB_V, **FULL, **DROP, **RESET}, across_documents),
]


def expected(cfg: Config) -> Outcome:
    return serial(cfg.model, cfg.train, cfg.data.reset_at_document)


def clean_and_faulty(
    transport: Transport, cfg: Config, once: Config, fault: Fault
) -> list[dict[str, Any]]:
    """A rank of two runs: as it should be, and then, for the process ends with it, with a fault."""
    mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
    try:
        return [train(cfg, mesh), train(once, mesh, fault)]
    finally:
        mesh.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_layout_takes_the_steps_of_one_process(case: Case) -> None:
    cfg, once = case.cfg(), case.cfg(steps=1)
    both = run_ranks(case.ranks, clean_and_faulty, cfg, once, case.fault)
    got = join([rank[0] for rank in both])
    for what, (size, where) in differences(got, expected(cfg)).items():
        assert size <= TOLERANCE[what], f"{what} differs by {size:.1e} at {where}"

    try:
        broken = join([rank[1] for rank in both])
    except AssertionError as error:
        assert "ranks disagree" in str(error)
        return
    seen = differences(broken, expected(once))
    worst = max(size / TOLERANCE[what] for what, (size, _) in seen.items())
    assert worst > 1e3, f"{case.fault.__name__} went unseen"


def under_rules(transport: Transport, cfg: Config) -> dict[str, Any]:
    assert isinstance(transport, NcclRulesTransport)
    mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
    try:
        return train(cfg, mesh, None, transport.device_rules)
    finally:
        mesh.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_layout_keeps_the_rules_of_nccl(case: Case) -> None:
    cfg = case.cfg(steps=1)
    got = join(run_ranks(case.ranks, under_rules, cfg, transport="nccl_rules"))
    for what, (size, where) in differences(got, expected(cfg)).items():
        assert size <= TOLERANCE[what], f"{what} differs by {size:.1e} at {where}"


@pytest.mark.parametrize("base", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_each_of_them_changes_what_is_learned_or_nothing(base: GPTConfig) -> None:
    plain, dropped = serial(base), serial(replace(base, dropout=0.1))
    reset, loose = serial(base, TRAIN, True), config(base)
    assert dropped.losses[0] != plain.losses[0]
    again = join([train(replace(loose, parallel=config(**FULL).parallel), Mesh.single())])
    assert again.losses == plain.losses
    assert all(torch.equal(again.weights[n], t) for n, t in plain.weights.items())
    assert reset.losses[0] != plain.losses[0]


@pytest.mark.parametrize("micro_batch_size", [1, 3, 6, 4])
def test_the_size_of_a_microbatch_changes_no_mask(micro_batch_size: int) -> None:
    model = replace(GPT2, dropout=0.3)
    cut = replace(TRAIN, micro_batch_size=micro_batch_size)
    seen = differences(serial(model, cut), serial(model))
    for what, (size, where) in seen.items():
        assert size <= TOLERANCE[what], f"{what} differs by {size:.1e} at {where}"
