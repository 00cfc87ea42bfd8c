"""A state goes from layout to layout to the bit, within the memory of the larger of the two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from launch.build import Training, build, hold, make_plan
from launch.config import Config
from launch.job import share_text
from launch.state import state_pieces
from megalite.checkpoint import reshard as module
from megalite.checkpoint.reshard import (
    Inventory,
    Kind,
    Links,
    Resharding,
    best_order,
    buffers_of,
    inventory,
    peak,
    reshard,
)
from megalite.data_parallel.bucket import FlatParameters
from megalite.mesh import Mesh, Transport, Work
from megalite.optim.adamw import Buffers
from megalite.parallel_config import ParallelConfig, mesh_shape
from tests.live import live_bytes
from tests.parity.harness import GPT2, LLAMA, TRAIN, Part, assemble, batch_of, config, parts
from tests.ranks import run_ranks

ZERO = {"zero1": True}
V2 = {"schedule": "interleaved_1f1b", "virtual_stages": 2}
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 4},
    {"pp": 4},
    {"tp": 2, "pp": 2, "schedule": "zb_v", "virtual_stages": 2},
    {"pp": 2, **V2, **ZERO},
    {**ZERO},
    {"tp": 2, "sequence_parallel": True, "rank_order": "tp,dp,pp"},
]
EVERY = 7  # messages, at the end of which memory is looked at
BOUND = 1.1  # times the larger state
WIDE = replace(GPT2, hidden_size=64, ffn_hidden_size=256, vocab_size=257)
KINDS = [(WIDE, "bf16"), (replace(LLAMA, vocab_size=130), "fp64")]


class _Watched:
    """A message at whose ends the memory of this process is looked at."""

    def __init__(self, work: Work, seen: list[int]) -> None:
        self.work, self.seen = work, seen

    def wait(self) -> None:
        self.work.wait()
        self.seen.append(0 if len(self.seen) % EVERY else live_bytes())


@contextmanager
def watched(links: Links, seen: list[int]) -> Iterator[None]:
    post = links.post
    links.post = lambda *message: _Watched(post(*message), seen)  # type: ignore[method-assign]
    yield
    del links.post


def through_layouts(transport: Transport, cfg: Config, keeps: bool = False) -> list[Any]:
    """Two steps, then the state through all layouts; a rank's part of it in each, and of each
    change the most memory, what it had before, and the larger of the two states.

    A fault: ``keeps`` the old layout's memory.
    """
    if keeps:
        module.free = lambda flat: None  # type: ignore[assignment]  # this process ends soon
    mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
    training = build(cfg, mesh)
    for step in range(2):
        training.step(batch_of(cfg, step, mesh.dp.index, mesh.dp.size), cfg.optim.lr)
    found: list[Any] = [(parts(state_pieces(training, share=True)), None)]
    for layout in LAYOUTS[1:]:
        cfg = replace(cfg, parallel=ParallelConfig(**layout))
        plan, shape = make_plan(cfg, mesh_shape(cfg.parallel, 4).dp), mesh_shape(cfg.parallel, 4)
        future = hold(cfg, Mesh.at(shape, mesh.rank, torch.device("meta")), plan)
        sides = []
        for side in (training, future):
            training.flat.current()
            texts = share_text(mesh)(inventory(side.flat, side.optimizer).to_text())
            sides.append([Inventory.from_text(text) for text in texts])
        moves = Resharding(*sides, node=[0, 0, 1, 1])
        larger = max(side[mesh.rank].nbytes for side in sides)
        made = mesh.reshaped(shape)
        links = Links(made, moves.pairs())
        seen = [0]
        others = live_bytes() - sides[0][mesh.rank].nbytes

        with watched(links, seen):
            training = build(cfg, made, plan, fill=partial(_move, moves, links, training))
        assert links.sent_bytes == sum(
            n for move, n in moves.messages() if move.source == mesh.rank
        )
        links.close()
        mesh.close()
        mesh = made
        held = (max(*seen, live_bytes()) - others, larger, moves.peaks()[mesh.rank])
        found.append((parts(state_pieces(training, share=True)), held))
        assert _weights_of_replicas_agree(training, mesh)
    mesh.close()
    return found


def _move(moves: Resharding, links: Links, old: Training, new: FlatParameters) -> Buffers:
    return reshard(moves, links, old.flat, buffers_of(old.flat, old.optimizer), new)


def _weights_of_replicas_agree(training: Training, mesh: Mesh) -> bool:
    for bucket in training.flat.buckets:
        most = bucket.weight.double()
        least = -most
        mesh.dp.all_reduce(most, "max").wait()
        mesh.dp.all_reduce(least, "max").wait()
        if not torch.equal(most, -least):
            return False
    return True


def states(ranks: list[list[Any]]) -> list[dict[str, Tensor]]:
    found: list[list[list[Part]]] = [[r[n][0] for r in ranks] for n in range(len(LAYOUTS))]
    return [assemble(parts_of) for parts_of in found]


@pytest.mark.parametrize("transport", ["gloo", "nccl_rules"])
def test_a_state_goes_through_layouts_to_the_bit(transport: str) -> None:
    model, dtype = KINDS[transport == "nccl_rules"]
    cfg = config(model, train=replace(TRAIN, dtype=dtype), **LAYOUTS[0])  # type: ignore[arg-type]
    ranks = run_ranks(4, through_layouts, cfg, transport=transport)
    first, *others = states(ranks)
    assert {n.split(".")[1] for n in first if n.startswith("optim.")} >= {"exp_avg", "exp_avg_sq"}
    for layout, other in zip(LAYOUTS[1:], others, strict=True):
        assert other.keys() == first.keys()
        for name, tensor in first.items():
            assert torch.equal(other[name], tensor), f"{name} in {layout}"
    if transport == "gloo":
        for used, larger, planned in (r[n][1] for r in ranks for n in range(1, len(LAYOUTS))):
            assert used <= BOUND * larger, (used, larger)
            assert planned <= BOUND * larger


@pytest.mark.full
def test_memory_that_is_kept_is_seen() -> None:
    """A negative control."""
    cfg = config(WIDE, train=replace(TRAIN, dtype="bf16"), **LAYOUTS[0])
    ranks = run_ranks(4, through_layouts, cfg, True)
    assert any(used > BOUND * larger for r in ranks for used, larger, _ in [r[1][1], r[2][1]])


def _inventory(weights: int, state: int, grads: int) -> Inventory:
    sizes = {"": weights, "optim.exp_avg.": state, "optim.exp_avg_sq.": state}
    return Inventory({p: Kind(p, 4, (n,), (), (0,)) for p, n in sizes.items()}, 4 * grads)


def test_what_shrinks_moves_before_what_grows() -> None:
    held, wanted = [_inventory(100, 100, 100)], [_inventory(200, 10, 200)]
    order = best_order(held, wanted)
    assert order[0] != ""
    assert peak(held[0], wanted[0], order) == 4 * 420 == wanted[0].nbytes
    others = [prefix for prefix in order if prefix]
    assert peak(held[0], wanted[0], ["", *others]) == 4 * 500  # a negative control


def test_an_inventory_survives_being_told() -> None:
    cfg = config(GPT2, train=replace(TRAIN, dtype="bf16"), tp=2, zero1=True)
    mesh = Mesh.at(mesh_shape(cfg.parallel, 4), 3, torch.device("meta"))
    held = hold(cfg, mesh, make_plan(cfg, 2))
    found = inventory(held.flat, held.optimizer)
    assert Inventory.from_text(found.to_text()) == found
    assert set(found.kinds) == {"", "optim.master.", "optim.exp_avg.", "optim.exp_avg_sq."}
