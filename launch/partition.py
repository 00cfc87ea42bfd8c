"""Which stage gets which layers: evenly, by formula, as measured, or as listed."""

from __future__ import annotations

from collections.abc import Sequence

from launch.config import Config
from megalite.schedule.action import Plan
from megalite.schedule.placement import place_layers
from model.costs import ModelCosts, model_work

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}


def layers_of(cfg: Config, plan: Plan) -> tuple[range, ...]:
    """Stage -> its layers. A partition by profile must have been resolved before."""
    partition = cfg.parallel.partition
    if partition == "balanced":
        return split(cfg, formula_costs(cfg), plan.rank_of)
    assert partition != "profile", "a profile has to be measured first"
    return place_layers([1.0] * cfg.model.num_layers, plan.num_stages, mode=partition)


def formula_costs(cfg: Config) -> ModelCosts:
    """Of this configuration's microbatches, in operations."""
    return model_work(
        cfg.model,
        cfg.train.micro_batch_size,
        cfg.parallel.tp,
        element_bytes=ELEMENT_BYTES[cfg.train.dtype],
        sequence_parallel=cfg.parallel.sequence_parallel,
        recompute=cfg.parallel.recompute,
    ).costs()


def split(cfg: Config, costs: ModelCosts, rank_of: Sequence[int]) -> tuple[range, ...]:
    """The layers of each stage, whose rank is given, so that the dearest rank costs least."""
    return place_layers(
        [costs.block.time.total] * cfg.model.num_layers,
        len(rank_of),
        first_extra=costs.embedding.time.total,
        last_extra=costs.head.time.total,
        mode="balanced",
        rank_of=rank_of,
    )
