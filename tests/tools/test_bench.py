from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from launch.build import build
from launch.figures import flops_per_token
from megalite.mesh import Mesh, Transport
from megalite.mesh_shape import MeshShape
from megalite.schedule.action import Plan
from megalite.schedule.generators import SCHEDULES, build_schedule
from megalite.schedule.lower import lower
from tests.parity.harness import GPT2, assemble, config, parts
from tests.ranks import run_ranks
from tools import bench, benches
from tools.benches import gpt, gpu, layouts, pipeline, size, sleep
from tools.benches import ranks as bench_ranks
from tools.benches.clock import slowest, time_in_turn
from tools.benches.plain import PlainGPT
from tools.benches.rows import Goal, Row, Sample, to_text

AHEAD = Row("a, ms", Sample((1.0, 2.0, 1.5)), Sample((3.0, 3.5, 3.0)), Goal("at least", 1.5), True)
BEHIND = replace(AHEAD, what="b, ms", goal=Goal("at least", 2.5))
LEVEL = Row("c, ms", Sample((1.0, 1.1)), Sample((1.0, 1.05)), Goal("at most", 1.03))


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Row]]:
    """Benches without timings; what each reports can be changed."""
    reports = {"good": [AHEAD, LEVEL], "bad": [AHEAD, BEHIND]}
    for name, rows in reports.items():
        module = ModuleType(f"stub_{name}")
        module.run = lambda rows=rows: rows  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(benches, "BENCHES", {name: f"stub_{name}" for name in reports})
    return reports


# --- the command -------------------------------------------------------------------------------


