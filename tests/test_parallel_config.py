"""Every rule about layouts: what is refused, in which words, and what is offered instead."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.errors import ConfigError
from megalite.mesh_shape import MeshShape
from megalite.parallel_config import (
    ModelFacts,
    ParallelConfig,
    check,
    describe,
    mesh_shape,
    nearest_legal,
    problems,
    tp_fits,
)
from megalite.schedule.generators import SCHEDULES

TINY = ModelFacts(4, 256, 4, 4, 1024, 128)
GROUPED = ModelFacts(8, 512, 8, 2, 1536, 96)


def only(
    parallel: ParallelConfig, world_size: int, facts: ModelFacts = TINY, **batch: int
) -> ConfigError:
    """The one rule that a layout breaks."""
    found = problems(parallel, facts, world_size, **batch)
    assert len(found) == 1, [str(error) for error in found]
    return found[0]


@pytest.mark.parametrize(
    ("parallel", "world_size"),
    [
        (ParallelConfig(), 1),
        (ParallelConfig(), 7),
        (ParallelConfig(tp=2, pp=2), 8),
        (ParallelConfig(tp=4, pp=2, sequence_parallel=True), 8),
        (ParallelConfig(pp=3), 3),
        (ParallelConfig(pp=2, virtual_stages=2, schedule="interleaved_1f1b"), 4),
        (ParallelConfig(pp=2, partition=(1, 3)), 2),
        (ParallelConfig(pp=3, partition=(0, 4, 0)), 3),
        (ParallelConfig(pp=6, partition=(0, 1, 1, 1, 1, 0)), 6),
        (ParallelConfig(pp=8, partition=(0, 1, 1, 0, 1, 1, 0, 0)), 8),
        (ParallelConfig(pp=6, partition="balanced"), 6),
        (ParallelConfig(pp=6, partition="profile"), 6),
        (ParallelConfig(tp=1, sequence_parallel=True), 2),
        (ParallelConfig(tp=2, rank_order="tp, dp,pp"), 2),
    ],
)
def test_a_legal_layout_breaks_no_rule(parallel: ParallelConfig, world_size: int) -> None:
    check(parallel, TINY, world_size)
    assert problems(parallel, TINY, world_size) == []
    assert nearest_legal(parallel, TINY, world_size)[0] == parallel


def test_a_world_that_is_no_product_is_told_in_four_numbers_with_what_would_fit() -> None:
    error = only(ParallelConfig(tp=4), 6)
    assert error.field == "parallel.tp"
    assert error.problem == "world size 6 is not tp=4 x pp=1 x dp: dp would be 1.5"
    assert error.fix.startswith("Start 4 or 8 processes, or use tp=2 pp=1 dp=3")
    error = only(ParallelConfig(tp=2, pp=4), 4)
    assert error.field == "parallel.pp" and "Start 8 processes" in error.fix
    assert "dp would be 0" in only(ParallelConfig(), 0).problem


def test_heads_that_tp_does_not_divide() -> None:
    error = only(ParallelConfig(tp=8), 8)
    assert error.problem == "model.num_heads=4 cannot be cut into tp=8 equal parts"
    assert error.fix == "Use one of parallel.tp=1, 2, 4, or one of model.num_heads=8, 16, 32"
    for heads in (8, 16, 32):
        assert (
            problems(ParallelConfig(tp=8), replace(TINY, num_heads=heads, num_kv_heads=heads), 8)
            == []
        )


def test_key_value_heads_are_cut_or_copied_and_else_refused() -> None:
    for tp in (1, 2, 4, 8):
        assert problems(ParallelConfig(tp=tp), GROUPED, 8) == []
    facts = replace(GROUPED, num_heads=12, num_kv_heads=6, hidden_size=768)
    error = only(ParallelConfig(tp=4), 4, facts)
    assert "num_kv_heads=6" in error.problem and "tp=4" in error.problem
    assert error.fix == "Use one of parallel.tp=1, 2"


def test_an_mlp_that_tp_does_not_divide() -> None:
    error = only(ParallelConfig(tp=4), 4, replace(TINY, ffn=1022))
    assert "model.ffn_hidden_size=1022" in error.problem
    assert error.fix == "Use one of parallel.tp=1, 2, or model.ffn_hidden_size=1020 or 1024"


def test_a_sequence_that_tp_does_not_divide_matters_under_sequence_parallel_only() -> None:
    facts = replace(TINY, seq_length=126)
    assert problems(ParallelConfig(tp=4), facts, 4) == []
    error = only(ParallelConfig(tp=4, sequence_parallel=True), 4, facts)
    assert error.field == "parallel.sequence_parallel"
    assert "model.seq_length=126" in error.problem and "tp=4" in error.problem
    assert "parallel.tp=1, 2" in error.fix and "model.seq_length=124 or 128" in error.fix


def test_fewer_layers_than_stages() -> None:
    error = only(ParallelConfig(pp=8), 8)
    assert error.problem == (
        "model.num_layers=4 are fewer than the 8 stages of pp=8 x virtual_stages=1"
    )
    assert error.fix == "Use parallel.pp=4 or less, or model.num_layers=8 or more"
    error = only(ParallelConfig(pp=2, virtual_stages=3, schedule="looped_bfs"), 2)
    assert error.field == "parallel.virtual_stages"
    assert "parallel.pp=1 or less, or parallel.virtual_stages=2 or less" in error.fix


@pytest.mark.parametrize("partition", [(4,), (1, 2, 1), (2, 3), (0, 3), (-1, 5), ()])
def test_a_list_of_layer_counts_has_to_fit(partition: tuple[int, ...]) -> None:
    error = only(ParallelConfig(pp=2, partition=partition), 2)
    assert error.field == "parallel.partition" and "Use such as 2 2" in error.fix
    for right in ((3, 1), (4, 0), (0, 4)):
        assert problems(ParallelConfig(pp=2, partition=right), TINY, 2) == []


@pytest.mark.parametrize("partition", ["balanced", "profile"])
def test_embedding_and_head_fill_a_stage_each_where_they_count_as_layers(partition: Any) -> None:
    error = only(ParallelConfig(pp=7, partition=partition), 7)
    assert error.problem == (
        "model.num_layers=4, with embedding and head, are fewer than the 7 stages of "
        "pp=7 x virtual_stages=1"
    )
    assert error.fix == "Use parallel.pp=6 or less, or model.num_layers=5 or more"
    assert only(ParallelConfig(pp=6), 6).field == "parallel.pp"


def test_a_schedule_with_one_stage_a_rank_refuses_more() -> None:
    error = only(ParallelConfig(pp=2, virtual_stages=2), 2)
    assert error.field == "parallel.virtual_stages" and "schedule 1f1b has 1" in error.problem
    assert "interleaved_1f1b" in error.fix and "gpipe" not in error.fix


def test_an_unknown_schedule_is_told_the_nearest_and_all() -> None:
    error = only(ParallelConfig(schedule="interleaved1f1b"), 1)
    assert error.fix.startswith("Did you mean interleaved_1f1b? Use one of ")
    assert all(name in error.fix for name in SCHEDULES)


@pytest.mark.parametrize("order", ["", "tp,pp", "pp,dp,tp,tp", "pp,dp,xp", "pp dp tp"])
def test_a_rank_order_names_each_axis_once(order: str) -> None:
    assert only(ParallelConfig(rank_order=order), 1).field == "parallel.rank_order"


def test_hidden_features_and_heads_have_to_fit() -> None:
    error = only(ParallelConfig(), 1, replace(TINY, num_heads=3, num_kv_heads=3))
    assert error.field == "model.num_heads" and "model.hidden_size=256" in error.problem
    assert "num_heads=1, 2, 4" in error.fix and "hidden_size=255 or 258" in error.fix
    error = only(ParallelConfig(), 1, replace(TINY, num_kv_heads=3))
    assert error.field == "model.num_kv_heads" and "num_kv_heads=1, 2, 4" in error.fix


def test_batches_have_at_least_one_sequence_and_need_not_divide() -> None:
    assert only(ParallelConfig(), 1, global_batch_size=0).field == "train.global_batch_size"
    assert only(ParallelConfig(), 1, micro_batch_size=-1).field == "train.micro_batch_size"
    assert problems(ParallelConfig(), TINY, 4, global_batch_size=10, micro_batch_size=1) == []
    assert problems(ParallelConfig(), TINY, 4, global_batch_size=1, micro_batch_size=8) == []


def test_sizes_below_one_are_named_without_a_division_by_them() -> None:
    bad = ParallelConfig(tp=0, pp=-1, virtual_stages=0)
    fields = [error.field for error in problems(bad, replace(TINY, num_heads=0), 8)]
    assert fields == ["parallel.tp", "parallel.pp", "parallel.virtual_stages", "model.num_heads"]


def test_every_broken_rule_is_reported_at_once() -> None:
    parallel = ParallelConfig(tp=3, pp=8, sequence_parallel=True, rank_order="x", schedule="y")
    found = [error.field for error in problems(parallel, TINY, 7, 0, 0)]
    assert sorted(found) == sorted(
        [
            "train.global_batch_size",
            "train.micro_batch_size",
            "parallel.rank_order",
            "parallel.schedule",
            "parallel.tp",  # world
            "parallel.tp",  # heads
            "parallel.tp",  # MLP
            "parallel.sequence_parallel",
            "parallel.pp",
        ]
    )
    with pytest.raises(ConfigError) as caught:
        check(parallel, TINY, 7, 0, 0)
    assert caught.value.field == found[0]


def test_dp_is_what_is_left() -> None:
    assert mesh_shape(ParallelConfig(tp=2, pp=2), 12) == MeshShape(2, 2, 3)
    shape = mesh_shape(ParallelConfig(tp=2, rank_order="tp,dp,pp"), 4)
    assert shape.groups("tp") == [(0, 2), (1, 3)]
    for bad in (ParallelConfig(tp=3), ParallelConfig(rank_order="tp"), ParallelConfig(pp=0)):
        with pytest.raises(ConfigError):
            mesh_shape(bad, 4)


def test_the_nearest_layouts_change_least() -> None:
    near = nearest_legal(ParallelConfig(tp=8, pp=1), TINY, 8)
    assert describe(near[0], 8) == "tp=4 pp=1 dp=2 schedule=1f1b"
    near = nearest_legal(ParallelConfig(pp=8, virtual_stages=2, partition=(2, 2)), TINY, 8)
    assert (near[0].pp, near[0].virtual_stages, near[0].partition) == (4, 1, "uniform")
    bad = ParallelConfig(tp=0, virtual_stages=-1, schedule="x", rank_order="y")
    near = nearest_legal(bad, TINY, 8)
    assert near and all(not problems(layout, TINY, 8) for layout in near)


def test_a_model_that_fits_nothing_has_no_nearest_layout() -> None:
    assert nearest_legal(ParallelConfig(), replace(TINY, num_heads=3), 8) == []
    assert nearest_legal(ParallelConfig(), TINY, 0) == []


ORDERS = [",".join(axes) for axes in permutations(("pp", "dp", "tp"))]


def legal(p: ParallelConfig, f: ModelFacts, world: int, gbs: int, mbs: int) -> bool:
    """Whether the layout can be laid out, found by trying rather than by the rules' arithmetic."""
    if min(p.tp, p.pp, p.virtual_stages, gbs, mbs) < 1:
        return False
    if not any(p.tp * p.pp * dp == world for dp in range(1, world + 1)):
        return False
    if p.rank_order not in ORDERS:
        return False
    head = [f.hidden_size // f.num_heads] * f.num_heads
    if sum(head) != f.hidden_size or f.num_heads not in range(0, 1000, f.num_kv_heads):
        return False
    share = [f.num_heads // p.tp] * p.tp
    if sum(share) != f.num_heads or f.ffn not in range(0, f.ffn + 1, p.tp):
        return False
    # rank r computes these query heads, each of which reads one key/value head
    reads = [
        sorted({h * f.num_kv_heads // f.num_heads for h in range(r * share[0], (r + 1) * share[0])})
        for r in range(p.tp)
    ]
    counts = [sum(kv in r for r in reads) for kv in range(f.num_kv_heads)]
    if len(set(map(len, reads))) > 1 or len(set(counts)) > 1:
        return False
    if p.sequence_parallel and f.seq_length / p.tp != f.seq_length // p.tp:
        return False
    stages = [s for _ in range(p.virtual_stages) for s in range(p.pp)]
    if isinstance(p.partition, tuple):
        layers = [s for s, c in enumerate(p.partition) for _ in range(c)]
        if len(p.partition) != len(stages) or len(layers) != f.num_layers or -1 in p.partition:
            return False
    elif len(stages) > f.num_layers + (0 if p.partition == "uniform" else 2):
        return False
    several = {"interleaved_1f1b", "looped_bfs"}
    return p.schedule in several or (
        p.schedule in {"naive", "gpipe", "1f1b"} and p.virtual_stages == 1
    )


FAULTS = "world order hidden heads kv ffn seq layers counts schedule batch".split()


@st.composite
def layouts(draw: st.DrawFn, fault: str) -> tuple[ParallelConfig, ModelFacts, int, int, int]:
    """A legal layout in which one number is then drawn anew, and now and then another."""
    tp, pp, v = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    faults = {fault, draw(st.sampled_from([fault, fault, *FAULTS]))} - {""}

    def number(name: str, right: int, wrong: st.SearchStrategy[int]) -> int:
        return draw(wrong) if name in faults else right

    few = st.integers(1, 9)
    kv = number("kv", draw(st.sampled_from([tp, 2 * tp, 1])), few)
    heads = number("heads", math.lcm(tp, kv) * draw(st.integers(1, 2)), few | few.map(tp.__mul__))
    layers = number(
        "layers", draw(st.integers(pp * v, 12)), st.sampled_from([1, pp, pp * v - 1 or 1, pp * v])
    )
    facts = ModelFacts(
        num_layers=layers,
        hidden_size=number("hidden", heads * draw(st.integers(1, 4)), st.integers(1, 64)),
        num_heads=heads,
        num_kv_heads=kv,
        ffn=number("ffn", tp * draw(few), st.integers(1, 60)),
        seq_length=number("seq", tp * draw(few), st.integers(1, 60)),
    )
    counts: tuple[int, ...] = (layers - pp * v + 1,) + (1,) * (pp * v - 1)
    off = [
        (*counts, 0),
        (counts[0] + 1, *counts[1:]),
        (1, layers - 1),
        (*counts[:-1], -1),
    ]
    kinds = ["uniform", "balanced", "profile", counts, (*counts[:-2], 0, sum(counts[-2:]))]
    if len(counts) == 1:
        kinds.pop()
    right = ["interleaved_1f1b", "looped_bfs", *(["naive", "gpipe", "1f1b"] if v == 1 else [])]
    orders = ["pp,dp,tp,tp", "pp,dp", "pp,dp,x", ""] if "order" in faults else ORDERS
    parallel = ParallelConfig(
        tp=tp,
        pp=pp,
        virtual_stages=v,
        schedule=draw(st.sampled_from(["no", "1f1b", "gpipe"] if "schedule" in faults else right)),
        sequence_parallel=draw(st.booleans()),
        partition=draw(st.sampled_from(off if "counts" in faults else kinds)),
        rank_order=draw(st.sampled_from(orders)),
    )
    world = number("world", tp * pp * draw(st.integers(1, 3)), st.just(0) | st.integers(0, 24))
    small = st.integers(0, 2)
    return parallel, facts, world, number("batch", 8, small), number("batch", 2, small)


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_no_rule_is_broken_exactly_where_trying_the_layout_works(fault: str) -> None:
    seen: set[bool] = set()

    @settings(max_examples=80)
    @given(layouts(fault))
    def compare(case: tuple[ParallelConfig, ModelFacts, int, int, int]) -> None:
        assert (problems(*case) == []) == legal(*case)
        seen.add(legal(*case))

    compare()
    always_wrong = {"order", "counts"}
    assert seen == ({False} if fault in always_wrong else {True, False}), "too few kinds were drawn"


@pytest.mark.parametrize("fault", ["", "world", "heads", "layers", "counts"])
def test_layouts_that_are_offered_are_legal(fault: str) -> None:
    @settings(max_examples=30)
    @given(layouts(fault))
    def offered(case: tuple[ParallelConfig, ModelFacts, int, int, int]) -> None:
        parallel, facts, world, *_ = case
        near = nearest_legal(parallel, facts, world)
        assert all(legal(layout, facts, world, 1, 1) for layout in near)
        assert len(set(near)) == len(near)
        whole = facts.hidden_size % facts.num_heads == facts.num_heads % facts.num_kv_heads == 0
        assert bool(near) == (world > 0 and whole)

    offered()


@pytest.mark.parametrize("tp", range(1, 25))
def test_copies_of_key_value_heads_fit_where_each_rank_reads_as_many(tp: int) -> None:
    facts = ModelFacts(4, 96, 24, 6, 24 * 24, 128)
    want = 24 % tp == 0 and (math.gcd(6, tp) in (6, tp))
    assert tp_fits(tp, facts) == want
