"""The split of the layers: by formula, and as measured on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import yaml

from launch import profile as profile_module
from launch.build import build, make_plan
from launch.config import Config
from launch.page import read_run
from launch.partition import formula_costs, layers_of, split
from launch.profile import Split, measure, resolve, stage_times
from megalite.errors import ConfigError
from megalite.mesh import Mesh, Transport
from megalite.parallel_config import mesh_shape
from megalite.schedule.action import Plan
from megalite.schedule.render import render_text
from megalite.schedule.simulate import simulate
from megalite.schedule.validate import validate
from model.config import PRESETS, GPTConfig
from model.costs import LayerCost, ModelCosts, Passes
from tests.launch.command import metrics, train
from tests.live import live_bytes
from tests.parity.harness import GPT2, TRAIN, batch_of, config
from tests.ranks import run_ranks

LARGE_VOCABULARY = replace(GPT2, num_layers=6, vocab_size=4000)
V2 = {"schedule": "interleaved_1f1b", "virtual_stages": 2}


def counts(cfg: Config) -> list[int]:
    return [len(layers) for layers in layers_of(cfg, make_plan(cfg, 1))]


def test_balanced_counts_embedding_and_head_as_the_layers_they_are() -> None:
    model = GPTConfig(**PRESETS["gpt2-124m"])  # type: ignore[arg-type]
    assert counts(config(model, pp=4, partition="uniform")) == [3, 3, 3, 3]
    assert counts(config(model, pp=4, partition="balanced")) == [4, 4, 4, 0]
    large = GPTConfig(**PRESETS["gpt-530b"])  # type: ignore[arg-type]
    found = counts(config(large, tp=8, pp=35, partition="balanced"))
    assert sum(found) == 105 and max(found) == 3 and found[-1] == 3
    found = counts(config(large, tp=8, pp=7, partition="balanced"))
    assert found == [15] * 7  # a fifth of a block is not worth one


def test_balanced_looks_at_ranks_where_they_have_several_stages() -> None:
    found = counts(config(LARGE_VOCABULARY, pp=2, partition="balanced", **V2))
    assert sum(found) == 6 and found[-1] == 0
    costs = formula_costs(config(LARGE_VOCABULARY, pp=2, **V2))
    block, head = costs.block.time.total, costs.head.time.total
    ours = max(block * (found[0] + found[2]), block * (found[1] + found[3]) + head)
    assert ours <= max(3 * block, 3 * block + head)


def times(*of: float) -> ModelCosts:
    """Costs of embedding, block and head in thirds of so many seconds for F, I and W."""
    return ModelCosts(*(LayerCost(Passes(t / 3, t / 3, t / 3)) for t in of))


def test_measured_costs_go_into_the_simulator() -> None:
    cfg = config(LARGE_VOCABULARY, pp=4, train=replace(TRAIN, global_batch_size=32))
    plan, costs = make_plan(cfg, 1), times(0.0, 1.0, 2.0)
    layers = split(cfg, costs, plan.rank_of)
    assert [len(r) for r in layers] == [2, 2, 2, 0]

    def step(layers: tuple[range, ...]) -> float:
        stages = [c.time for c in costs.stages(layers)]
        return simulate(
            plan,
            [t.forward for t in stages],
            [t.input_grad for t in stages],
            [t.weight_grad for t in stages],
        ).makespan

    uniform = layers_of(cfg, plan)
    assert [len(r) for r in uniform] == [1, 2, 2, 1]
    assert step(layers) == pytest.approx((16 + 3) * 2.0)
    assert step(uniform) == pytest.approx(16 * 3.0 + 1.0 + 2.0 + 2.0)


def test_a_profile_touches_nothing_that_trains() -> None:
    cfg = config(LARGE_VOCABULARY)
    training = build(cfg, Mesh.single())
    training.gradients(batch_of(cfg, 0, 0, 1))
    state = torch.get_rng_state()
    kept = [b.grad.clone() for b in training.flat.buckets]
    weights = [b.weight.clone() for b in training.flat.buckets]
    held = live_bytes() - sum(t.untyped_storage().nbytes() for t in (*kept, *weights, state))
    costs = measure(cfg, Mesh.single(), rounds=1)
    assert torch.equal(torch.get_rng_state(), state)
    for bucket, grad, weight in zip(training.flat.buckets, kept, weights, strict=True):
        assert torch.equal(bucket.grad, grad) and torch.equal(bucket.weight, weight)
    after = live_bytes() - sum(t.untyped_storage().nbytes() for t in (*kept, *weights, state))
    assert after == held, "probes are left in memory"
    for kind in (costs.block, costs.head):
        assert min(kind.time.forward, kind.time.input_grad, kind.time.weight_grad) > 0
    assert costs.head.kept_bytes > costs.block.kept_bytes > 0
    assert costs.block.num_elements == formula_costs(cfg).block.num_elements


def resolved(transport: Transport, cfg: Config) -> tuple[Config, ModelCosts, list[float]]:
    mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
    profile_module.ROUNDS, profile_module.MOST_S = 2, 0.0
    cfg, plan, found = resolve(cfg, mesh)
    assert found is not None
    training = build(cfg, mesh, plan, timed=True)
    losses = []
    for step in range(2):
        batch = batch_of(cfg, step, mesh.dp.index, mesh.dp.size)
        losses.append(float(training.step(batch, 1e-3).loss))
    measured = stage_times(training)
    assert len(measured) == training.plan.num_stages and min(min(measured)) > 0
    table = found.table(measured)
    assert table.count("predicted") == table.count("measured") == len(measured)
    mesh.close()
    return cfg, found.costs, losses


@pytest.mark.parametrize("layout", [{"pp": 4}, {"tp": 2, "pp": 2, "sequence_parallel": True}])
def test_every_rank_comes_to_the_same_measured_split(layout: dict[str, Any]) -> None:
    cfg = config(LARGE_VOCABULARY, partition="profile", **layout)
    ranks = run_ranks(4, resolved, cfg)
    first, costs, losses = ranks[0]
    assert isinstance(first.parallel.partition, tuple)
    assert sum(first.parallel.partition) == 6
    for rank in ranks[1:]:
        assert rank == (first, costs, losses)
    # What the model learns does not depend on the split.
    training = build(config(LARGE_VOCABULARY), Mesh.single())
    for step, loss in enumerate(losses):
        batch = batch_of(training.cfg, step, 0, 1)
        assert loss == pytest.approx(float(training.step(batch, 1e-3).loss), rel=1e-12)


def test_a_configured_split_is_not_measured() -> None:
    cfg = config(GPT2, pp=2, partition=(1, 3))
    assert resolve(cfg, Mesh.single()) == (cfg, make_plan(cfg, 1), None)
    with pytest.raises(AssertionError, match="measured first"):
        layers_of(config(GPT2, pp=2, partition="profile"), make_plan(cfg, 1))


def test_a_split_says_what_was_measured_and_what_is_predicted() -> None:
    found = Split(times(0.003, 0.03, 0.06), (range(0, 2), range(2, 2)))
    text = found.profile()
    assert "  embedding: 1.00, 1.00, 1.00 ms; 0.00 MB; 0" in text
    assert "  head and loss: 20.00, 20.00, 20.00 ms" in text
    assert "  stage 0 (2 blocks): predicted 21.00, 42.00 ms" in text.splitlines()
    assert "  stage 1 (0 blocks): predicted 20.00, 40.00 ms" in text.splitlines()
    assert found.table([(0.5, 1.0), (0.1, 0.2)]).endswith(
        "stage 1 (0 blocks): predicted 20.00, 40.00 ms, measured 100.00, 200.00 ms"
    )


def test_a_profile_that_training_does_not_bear_out_is_told() -> None:
    found = Split(times(0.003, 0.03, 0.06), (range(0, 2), range(2, 2)))
    fair = [(0.021, 0.042), (0.020, 0.040)]
    assert found.compare(fair) == found.table(fair)
    near = [(0.021, 0.060), (0.020, 0.030)]
    assert "warning" not in found.compare(near)
    text = found.compare([(0.021, 0.042), (0.040, 0.020)])
    assert text.startswith(found.table([(0.021, 0.042), (0.040, 0.020)]))
    assert "F of stage 1 40.00, not 20.00 ms, B of stage 1 20.00, not 40.00 ms" in text
    assert "stage 0 2" not in text and "the machine was busy" in text
    # A stage of a millionth of the others may take twice as long.
    tiny = Split(times(1e-6, 0.03, 0.06), (range(0, 0), range(0, 2)))
    measured = [(1e-6, 1e-6), (0.040, 0.080)]
    assert tiny.compare(measured) == tiny.table(measured)


def settle(
    transport: Transport, busy: Sequence[float], agreed: float
) -> tuple[list[float], int, float]:
    """Calls of 1 ms (rank 0) and 2 ms (others), every one of them longer by a share of ``busy``."""
    mesh = Mesh.create(mesh_shape(config(GPT2, pp=2).parallel, 2), transport)
    profile_module.MOST_S = agreed
    calls = 0

    def once() -> list[float]:
        nonlocal calls
        calls += 1
        extra = busy[calls % len(busy)] if mesh.rank == 0 else 0.0
        return [1e-3 * (1 + mesh.rank) * (1 + extra)]

    found = profile_module._settled(once, mesh, 5)
    low = median(1e-3 * (1 + busy[i % len(busy)]) for i in range(1, 6)) if mesh.rank == 0 else 2e-3
    mesh.close()
    return found, calls, low


def test_a_busy_machine_is_asked_again_until_its_least_times_agree() -> None:
    quiet = run_ranks(2, settle, [0.0, 0.01], 60.0)
    assert [calls for _, calls, _ in quiet] == [5, 5]
    # Five calls in seven lose a whole time slice, and the first five hold but one of the others.
    busy = [0.02, 4.0, 3.0, 5.0, 0.01, 4.5, 3.5]
    (mine, calls, five), (theirs, same, _) = run_ranks(2, settle, busy, 60.0)
    assert calls == same > 5 and theirs == [2e-3]
    assert mine[0] == pytest.approx(1e-3, rel=0.05) and five > 3e-3
    # Time is bounded, even if they never agree.
    endless = run_ranks(2, settle, [0.0, *(1.0 + i for i in range(999))], 0.0)
    assert [calls for _, calls, _ in endless] == [5, 5]


def test_a_run_by_profile_prints_its_times_and_writes_its_split(tmp_path: Path) -> None:
    layout = ["--parallel.pp", "2", "--parallel.partition", "profile"]
    done = train(2, tmp_path, *layout, "--train.steps", "3")  # fewer than TIMED_STEPS
    assert done.code == 0, done.output
    assert "profile of a microbatch and tp rank" in done.output
    assert done.output.count("predicted") == 4 and done.output.count(", measured ") == 2
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())["parallel"]["partition"]
    assert len(saved) == 2 and sum(saved) == 4


def test_a_run_by_auto_plans_for_what_was_measured_and_writes_its_plan(tmp_path: Path) -> None:
    layout = ["--parallel.pp", "2", "--parallel.virtual_stages", "2", "--train.steps", "6"]
    done = train(2, tmp_path / "auto", *layout, "--parallel.schedule", "auto")
    assert done.code == 0, done.output
    assert "profile of a microbatch and tp rank" in done.output
    plan = tmp_path / "auto" / "schedule.txt"
    again = train(2, tmp_path / "again", *layout, "--parallel.schedule", f"file:{plan}")
    assert again.code == 0, again.output
    assert (tmp_path / "again" / "schedule.txt").read_text() == plan.read_text()
    assert train(1, tmp_path / "alone", "--train.steps", "6").code == 0
    lines, same, alone = (metrics(tmp_path / run) for run in ("auto", "again", "alone"))
    for a, b, c in zip(lines, same, alone, strict=True):
        assert a["loss"] == b["loss"] == pytest.approx(c["loss"], rel=1e-10)
        assert a["grad_norm"] == pytest.approx(c["grad_norm"], rel=1e-10)
    drawn = read_run(tmp_path / "auto").layout
    assert drawn is not None and drawn.plan.name == "auto"
    assert render_text(drawn.plan.compute_only()) == plan.read_text()
    plan.write_text("rank 0: 0F0\n")
    with pytest.raises(ConfigError, match="Restore schedule.txt"):
        read_run(tmp_path / "auto")


def planned(transport: Transport, cfg: Config) -> list[tuple[Any, Plan]]:
    """With memory for as much as 1F1B, and for one microbatch at a time."""
    mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
    profile_module.ROUNDS, profile_module.MOST_S = 2, 0.0
    little = replace(cfg, parallel=replace(cfg.parallel, schedule_memory=1.0))
    found = [resolve(c, mesh)[:2] for c in (cfg, little)]
    comm = profile_module.message_seconds(cfg, mesh)
    mesh.close()
    assert 0 < comm < 1
    return [(c.parallel.partition, plan) for c, plan in found]


def test_every_rank_comes_to_the_same_plan_and_keeps_the_memory() -> None:
    cfg = config(LARGE_VOCABULARY, partition="balanced", schedule="auto", pp=2, tp=2)
    ranks = run_ranks(4, planned, cfg)
    (counts, plan), (_, little) = ranks[0]
    assert len(counts) == 2 and sum(counts) == 6
    assert validate(plan).peak_in_flight[0] <= 2 and max(validate(little).peak_in_flight) == 1
    for rank in ranks[1:]:
        assert rank == ranks[0]
