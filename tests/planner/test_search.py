from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.errors import ConfigError
from megalite.planner.advice import advice, bubble_warning, sensitivity
from megalite.planner.candidates import Group, Request
from megalite.planner.estimate import Estimator, Machine
from megalite.planner.hardware import find_hardware
from megalite.planner.search import Ranking, _Search, rank
from megalite.planner.shape import ModelShape

A100 = Machine(find_hardware("a100-80"))
SMALL = ModelShape(8, 2048, 16, 1024, 50304)
GPT3 = ModelShape(96, 12288, 96, 2048, 51200)


def keys(r: Ranking) -> list[tuple[object, ...]]:
    return [(round(e.step_s, 9), e.job.micro_batch) for e in r.best]


def test_the_search_finds_what_exhaustive_simulation_finds_at_64_gpus() -> None:
    request = Request(
        SMALL,
        A100,
        64,
        64,
        best=4,
        schedules=("1f1b", "interleaved_1f1b", "zb_h1", "zb_v"),
    )
    found, whole = rank(request), rank(request, exhaustive=True)
    assert keys(found) == keys(whole)[:4]
    assert found.num_simulated < whole.num_simulated / 5
    assert found.num_simulated <= request.best + 2  # the others' computations alone are slower
    assert whole.best[-1].step_s > 2 * whole.best[0].step_s  # there was something to choose
    small = rank(replace(request, memory_bytes=4e9))
    assert small.best[0].step_s > found.best[0].step_s
    assert all(e.peak_bytes <= 4e9 for e in small.best)


def test_bounds_are_below_every_simulated_time() -> None:
    request = Request(SMALL, A100, 16, 64, schedules=("1f1b", "gpipe", "zb_h2", "v_half"))
    whole = rank(request, exhaustive=True)
    search = _Search(request)
    groups = {g: search.group_bound(g) for g in search.candidates.groups()}
    for e in whole.best:
        found, p = Estimator(e.job, A100), e.job.parallel
        bounds = groups[
            Group(
                p.tp, p.pp, e.job.mesh.dp, e.job.micro_batch, p.recompute,
                p.sequence_parallel, p.zero1,
            )
        ], found.lower_bound, found.earliest_s  # fmt: skip
        assert max(bounds) <= e.step_s * (1 + 1e-9)
        assert min(bounds) > 0.2 * e.step_s
        assert found.least_bytes <= found.peak_bytes


def test_every_refusal_has_its_reason() -> None:
    found = rank(Request(GPT3, A100, 1024, 96, best=1, schedules=("1f1b",)))
    reasons = {x.reason: x for x in found.refused}
    assert reasons["does not fit the memory"].count > 0
    assert "more replicas than sequences in a batch" in reasons
    assert "num_heads=96" in reasons["the model cannot be cut into tp parts"].example


def test_plain_data_parallelism_is_advised_where_it_does() -> None:
    found = rank(Request(replace(SMALL, layers=4), A100, 8, 256, best=1, schedules=("1f1b",)))
    assert any("plain data parallelism" in line for line in advice(found))
    large = rank(Request(GPT3, A100, 512, 512, best=1, schedules=("1f1b",)))
    assert not any("plain data parallelism" in line for line in advice(large))


def test_plain_data_parallelism_that_was_ruled_out_is_said_to_be_faster() -> None:
    fixed: dict[str, object] = {"tp": 4}
    found = rank(Request(replace(SMALL, layers=4), A100, 8, 256, best=1, fixed=fixed))
    assert any("faster, if it were not ruled out" in line for line in advice(found))


def test_schedules_that_are_one_for_few_microbatches_are_listed_once() -> None:
    fixed: dict[str, object] = {"tp": 1, "pp": 4, "micro_batch": 1, "virtual_stages": 2}
    request = Request(SMALL, A100, 4, 2, best=4, fixed=fixed, schedules=("zb_v", "v_half"))
    found = [(e.step_s, e.job.parallel.partition, e.job.parallel.zero1) for e in rank(request).best]
    assert len(found) == len(set(found))


def test_what_more_memory_would_bring_is_said() -> None:
    request = Request(GPT3, A100, 512, 512, memory_bytes=24e9, best=1, schedules=("1f1b",))
    lines = sensitivity(rank(request))
    assert any("GB more" in line for line in lines)
    assert any("twice the rate of matrix products" in line for line in lines)


