"""The same layouts where gloo's leniency ends: a transport and a device with NCCL's rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launch.build import Training
from launch.config import Config
from megalite.mesh import Mesh, Transport
from megalite.parallel_config import mesh_shape
from model.config import GPTConfig
from tests.nccl_rules import NcclRulesTransport
from tests.parity.harness import TRAIN, config, differences, join, serial, train
from tests.parity.test_layouts import LAYOUTS, TOLERANCE, name_of
from tests.ranks import RankError, run_ranks

ONE_STEP = replace(TRAIN, steps=1)


def read_in_the_step(training: Training) -> None:
    """A fault that gloo does not mind: the host looks at the loss inside the step."""
    run = training.executor.run

    def curious(*args: Any) -> Any:
        loss = run(*args)
        return loss if loss is None or float(loss) > 0 else loss * 0

    training.executor.run = curious  # type: ignore[method-assign]


def under_rules(transport: Transport, cfg: Config, curious: bool) -> dict[str, Any]:
    assert isinstance(transport, NcclRulesTransport)
    mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
    try:
        return train(cfg, mesh, read_in_the_step if curious else None, transport.device_rules)
    finally:
        mesh.close()


@pytest.mark.parametrize("case", LAYOUTS, ids=name_of)
def test_a_layout_keeps_the_rules_of_nccl(case: tuple[int, GPTConfig, dict[str, Any]]) -> None:
    ranks, model, layout = case
    cfg = config(model, train=ONE_STEP, **layout)
    got = join(run_ranks(ranks, under_rules, cfg, False, transport="nccl_rules"))
    for what, (size, where) in differences(got, serial(model, ONE_STEP)).items():
        assert size <= TOLERANCE[what], f"{what} differs by {size:.1e} at {where}"


def test_a_host_read_in_the_step_is_an_error() -> None:
    cfg = config(train=ONE_STEP, pp=2)
    with pytest.raises(RankError, match="HostReadError"):
        run_ranks(2, under_rules, cfg, True, transport="nccl_rules")
