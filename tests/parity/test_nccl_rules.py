"""What gloo forgives and NCCL would not is seen (test_matrix.py has the layouts)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launch.build import Training
from launch.config import Config
from megalite.mesh import Mesh, Transport
from megalite.parallel_config import mesh_shape
from tests.nccl_rules import NcclRulesTransport
from tests.parity.harness import TRAIN, Fault, config, train
from tests.ranks import RankError, run_ranks

ONE_STEP = replace(TRAIN, steps=1)
TWO_STEPS = replace(TRAIN, steps=2)  # the weights of the first are gathered during the second


def read_in_the_step(training: Training) -> None:
    """A fault that gloo does not mind: the host looks at the loss inside the step."""
    run = training.executor.run

    def curious(*args: Any) -> Any:
        loss = run(*args)
        return loss if loss is None or float(loss) > 0 else loss * 0

    training.executor.run = curious  # type: ignore[method-assign]


def no_wait_for_weights(training: Training) -> None:
    """The forward does not wait for weights that are under way; the end of the run does."""
    for gpt in training.gpt.values():
        for module in gpt.modules():
            module._forward_pre_hooks.clear()


def under_rules(transport: Transport, cfg: Config, fault: Fault | None = None) -> dict[str, Any]:
    assert isinstance(transport, NcclRulesTransport)
    mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
    try:
        return train(cfg, mesh, fault, transport.device_rules)
    finally:
        mesh.close()


def test_a_host_read_in_the_step_is_an_error() -> None:
    cfg = config(train=ONE_STEP, pp=2)
    with pytest.raises(RankError, match="HostReadError"):
        run_ranks(2, under_rules, cfg, read_in_the_step, transport="nccl_rules")


@pytest.mark.parametrize("layout", [{}, {"pp": 2}], ids=["dp", "dp-pp"])
def test_a_forward_that_does_not_wait_for_its_weights_is_an_error(layout: dict[str, Any]) -> None:
    ranks = 2 * layout.get("pp", 1)
    cfg = config(train=TWO_STEPS, zero1=True, **layout)
    with pytest.raises(RankError, match="BorrowedError: .* reads the buffer of all_gather"):
        run_ranks(ranks, under_rules, cfg, no_wait_for_weights, transport="nccl_rules")