def test_a_large_bubble_is_flagged() -> None:
    fixed: dict[str, object] = {"tp": 8, "pp": 16, "micro_batch": 1, "schedule": "1f1b"}
    request = Request(GPT3, A100, 128, 16, best=1, fixed=fixed)
    few = rank(request).best[0]
    assert few.bubble_fraction > 0.4  # (p - 1) / (m + p - 1)
    assert "idle" in bubble_warning(few)
    many = rank(replace(request, global_batch=512)).best[0]
    assert bubble_warning(many) == ""


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request(GPT3, A100, 8, 64), r"do not fit 8 x 86 GB.*Use (64|128) GPUs or more"),
        (Request(SMALL, A100, 4096, 4), r"fewer than the replicas.*Use \d+ or more"),
        (Request(SMALL, A100, 8, 7, fixed={"tp": 1, "pp": 1}), "Use 8 or more, or fewer GPUs"),
        (Request(SMALL, A100, 64, 8, fixed={"tp": 2, "pp": 2}), "Use 16 or more, or fewer GPUs"),
        (
            Request(SMALL, A100, 8, 8, fixed={"tp": 7}),
            r"no layout of 8 GPUs is legal.*\. Leave out --tp$",
        ),
        (
            Request(SMALL, A100, 64, 64, fixed={"tp": 3, "pp": 24, "micro_batch": 1}),
            "Leave out --tp and --pp$",
        ),
        (
            Request(SMALL, A100, 8, 8, fixed={"pp": 2, "schedule": "1f1b", "virtual_stages": 2}),
            "Leave out --pp, or --schedule, or --virtual-stages$",
        ),
        (
            Request(SMALL, A100, 8, 8, fixed={"pp": 2, "schedule": "zb_v", "virtual_stages": 3}),
            "zb_v has exactly two stages a rank, got virtual_stages=3",
        ),
    ],
)
def test_a_request_that_nothing_meets_says_what_would(request_: Request, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rank(request_)


@pytest.mark.parametrize(("schedule", "v"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_v", 2)])
def test_one_layout_can_be_asked_for(schedule: str, v: int) -> None:
    fixed: dict[str, object] = {
        "tp": 2, "pp": 2, "virtual_stages": v, "schedule": schedule, "micro_batch": 2,
        "recompute": "full", "sequence_parallel": True, "zero1": True, "partition": "uniform",
    }  # fmt: skip
    found = rank(Request(SMALL, A100, 8, 64, best=3, fixed=fixed))
    assert len(found.best) == 1
    p = found.best[0].job.parallel
    assert (p.tp, p.pp, p.virtual_stages, p.schedule, p.recompute) == (2, 2, v, schedule, "full")


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "gpus", "batch"),
    [
        (GPT3, 10_000, 10_000),
        (ModelShape(105, 20480, 128, 2048, 51200), 2240, 1920),
        (ModelShape(128, 25600, 160, 2048, 51200), 8192, 8192),
    ],
)
def test_the_largest_jobs_are_answered(shape: ModelShape, gpus: int, batch: int) -> None:
    found = rank(Request(shape, A100, gpus, batch))
    assert len(found.best) == 5
    assert 0.3 < found.best[0].mfu < 0.8


@pytest.mark.full
def test_a_pipeline_of_128_ranks_is_simulated() -> None:
    fixed: dict[str, object] = {"tp": 8, "pp": 128, "micro_batch": 1, "schedule": "1f1b"}
    shape = ModelShape(128, 25600, 160, 2048, 51200)
    found = rank(Request(shape, A100, 1024, 512, best=1, fixed=fixed, memory_bytes=1e12))
    assert 0.1 < found.best[0].bubble_fraction < 0.4


PUBLISHED = [
    # Narayanan et al. 2021, section 5.1: 175B on 1,024 A100, batch 1,536, 140 TFLOP/s a GPU
    ("Megatron-LM 2021", GPT3, 1024, 1536, {"pp": 8, "virtual_stages": 2}, 31.5),
    # Smith et al. 2022, section 2.4: 530B on 2,240 A100, batch 1,920, 60.1 s
    (
        "DeepSpeed+Megatron 2022",
        ModelShape(105, 20480, 128, 2048, 51200),
        2240,
        1920,
        {"pp": 35, "virtual_stages": 1, "zero1": True},
        60.1,
    ),
]


@pytest.mark.parametrize(("framework", "shape", "gpus", "batch", "layout", "seconds"), PUBLISHED)
def test_published_layouts_are_candidates_with_their_published_times(
    framework: str,
    shape: ModelShape,
    gpus: int,
    batch: int,
    layout: dict[str, object],
    seconds: float,
) -> None:
    from megalite.planner.constants import load_stacks

    stacks = load_stacks()
    machine = Machine(
        find_hardware("a100-80"),
        stacks.framework(framework),
        scalar=stacks.scalar(framework, "selene"),
    )
    fixed = {"tp": 8, "micro_batch": 1, "recompute": "full", "sequence_parallel": False, **layout}
    shape = replace(shape, fused_attention=False)
    request = Request(
        shape, machine, gpus, batch, best=4, fixed=fixed,
        schedules=("1f1b", "interleaved_1f1b"),
    )  # fmt: skip
    found = rank(request)
    assert any(abs(e.step_s / seconds - 1) < 0.05 for e in found.best)


def test_a_share_of_the_memory_stays_free() -> None:
    request = Request(SMALL, A100, 16, 64, best=1, schedules=("1f1b", "zb_v"), headroom=0.0)
    assert replace(request, headroom=0.06).cap == pytest.approx(0.94 * A100.hw.memory_bytes)
    least = rank(request).best[0].peak_bytes
    tight = replace(request, memory_bytes=1.03 * least)
    assert rank(tight).best[0].peak_bytes == least  # 3 % stay free, and none need
    kept = rank(replace(tight, headroom=0.06)).best[0]
    assert kept.peak_bytes <= 0.97 * least and kept.step_s >= rank(tight).best[0].step_s
