from __future__ import annotations

import random

import pytest

from megalite.planner.constants import Stacks, load_stacks
from megalite.planner.hardware import find_hardware
from megalite.planner.rows import INPUTS, is_known_gpu, predict
from tests.planner.tables import table

ROW = next(iter(table("korthikanti_table5")))


def test_measured_columns_are_never_read() -> None:
    rng = random.Random(1)
    for name in ("megatron21_table1", "megatron_h100_weak", "korthikanti_table5"):
        for row in table(name)[:2]:
            others = [c for c in row if c not in INPUTS]
            expected = predict(row)
            blank = predict({**row, **dict.fromkeys(others, "")})
            noise = predict({**row, **{c: str(rng.random()) for c in others}})
            missing = predict({c: v for c, v in row.items() if c in INPUTS})
            for found in (blank, noise, missing):
                assert (found.iter_time_s, found.mem_gb) == (expected.iter_time_s, expected.mem_gb)
            assert predict({**row, "gbs": str(2 * int(row["gbs"]))}).iter_time_s > (
                1.2 * expected.iter_time_s
            )


def test_a_question_mark_belongs_to_a_value() -> None:
    doubtful = {**ROW, "recompute": "full?", "attn": "fused-softmax?", "seq_par": "0?"}
    assert predict(doubtful).iter_time_s == predict(ROW).iter_time_s


def test_a_blank_is_the_planners_own_best() -> None:
    row = {**ROW, "gbs": "16", "dp": "1"}
    each = {m: predict({**row, "mbs": m}).iter_time_s for m in ("1", "2", "4")}
    assert predict({**row, "mbs": ""}).iter_time_s <= min(each.values())
    pipeline = {**ROW, "tp": "2", "pp": "4", "gbs": "64", "mbs": "1", "schedule": ""}
    depths = {v: predict({**pipeline, "vpp": v}).iter_time_s for v in ("1", "2", "3", "12")}
    assert len(set(depths.values())) == 4
    assert predict({**pipeline, "vpp": ""}).iter_time_s <= min(depths.values())


def test_zero1_is_on_where_a_row_says_so_or_nothing_fits_without() -> None:
    row = {**ROW, "gpus": "64", "tp": "8", "dp": "8", "gbs": "32"}
    off, on, blank = (predict({**row, "zero": z}) for z in ("0", "1", ""))
    assert blank.iter_time_s == off.iter_time_s != on.iter_time_s
    large = {**row, "tp": "4", "gpus": "32"}  # 100 GB of state a GPU without, 40 with
    found = predict({**large, "zero": ""}).estimate
    assert found is not None and found.job.parallel.zero1


def test_the_scalar_is_that_of_framework_and_cluster() -> None:
    known = ROW["framework"], ROW["cluster"]
    stacks = load_stacks()
    plain = predict({**ROW, "cluster": "another"}, stacks=stacks)
    twice = Stacks(stacks.frameworks, stacks.net_bytes_s, {known: 2.0})
    assert predict(ROW, stacks=twice).iter_time_s == pytest.approx(2 * plain.iter_time_s, rel=1e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": ""},
        {"hidden": "0"},
        {"tp": "7"},
        {"pp": "1000"},
        {"gpus": "3"},
        {"gpu": "unknown"},
        {"gbs": ""},
        {"schedule": "never-heard-of"},
        {"heads": "x"},
        {"vpp": "0"},
        dict.fromkeys(INPUTS, ""),
    ],
)
def test_every_row_gets_a_prediction(changes: dict[str, str]) -> None:
    found = predict({**ROW, **changes})
    assert 0 < found.iter_time_s < 1e9
    assert found.mem_gb > 0
    if found.estimate is None:
        assert found.note.startswith("6 N D at 40%, not simulated: ")


UNCHANGED = {
    "ffn": {"ffn": "24576"}, "hea": {"heads": "64"}, "hid": {"hidden": "6144"},
    "kv_": {"kv_heads": "64"}, "seq": {"seq": "2048"}, "sch": {"schedule": ""},
    "vpp": {"vpp": "48"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"ffn": "24577"}, "ffn 24577 taken for 24584: cut into 8 x 8 heads"),
        ({"heads": "63", "kv_heads": ""}, "heads 63 taken for 64"),
        ({"hidden": "6150"}, "hidden 6150 taken for 6208"),
        ({"kv_heads": "3"}, "kv_heads 3 taken for 4"),
        ({"seq": "2047", "seq_par": "1"}, "seq 2047 taken for 2048"),
        ({"schedule": "never-heard-of"}, "schedule never-heard-of is not known"),
        ({"vpp": "100"}, "vpp 100 taken for 48: 48 layers"),
    ],
)
def test_what_cannot_be_cut_is_rounded_up_and_said(changes: dict[str, str], note: str) -> None:
    row = {**ROW, "ffn": "24576"}
    found, whole = predict({**row, **changes}), predict({**row, **changes, **UNCHANGED[note[:3]]})
    assert note in found.note and whole.note == ""
    assert found.estimate is not None
    if not changes.get("kv_heads"):
        assert found.iter_time_s == pytest.approx(whole.iter_time_s, rel=0.03)


def test_a_row_that_is_not_simulated_says_why() -> None:
    few = predict({**ROW, "gpus": "3"})
    assert few.estimate is None and "3 GPUs are fewer than tp=8 x pp=1" in few.note
    deep = predict({**ROW, "gpus": "8000", "pp": "1000"})
    assert deep.estimate is None and "1000" in deep.note
    assert "missing" in predict({**ROW, "hidden": ""}).note


@pytest.mark.parametrize("name", ["layers", "hidden", "heads", "seq", "gbs", "gpus", "gpu_mem_gb"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0", "1e30", "many"])
def test_a_cell_that_is_no_size_says_as_little_as_a_blank(name: str, value: str) -> None:
    found, blank = predict({**ROW, name: value}), predict({**ROW, name: ""})
    assert (found.iter_time_s, found.mem_gb) == (blank.iter_time_s, blank.mem_gb)
    assert 0 < found.iter_time_s < float("inf")


def test_a_gpu_is_known_by_whatever_name_it_is_given() -> None:
    row = {**ROW, "gpu_mem_gb": ""}

    def seconds(gpu: str) -> float:
        return predict({**row, "gpu": gpu}).iter_time_s

    for gpu in ("H100-80GB", "H100-SXM", "NVIDIA H100 80GB HBM3", "h100"):
        assert seconds(gpu) == seconds("H100") < seconds("A100") and is_known_gpu({"gpu": gpu})
    for gpu in ("A100 40GB", "A100-40GB", "a100-40"):
        estimate = predict({**row, "gpu": gpu}).estimate
        assert estimate is not None and estimate.machine.hw == find_hardware("a100-40")
    assert seconds("A100 80GB") == seconds("A100") == seconds("V100")
    assert not is_known_gpu({"gpu": "V100"}) and is_known_gpu({"gpu": ""})
