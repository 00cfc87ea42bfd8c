"""The interpreter: what it keeps, what it frees, and plans with I and W, V placement and ties."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from launch import build as build_module
from launch.build import Training, build
from launch.config import Config
from megalite.mesh import DONE, Axis, Mesh, Transport, Work
from megalite.mesh_shape import MeshShape
from megalite.parallel_config import mesh_shape
from megalite.pipeline.executor import Executor
from megalite.pipeline.p2p import Kind
from megalite.pipeline.stage import Stage
from megalite.schedule.action import Action, Plan
from megalite.schedule.lower import lower
from megalite.schedule.validate import validate
from model.config import GPTConfig
from tests.counting import CountingTransport
from tests.grid import hold
from tests.live import live_bytes
from tests.parity.harness import GPT2, LLAMA, TRAIN, assemble, batch_of, config, parts, worst
from tests.ranks import run_ranks


def plan_of(rank_of: tuple[int, ...], num_microbatches: int, *ranks: str) -> Plan:
    """A plan from the text of each rank's actions, as written."""
    actions = tuple(tuple(Action.parse(a) for a in text.split()) for text in ranks)
    return Plan("by hand", num_microbatches, rank_of, actions)


# --- what is kept from step to step ------------------------------------------------------------


@dataclass
class Kept:
    """Of one rank, after each of three steps and an evaluation."""

    buffers: list[int] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    most_outputs: int = 0


def count_outputs(training: Training, kept: Kept) -> None:
    """Note the largest number of outputs of the first stage that were in memory at once."""
    first = training.executor.stages[0]
    forward, made = first.forward, list[StorageWeakRef]()

    def watched(m: int, x: Tensor, targets: Tensor | None = None, rows: Any = None) -> Tensor:
        out = forward(m, x, targets, rows)
        made.append(StorageWeakRef(out.untyped_storage()))
        kept.most_outputs = max(kept.most_outputs, sum(not ref.expired() for ref in made))
        return out

    first.forward = watched  # type: ignore[assignment, method-assign]


def keep(transport: Transport, layouts: list[tuple[dict[str, Any], int]]) -> list[Kept]:
    found = []
    for layout, num_microbatches in layouts:
        counting = CountingTransport(transport)
        train = replace(TRAIN, global_batch_size=num_microbatches, micro_batch_size=1)
        cfg = config(GPT2, train=train, **layout)
        mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), counting)
        training = build(cfg, mesh)
        kept = Kept()
        if 0 in training.gpt:
            count_outputs(training, kept)
        for step in range(4):
            batch = batch_of(cfg, step, 0, 1)
            if step < 3:
                training.step(batch, 1e-3)
            else:
                training.losses(batch)
            kept.buffers.append(sum(map(len, training.executor._free.values())))
            kept.num_bytes.append(live_bytes())
            kept.groups.append(counting.num_groups)
            kept.live.append(sum(s.live_microbatches for s in training.executor.stages.values()))
        found.append(kept)
        del training
        mesh.close()
    return found