def test_the_json_has_the_promised_form(
    stubs: dict[str, list[Row]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["good", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True and set(found) == {"ok", "rows"}
    first, second = found["rows"]
    assert first == {
        "what": "a, ms",
        "ours": 1.5,
        "peer": 3.0,
        "ratio": 2.0,
        "goal": ">= 1.5",
        "range": {"ours": [1.0, 2.0], "peer": [3.0, 3.5]},
    }
    assert second["ratio"] == pytest.approx(1.05 / 1.025) and second["goal"] == "<= 1.03"


def test_a_missed_goal_is_said_in_json_text_and_exit_code(
    stubs: dict[str, list[Row]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["bad", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert bench.main(["bad"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[1:3]] == ["met", "missed"]


def test_all_runs_every_bench(
    stubs: dict[str, list[Row]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["all", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["what"][0] for row in rows] == ["a", "c", "a", "b"]


def test_an_unknown_name_is_one_error_with_the_nearest_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench.main(["pipelin"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert "'pipelin'" in err and "Did you mean pipeline?" in err and "all" in err


# --- rows --------------------------------------------------------------------------------------


def test_overlapping_ranges_are_a_tie_and_no_win() -> None:
    noisy = replace(AHEAD, ours=Sample((1.0, 1.5, 3.2)))
    assert noisy.ratio == AHEAD.ratio >= 1.5
    assert (AHEAD.verdict, AHEAD.ok) == ("met", True)
    assert (noisy.verdict, noisy.ok) == ("tie", False)


def test_a_limit_from_above_is_met_by_medians_and_missed_by_them() -> None:
    assert LEVEL.ours.overlaps(LEVEL.peer) and LEVEL.verdict == "met"
    assert replace(LEVEL, goal=Goal("at most", 1.02)).verdict == "missed"


def test_a_row_without_a_goal_is_only_shown() -> None:
    row = replace(BEHIND, goal=None)
    assert row.ok and row.verdict == "" and row.to_json()["goal"] is None


def test_the_table_is_aligned() -> None:
    lines = to_text([AHEAD, replace(BEHIND, what="longer, tokens/s", goal=None)]).splitlines()
    assert len(lines) == 3 and len(set(map(str.rstrip, lines))) == 3
    at = lines[0].index("ours") + len("ours")
    assert [line[:at].split()[-1] for line in lines] == ["ours", "1.5", "1.5"]


def test_a_repetition_takes_as_long_as_its_slowest_rank() -> None:
    ranks = [{"x": [1.0, 5.0], "y": [1.0, 1.0]}, {"x": [2.0, 3.0], "y": [0.5, 2.0]}]
    assert slowest(ranks) == {"x": Sample((2.0, 5.0)), "y": Sample((1.0, 2.0))}


def stub_race(pp: int) -> pipeline.Race:
    """Ours as fast as theory, torch 10 % behind."""
    level = pipeline.MICROBATCHES * 0.030
    ours = {plan.name: pipeline.theory(plan) for plan in pipeline.plans(pp)}
    return pipeline.Race(
        {name: Sample((t,)) for name, t in ours.items()},
        {name: Sample((1.1 * t,)) for name, t in ours.items() if name in sleep.PEERS},
        {chunks: Sample((level,)) for chunks in (1, 2)},
    )


@pytest.mark.parametrize("pp", pipeline.RACES)
def test_the_rows_of_a_race_are_beside_theory_and_beside_torch(pp: int) -> None:
    rows = {row.what: row for row in pipeline.sleep_rows(pp, stub_race(pp))}
    beside = rows[f"1f1b pp {pp}, ms: beside theory x floor"]
    assert beside.ratio == pytest.approx(1.0) and str(beside.goal) == "<= 1.03"
    assert beside.ours.median == pytest.approx(480 + 30 * (pp - 1))
    torch = rows[f"1f1b pp {pp}, ms: beside torch"]
    assert torch.ratio == pytest.approx(1 / 1.1) and str(torch.goal) == "<= 1.02"
    for name in set(pipeline.ZERO_BUBBLE) & set(SCHEDULES):
        row = rows[f"{name} pp {pp}, ms: beside torch 1f1b"]
        assert row.inverse and str(row.goal) == ">= 1.08"


def test_the_rows_of_real_compute_are_rates_beside_one_process() -> None:
    seconds = {"one": 2.0, "two": 2.1, "ours 1f1b": 1.0, "torch 1f1b": 1.25}
    rows = pipeline.gpt_rows({name: Sample((s,)) for name, s in seconds.items()})
    ratio = {row.what: row.ratio for row in rows}
    assert ratio == {
        "GPT two processes, tokens/s: beside one": pytest.approx(2 * 2.0 / 2.1),
        "GPT torch 1f1b pp 2, tokens/s: beside one process": pytest.approx(1.6),
        "GPT 1f1b pp 2, tokens/s: beside one process": pytest.approx(2.0),
        "GPT 1f1b pp 2, tokens/s: beside torch 1f1b": pytest.approx(1.25),
    }


def test_sizes_are_seconds_beside_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    small = config(GPT2, tp=2, pp=2, virtual_stages=2, schedule=size.SCHEDULE)
    monkeypatch.setattr(size, "PLAN", (4, 8, 3))
    monkeypatch.setattr(size, "LARGE", small)
    checked, whole, built = size.run()
    assert 0 < checked.ours.median < whole.ours.median
    assert len(built.ours.values) == 4, "every rank is built"
    assert [row.peer.median for row in (checked, whole, built)] == [10, 15, 2]
    late = size.limited("x", [16.0], 15.0)
    assert [row.verdict for row in (whole, built, late)] == ["met", "met", "missed"]


def test_ranks_run_in_real_time_only_where_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        os, "sched_setscheduler", lambda pid, policy, _: asked.append((pid, policy))
    )
    assert bench_ranks.schedule_in_real_time() and asked == [(0, os.SCHED_RR)]

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert not bench_ranks.schedule_in_real_time()


def test_without_a_gpu_its_bench_says_so_and_is_not_ok(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert bench.main(["gpu", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == {"ok": False, "rows": []} and gpu.NO_GPU in err


def test_the_rate_on_a_gpu_is_the_models_flops_by_the_peak() -> None:
    case = gpu.CASES[1]
    flops = flops_per_token(case.model) * case.tokens
    found = {"ours": Sample((flops / 600e12,)), "plain": Sample((flops / 400e12,))}
    rows = {r.what.partition(": ")[2]: r for r in gpu.case_rows(case, found, Sample((8e14,)), 1e15)}
    assert rows["beside plain PyTorch"].ratio == pytest.approx(1.5)
    assert rows["beside the matrix product"].ratio == pytest.approx(0.75)
    assert rows["MFU of the peak"].ratio == pytest.approx(0.6)
    assert rows["MFU of the peak"].verdict == "met"
    assert rows["plain PyTorch's MFU"].ratio == pytest.approx(0.4)


def global_names(plain: str) -> list[str]:
    """What a parameter of the plain model is called in ours."""
    if plain.startswith(("tokens", "positions")):
        return [f"embedding.{plain}"]
    if plain.startswith("norm."):
        return [f"final_{plain}"]
    _, layer, module, kind = plain.split(".")
    if module == "qkv":
        return [f"layers.{layer}.attention.{part}.{kind}" for part in "qkv"]
    inside = {"out": "attention.out", "up": "mlp.up", "down": "mlp.down"}.get(module, module)
    return [f"layers.{layer}.{inside}.{kind}"]


def test_the_plain_model_is_the_same_model() -> None:
    training, data = build(gpt.config(TINY, gpt.ALONE), Mesh.single()), gpt.batch(TINY)
    ours = assemble([parts(training.flat.weight_pieces())])
    model = PlainGPT(TINY)
    assert sum(p.numel() for p in model.parameters()) == TINY.num_parameters()
    assert data.targets is not None
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.cat([ours[n] for n in global_names(name)]))
        loss = float(model(data.tokens.flatten(0, 1), data.targets.flatten(0, 1)))
    assert loss == pytest.approx(float(training.step(data, 0.0).loss), rel=1e-6)


def raced_layouts(transport: Transport, work: layouts.Work) -> list[dict[str, list[float]]]:
    return [layouts.race_dp(transport, work, 1), layouts.race_tp(transport, work, 1)]


def test_layouts_are_raced_beside_plain_pytorch_ddp_and_fsdp() -> None:
    work = layouts.Work(TINY, 2, 1)
    dp, tp = (
        slowest(list(found)) for found in zip(*run_ranks(2, raced_layouts, work), strict=True)
    )
    rows = [*layouts.dp_rows(work, dp), *layouts.tp_rows(work, tp)]
    goals = [str(row.goal) for row in rows if row.goal]
    assert goals == [">= 0.98", ">= 0.92", ">= 0.92", ">= 1.6", ">= 1.6"]
    assert {"DDP dp2", "FSDP2 dp2", "plain one", "plain two"} <= set(dp)


# --- what is timed -----------------------------------------------------------------------------


def sleeps(transport: Transport, plans: list[Plan]) -> list[dict[str, Counter[float]]]:
    """The naps of one step (after a first one) by engine, for each plan."""
    mesh = Mesh.create(MeshShape(pp=transport.world_size), transport)
    naps: list[float] = []
    sleep.time.sleep = naps.append  # type: ignore[assignment]  # this process ends with the body
    times = sleep.Times(1.0, 10.0, 100.0)
    found = []
    for plan in plans:
        engines = {"ours": sleep.ours, "torch": sleep.torch_step}
        taken = {}
        for name, make in engines.items():
            step = make(mesh, plan, times)
            step()
            naps.clear()
            step()
            taken[name] = Counter(naps)
        found.append(taken)
    mesh.close()
    return found


def test_both_engines_sleep_every_f_i_and_w_of_a_step_once() -> None:
    plans = [
        lower(build_schedule(name, 2, 4, pipeline.CHUNKS.get(name, 1)))
        for name in sleep.PEERS
        if name in SCHEDULES
    ]
    assert len(plans) >= 4
    for rank in run_ranks(2, sleeps, plans):
        for plan, taken in zip(plans, rank, strict=True):
            chunks = pipeline.CHUNKS.get(plan.name, 1)
            due = Counter({t / chunks: 4 * chunks for t in (1.0, 10.0, 100.0)})
            assert taken == {"ours": due, "torch": due}, plan.name


TINY = replace(gpt.MODEL, num_layers=8, hidden_size=32, seq_length=16, vocab_size=64)


def engines(transport: Transport) -> list[tuple[float, float]]:
    """Loss and gradient norm of a step by our executor and by torch's."""
    mesh = Mesh.create(MeshShape(pp=2), transport)
    data, found = gpt.batch(TINY), []
    for make in (build_ours, gpt.torch_training):
        training = make(TINY, mesh)
        training.gradients(data)  # torch learns the shapes by running the stage once
        totals = training.gradients(data)
        found.append((float(totals.loss), float(totals.grad_norm)))
        del training
    mesh.close()
    return found


def build_ours(model: Any, mesh: Mesh) -> Any:
    return build(gpt.config(model, gpt.LAYOUTS["1f1b"]), mesh)


def test_torch_takes_the_same_step_on_the_same_blocks() -> None:
    for ours, theirs in run_ranks(2, engines):
        assert ours[1] > 0
        assert theirs == pytest.approx(ours, rel=1e-5)


def raced(transport: Transport, plans: list[Plan]) -> dict[str, list[float]]:
    pipeline.TIMES, pipeline.REPETITIONS = sleep.Times(1e-4, 1e-4, 1e-4), 2
    return pipeline._race(transport, plans)


def test_a_race_times_every_contestant_in_every_repetition() -> None:
    plans = [lower(build_schedule(name, 2, pipeline.MICROBATCHES)) for name in ("gpipe", "1f1b")]
    for rank in run_ranks(2, raced, plans):
        wanted = {f"{who} {n}" for who in ("ours", "torch") for n in ("gpipe", "1f1b")}
        assert set(rank) == wanted | {"floor 1", "floor 2"}
        assert all(len(values) == 2 and min(values) > 0 for values in rank.values())


def race_gpt(transport: Transport) -> dict[str, list[float]]:
    return gpt.race(transport, TINY, 1)


def test_real_compute_times_every_contestant() -> None:
    for rank in run_ranks(2, race_gpt):
        assert {"one", "two", "ours 1f1b", "torch 1f1b"} <= set(rank)


def turns(transport: Transport) -> list[str]:
    mesh = Mesh.create(MeshShape(pp=2), transport)
    order: list[str] = []
    time_in_turn(mesh.world, {n: (lambda n=n: order.append(n)) for n in "abc"}, 2)
    mesh.close()
    return order


def test_repetitions_are_interleaved_and_begin_with_another_contestant_each() -> None:
    first, second = run_ranks(2, turns)
    assert first == second == [*"cab", *"abc", *"bca"]


# --- ranks -------------------------------------------------------------------------------------


def told(transport: Transport, bad: int) -> int:
    if transport.rank == bad:
        raise ValueError("no more")
    return transport.rank


def benched(rank: int) -> list[Any]:
    """Ranks below a process that never computed, as a bench has them."""
    found: list[Any] = [bench_ranks.run_ranks(2, told, -1)]
    start = time.monotonic()
    try:
        bench_ranks.run_ranks(2, told, 1)
    except bench_ranks.BenchError as error:
        found.append(str(error))
    return [*found, time.monotonic() - start < 30]


def test_ranks_give_their_results_and_the_first_error_ends_them() -> None:
    ((results, error, soon),) = run_ranks(1, benched, transport="none")
    assert results == [0, 1] and soon
    assert error.startswith("rank 1:") and "ValueError: no more" in error
