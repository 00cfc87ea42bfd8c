from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.planner.constants import MEGALITE, load_stacks
from megalite.planner.cost import Split
from megalite.planner.memory import MemoryModel
from megalite.planner.rows import predict
from megalite.planner.shape import ModelShape
from tests.planner.tables import table

SHAPES = {  # Korthikanti et al. 2022, table 3: layers, hidden, heads, mbs, pp, virtual stages
    "22B": (48, 6144, 64, 4, 1, 1),
    "175B": (96, 12288, 96, 1, 8, 3),
    "530B": (105, 20480, 128, 1, 35, 3),
    "1T": (128, 25600, 160, 1, 64, 1),
}
SETTINGS = {
    "none": (False, "none"),
    "seq": (True, "none"),
    "sel": (False, "selective"),
    "seq+sel": (True, "selective"),
    "seq+selective": (True, "selective"),
    "full": (False, "full"),
}
GIB = 2**30


def shape(model: str) -> ModelShape:
    layers, hidden, heads, *_ = SHAPES[model]
    return ModelShape(
        layers, hidden, heads, 2048, 51200, dropout=True, fused_attention=False, vocab_multiple=1
    )


def model(name: str, setting: str) -> MemoryModel:
    sequence_parallel, recompute = SETTINGS[setting]
    split = Split(8, sequence_parallel, recompute)
    return MemoryModel(shape(name), split, MEGALITE, SHAPES[name][3], 2, False, 1)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_layers_activations_are_those_of_the_equations(name: str) -> None:
    _, h, a, b, *_ = SHAPES[name]
    s, t = 2048, 8
    scores = 5 * a * s / h
    assert model(name, "none").kept() == pytest.approx(s * b * h * (10 + 24 / t + scores / t))
    assert model(name, "seq").kept() == pytest.approx(s * b * h / t * (34 + scores))
    assert model(name, "sel").kept() == pytest.approx(s * b * h * (10 + 24 / t))
    assert model(name, "seq+sel").kept() == pytest.approx(34 * s * b * h / t)
    assert model(name, "full").kept() == pytest.approx(2 * s * b * h)


def test_shares_of_the_baseline_are_those_of_figure_7() -> None:
    rows = [r for r in table("korthikanti_memory") if r["table"] == "Fig 7"]
    for row in rows:
        share = model(row["model"], row["setting"]).kept() / model(row["model"], "none").kept()
        assert 100 * share == pytest.approx(float(row["value1"]), rel=0.06)
    assert len(rows) == 20


def test_a_ranks_memory_is_that_of_figure_1() -> None:
    found = []
    for row in table("korthikanti_memory"):
        if row["table"] != "Fig 1":
            continue
        published = float(row["value1"]), float(row["value2"])
        layers, *_, pp, _ = SHAPES[row["model"]]
        estimate = predict(described(row["model"], row["setting"])).estimate
        assert estimate is not None
        rank = estimate.memory[0]
        elements = layers / pp * shape(row["model"]).layer_elements(8)
        state = sum(model(row["model"], "none").state(elements))
        assert state / GIB == pytest.approx(published[0], rel=0.01)  # the paper's are of layers
        assert rank.activations / GIB == pytest.approx(published[1], rel=0.06)
        whole = rank.weights + rank.gradients + rank.optimizer + rank.activations
        found.append(abs(whole / GIB / sum(published) - 1))
    assert len(found) == 8
    assert sum(found) / len(found) < 0.06


def described(name: str, setting: str) -> dict[str, str]:
    layers, hidden, heads, mbs, pp, vpp = SHAPES[name]
    sequence_parallel, recompute = SETTINGS[setting]
    numbers = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "seq": 2048,
        "vocab": 51200,
        "gpus": 8 * pp,
        "tp": 8,
        "pp": pp,
        "vpp": vpp,
        "mbs": mbs,
        "gbs": mbs * 4 * pp,
        "seq_par": int(sequence_parallel),
        "zero": 0,
        "gpu_mem_gb": 80,
    }
    texts = {
        "gpu": "A100",
        "recompute": recompute,
        "attn": "fused-softmax",
        "framework": "Megatron-LM 2022",
    }
    return {**texts, **{k: str(v) for k, v in numbers.items()}}


def test_zero1_shares_only_the_optimizers_state() -> None:
    plain = model("22B", "none")
    shared = replace(plain, zero1=True, dp=4)
    assert plain.state(1000) == (2000, 4000, 12000)
    assert shared.state(1000) == (2000, 4000, 3000)


def test_a_loss_in_place_has_no_further_copies_of_the_logits() -> None:
    logits = 4 * 2048 * 51200 // 8
    works = []
    for framework in (MEGALITE, replace(MEGALITE, in_place=False)):
        ranked = replace(model("22B", "none"), framework=framework)
        (rank,) = ranked.ranks("1f1b", 1, 1, 1, (0,), [range(48)])
        works.append(rank.work)
    assert works == [2 * logits, 2 * 4 * logits]


def test_grouped_heads_and_gates_are_counted() -> None:
    llama = ModelShape(
        32, 4096, 32, 4096, 32000, kv_heads=8, ffn=14336, gated=True, tied=False, bias=False,
        rmsnorm=True, learned_positions=False,
    )  # fmt: skip
    assert llama.num_parameters() == 7_241_732_096  # as published: Mistral 7B has this shape
    whole = MemoryModel(llama, Split(), MEGALITE, 1, 2, False, 1).kept()
    many = MemoryModel(replace(llama, kv_heads=32), Split(), MEGALITE, 1, 2, False, 1).kept()
    assert whole < many


def test_stacks_say_where_they_are_from() -> None:
    from megalite.planner.constants import STACKS
    from megalite.planner.hardware import read_yaml

    found = read_yaml(STACKS)
    assert all(entry["source"] for entry in found["frameworks"].values())
    assert all(entry["source"] for entry in found["clusters"].values())
    assert {f for f, _ in load_stacks().scalars} <= set(found["frameworks"])
