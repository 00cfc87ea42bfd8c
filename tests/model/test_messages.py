"""How many collectives a block, a microbatch and a step cost, by kind and axis."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest

from launch.build import build
from launch.config import Config
from megalite.mesh import Mesh, Transport
from megalite.parallel_config import mesh_shape
from model.config import GPTConfig
from tests.counting import CountingTransport
from tests.parity.harness import (
    GPT2,
    LLAMA,
    TRAIN,
    batch_of,
    config,
)
from tests.ranks import run_ranks


@dataclass
class Counts:
    """Operations of one step, by axis; the number of buckets; those summed late over dp."""

    tp: Counter[str]
    dp: Counter[str]
    tie: Counter[str]
    world: Counter[str]
    buckets: int


def count(transport: Transport, cfgs: list[Config]) -> list[Counts]:
    found = []
    for cfg in cfgs:
        counting = CountingTransport(transport)
        mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), counting)
        training = build(cfg, mesh)
        batch = batch_of(cfg, 0, mesh.dp.index, mesh.dp.size)
        training.step(batch, 1e-3)
        counting.reset()
        training.step(batch, 1e-3)
        axes = {}
        for name in ("tp", "dp", "tie", "world"):
            axis = getattr(mesh, name)
            records = counting.select(ranks=axis.ranks) if axis.size > 1 else []
            axes[name] = Counter(r.op for r in records if r.op not in ("send", "recv"))
        found.append(Counts(**axes, buckets=len(training.flat.buckets)))
        mesh.close()
    return found


def counted(model: GPTConfig, layers: int, m: int, dp: int, **layout: Any) -> Config:
    train = replace(TRAIN, global_batch_size=m * dp, micro_batch_size=1)
    return config(replace(model, num_layers=layers), train=train, **layout)


MODELS = {"gpt2": GPT2, "llama": LLAMA}
COUNTED = [
    (model, cut, layers, m)
    for model in MODELS
    for cut in (False, True)
    for layers, m in ((1, 1), (3, 1), (3, 2))
]
RECOMPUTED = [
    counted(MODELS[model], 3, 2, 2, tp=2, sequence_parallel=cut, recompute=mode)
    for model in MODELS
    for cut in (False, True)
    for mode in ("none", "selective", "full")
]
OTHERS = [
    counted(GPT2, 4, 3, 1, pp=2, tp=2),
    counted(replace(GPT2, tied_embeddings=False), 4, 3, 1, pp=2, tp=2),
    counted(LLAMA, 2, 1, 1, tp=4),
    counted(LLAMA, 2, 3, 1, tp=4),
]


@pytest.fixture(scope="module")
def all_counts() -> list[list[Counts]]:
    """Rank, then configuration: COUNTED at tp 2 x dp 2, then OTHERS."""
    cfgs = [
        counted(MODELS[model], layers, m, 2, tp=2, sequence_parallel=cut)
        for model, cut, layers, m in COUNTED
    ]
    return run_ranks(4, count, [*cfgs, *RECOMPUTED, *OTHERS])


@pytest.fixture
def counts(all_counts: list[list[Counts]]) -> dict[tuple[str, bool, int, int], list[Counts]]:
    return {key: [rank[n] for rank in all_counts] for n, key in enumerate(COUNTED)}


@pytest.mark.parametrize("model", MODELS)
def test_a_block_and_microbatch_costs_two_and_two_all_reduces(
    model: str, counts: dict[tuple[str, bool, int, int], list[Counts]]
) -> None:
    for one, three in zip(counts[model, False, 1, 1], counts[model, False, 3, 1], strict=True):
        per_block = {op: (n - one.tp[op]) / 2 for op, n in three.tp.items()}
        assert per_block == {"all_reduce": 4}
        # Besides: the embedding, the input gradient of the head, and two of the cross-entropy.
        assert one.tp == {"all_reduce": 4 + 1 + 1 + 2}


@pytest.mark.parametrize("model", MODELS)
def test_with_a_cut_sequence_it_costs_gathers_and_reduce_scatters(
    model: str, counts: dict[tuple[str, bool, int, int], list[Counts]]
) -> None:
    for one, three in zip(counts[model, True, 1, 1], counts[model, True, 3, 1], strict=True):
        per_block = {op: (n - one.tp[op]) / 2 for op, n in three.tp.items()}
        # Two of the gathers are those of the inputs, once more for their weight gradients.
        assert per_block == {"all_gather": 4 + 2, "reduce_scatter": 4, "all_reduce": 0}
        # Besides: the embedding forward and back; the head's input, again for its weight, and
        # its gradient; two of the cross-entropy; and one for all partial gradients.
        assert one.tp == {"all_gather": 6 + 1 + 2, "reduce_scatter": 4 + 1 + 1, "all_reduce": 3}


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_what_a_step_costs_once_does_not_grow_with_microbatches(
    model: str, cut: bool, counts: dict[tuple[str, bool, int, int], list[Counts]]
) -> None:
    for one, two in zip(counts[model, cut, 3, 1], counts[model, cut, 3, 2], strict=True):
        for step in (one, two):
            assert step.world == {"all_reduce": 1}
            assert step.dp == {"all_reduce": step.buckets}
            assert step.buckets < 6
        once = 1 if cut else 0  # the sum of partial gradients
        assert two.tp["all_reduce"] - once == 2 * (one.tp["all_reduce"] - once)
        assert two.tp["all_gather"] == 2 * one.tp["all_gather"]


def test_a_tie_over_two_ranks_costs_one_sum_and_only_where_there_is_one(
    all_counts: list[list[Counts]],
) -> None:
    for rank in all_counts:
        tied, loose = rank[-len(OTHERS) :][:2]
        assert tied.tie == {"all_reduce": 1}
        assert loose.tie == {}
        assert tied.world == loose.world == {"all_reduce": 1}
        assert tied.dp == loose.dp == {}


def test_shared_key_value_heads_cost_one_sum_a_step(all_counts: list[list[Counts]]) -> None:
    for rank in all_counts:
        one, three = rank[-2:]
        # Here tp has the ranks of the world, whose one sum is among these.
        assert one.tp == {"all_reduce": 2 * 4 + 4 + 1 + 1}
        assert three.tp == {"all_reduce": 3 * (2 * 4 + 4) + 1 + 1}


def test_full_recompute_sends_a_blocks_forward_messages_again_and_selective_none(
    all_counts: list[list[Counts]],
) -> None:
    blocks, turns = 3, 2
    for rank in all_counts:
        found = iter(rank[len(COUNTED) : -len(OTHERS)])
        for cfg in RECOMPUTED[::3]:
            none, selective, full = next(found), next(found), next(found)
            assert selective == none and none.dp
            more = {op: n - none.tp[op] for op, n in full.tp.items()}
            if cfg.parallel.sequence_parallel:
                again = {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 0}
            else:
                again = {"all_reduce": 2}
            assert more == {op: blocks * turns * n for op, n in again.items()}
            assert (full.dp, full.tie, full.world) == (none.dp, none.tie, none.world)