V2 = {"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}
LAYOUTS: list[tuple[dict[str, Any], int]] = [
    ({"pp": 2}, 6),
    ({"pp": 2}, 12),
    (V2, 6),
    ({"pp": 2, "schedule": "gpipe"}, 6),
]


@pytest.fixture(scope="module")
def kept() -> list[list[Kept]]:
    """Rank, then layout."""
    return run_ranks(2, keep, LAYOUTS)


def test_later_steps_and_evaluations_need_no_further_memory(kept: list[list[Kept]]) -> None:
    for rank in kept:
        for layout in rank:
            assert layout.buffers[0] > 0
            assert len(set(layout.buffers)) == 1, layout
            # Numbers of a step may come and go; a message is 4 KiB.
            assert max(layout.num_bytes[1:]) <= layout.num_bytes[0] + 256, layout
            assert layout.live == [0] * 4
            assert len(set(layout.groups)) == 1, "groups are made by steps"


def test_buffers_and_outputs_are_as_many_as_are_in_flight_and_not_as_microbatches(
    kept: list[list[Kept]],
) -> None:
    for rank in kept:
        few, many, _, gpipe = rank
        assert few.buffers == many.buffers
        assert few.buffers[0] <= 3
        assert few.most_outputs == many.most_outputs <= 3
    # gpipe has every microbatch in flight: there is a difference to see.
    assert kept[1][3].buffers[0] >= 6


# --- plans by hand -----------------------------------------------------------------------------

ZB = plan_of(
    (0, 1),
    3,
    "0F0 0F1 0I0 0F2 0I1 0I2 0W0 0W1 0W2",
    "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
)
V_SHAPE = plan_of(
    (0, 1, 1, 0),
    3,
    "0F0 0F1 3F0 3I0 3F1 3I1 0F2 3W0 3F2 3I2 3W1 3W2 0B0 0I1 0I2 0W2 0W1",
    "1F0 2F0 1F1 2F1 2I0 1I0 2I1 1F2 2F2 1I1 2B2 1B2 2W0 1W0 2W1 1W1",
)


def gradients(cfg: Config, mesh: Mesh) -> tuple[float, list[Any]]:
    training = build(cfg, mesh)
    batch = batch_of(cfg, 0, mesh.dp.index, mesh.dp.size)
    training.gradients(batch)
    totals = training.gradients(batch)  # and sees nothing of the first
    owned = parts(training.flat.grad_pieces()) if mesh.dp.index == 0 else []
    return float(totals.loss), owned


def by_hand(
    transport: Transport, cases: list[tuple[Config, Plan]]
) -> list[tuple[float, list[Any]]]:
    found = []
    for cfg, plan in cases:
        mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
        # This process ends with the body.
        build_module.make_plan = lambda *_, plan=plan: plan
        found.append(gradients(cfg, mesh))
        mesh.close()
    return found


def three(model: GPTConfig, dp: int, **layout: Any) -> Config:
    train = replace(TRAIN, global_batch_size=3 * dp, micro_batch_size=1)
    return config(model, train=train, **layout)


def test_plans_with_i_and_w_give_the_gradients_of_one_process() -> None:
    plans = [lower(ZB), lower(V_SHAPE)]
    for plan in plans:
        validate(plan)
    untied_v = replace(GPT2, tied_embeddings=False)
    models = [(GPT2, plans[0]), (LLAMA, plans[0]), (GPT2, plans[1]), (untied_v, plans[1])]
    cases = [(three(model, 2, pp=2), plan) for model, plan in models]
    ranks = run_ranks(4, by_hand, cases)
    for n, (cfg, _) in enumerate(cases):
        alone = replace(cfg, parallel=replace(cfg.parallel, pp=1))
        loss, owned = gradients(alone, Mesh.single())
        assert [rank[n][0] for rank in ranks] == [pytest.approx(loss, rel=1e-12)] * 4
        got, expected = assemble(rank[n][1] for rank in ranks), assemble([owned])
        size, where = worst(got, expected)
        assert size < 1e-10, f"{where} differs by {size:.1e} in case {n}"


# --- what must not be left ---------------------------------------------------------------------


class Silent:
    """Channels on which every message has already arrived."""

    def send(self, kind: Kind, receiver: int, tensor: Tensor) -> Work:
        return DONE

    def recv(self, kind: Kind, sender: int, tensor: Tensor) -> Work:
        tensor.zero_()
        return DONE


def run_alone(plan: Plan, pp: int) -> None:
    """Rank 0 of a plan, without the others."""
    num_stages = plan.num_stages
    layout = {"pp": pp} if num_stages == pp else {"pp": pp, **V2}
    cfg = config(LLAMA, train=replace(TRAIN, global_batch_size=2), **layout)
    (held, *_) = hold(cfg, pp)
    stages = {
        s: Stage(module, s, num_stages, module.layout.sink, torch.float64, torch.device("cpu"))
        for s, module in held.gpt.items()
    }
    executor = Executor(0, stages, Silent())  # type: ignore[arg-type]
    executor.run(plan, batch_of(cfg, 0, 0, 1))


MESSAGES = "0F0 0SEND_F0 0RECV_B0 0WAIT_F0 0B0"
LEFT = {
    "a backward pass": "0F0 0SEND_F0 0WAIT_F0",
    "an output that is not sent": "0F0 0RECV_B0 0B0",
    "a send that is not waited for": "0F0 0SEND_F0 0RECV_B0 0B0",
    "a message that is not taken": "0F0 0SEND_F0 0WAIT_F0 0RECV_B0",
    "a W": "0F0 0SEND_F0 0WAIT_F0 0RECV_B0 0I0",
}


def test_a_complete_list_leaves_nothing() -> None:
    run_alone(plan_of((0, 1), 1, MESSAGES, ""), 2)
    run_alone(plan_of((0, 1), 1, MESSAGES.replace("0B0", "0I0 0W0"), ""), 2)
    run_alone(plan_of((0,), 1, "0F0 0B0"), 1)


@pytest.mark.parametrize("what", LEFT)
def test_what_is_left_at_the_end_of_a_step_is_an_error(what: str) -> None:
    with pytest.raises(AssertionError, match="left at the end of the step"):
        run_alone(plan_of((0, 1), 1, LEFT[what], ""), 2)


def test_a_message_between_two_stages_of_a_rank_must_be_taken_too() -> None:
    cfg = config(LLAMA, train=replace(TRAIN, global_batch_size=2))
    (held,) = hold(cfg, 1)
    module = held.gpt[0]
    stages = {
        s: Stage(module, s, 2, module.layout.sink, torch.float64, torch.device("cpu"))
        for s in (0, 1)
    }
    module.first, module.head = True, None  # so that it gives hidden states
    executor = Executor(0, stages, Silent())  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"'F', \(1, 0\)"):
        executor.run(plan_of((0, 0), 1, "0F0"), batch_of(cfg, 0, 0, 1))


def test_a_result_that_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError):
        run_alone(plan_of((0, 1), 1, "0F0 0SEND_F0 0WAIT_F0 0B0", ""), 2)


def test_only_the_last_stage_has_a_loss() -> None:
    for rank, held in enumerate(hold(config(LLAMA, pp=2), 2)):
        (index,) = held.gpt
        assert index == rank
        module = held.gpt[index]
        assert (module.head is None) is (rank == 0)
    assert Axis("pp").size == MeshShape().pp == 1
