from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from launch.config import load_config, violations
from tests.planner.tables import DATA
from tests.tools.torchless import ROOT, run_without_torch
from tools import plan
from tools.planning.page import pareto

SMALL = ["--model", "gpt2-355m", "--gpus", "16", "--gpu", "h100", "--global-batch", "64"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = plan.main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def test_predict_adds_its_columns_and_keeps_every_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.csv"
    source = DATA / "megatron_h100_weak.csv"
    code, out, _ = run(capsys, "predict", "--csv", str(source), "--out", str(target))
    assert code == 0 and "5 rows" in out
    before = list(csv.DictReader(source.read_text().splitlines()))
    after = list(csv.DictReader(target.read_text().splitlines()))
    for old, new in zip(before, after, strict=True):
        assert {k: new[k] for k in old} == old
        assert float(new["pred_iter_time_s"]) > 0
        assert float(new["pred_mem_gb"]) > 0
        assert new["pred_note"] == ""


def test_predict_says_which_rows_it_could_not_simulate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.csv", tmp_path / "out.csv"
    head = "layers,hidden,heads,seq,vocab,gpus,tp,pp,gbs\n"
    source.write_text(f"{head}24,2048,16,2048,51200,8,2,2,16\n24,2048,16,2048,51200,8,4,4,16\n")
    code, out, err = run(capsys, "predict", "--csv", str(source), "--out", str(target))
    assert code == 0 and "2 rows" in out
    assert err == "plan.py: 1 row: 6 N D at 40%, not simulated: 8 GPUs are fewer than tp=4 x pp=4\n"
    with target.open(newline="") as file:
        assert [bool(row["pred_note"]) for row in csv.DictReader(file)] == [False, True]


def test_rank_prints_layouts_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "rank", *SMALL, "--json", "--schedule", "1f1b")
    found = json.loads(out)
    times = [x["step_time_s"] for x in found["layouts"]]
    assert code == 0 and len(times) == 5 and times == sorted(times)
    for x in found["layouts"]:
        assert x["tp"] * x["pp"] * x["dp"] == 16
        assert x["memory_gb"] <= found["memory_cap_gb"]
        assert x["num_microbatches"] * x["micro_batch_size"] * x["dp"] >= 64
    assert any("plain data parallelism" in line for line in found["advice"])


def test_what_rank_writes_can_be_run_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    code, out, _ = run(
        capsys, "rank", *SMALL, "--pp", "2", "--write", str(tmp_path), "--page", str(page)
    )
    assert code == 0 and "written" in out
    cfg = load_config(["--config", str(tmp_path / "config.yaml"), "--data.path", "corpora/mine"])
    assert violations(cfg, 16) == []
    assert cfg.parallel.pp == 2 and cfg.train.global_batch_size == 64
    words = ["--pp", "4", "--partition", "balanced", "--write", str(tmp_path / "balanced")]
    assert run(capsys, "rank", *SMALL, *words)[0] == 0
    cfg = load_config(["--config", str(tmp_path / "balanced/config.yaml"), "--data.path", "x"])
    assert not isinstance(cfg.parallel.partition, str)
    assert sum(cfg.parallel.partition) == 24 and violations(cfg, 16) == []
    submit = (tmp_path / "submit.sh").read_text()
    assert "sbatch --nodes 2 --gpus-per-node 8 launch/slurm.sbatch --config" in submit
    text = page.read_text()
    assert text.count("<svg") >= 2 and "Pareto" in text
    assert "http" not in text.replace("http-equiv", "") and "<script" not in text


def test_explain_accounts_for_the_whole_step(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--pp", "4", "--micro-batch", "2", "--schedule", "1f1b"]
    code, out, _ = run(capsys, "explain", *SMALL, *words, "--json")
    found = json.loads(out)
    assert code == 0 and sum(found["time"].values()) == pytest.approx(1)
    assert found["time"]["bubble: warm-up and drain"] > 0
    assert len(found["memory"]) == 4
    _, text, _ = run(capsys, "explain", *SMALL, *words)
    assert "warm-up and drain" in text


def test_check_says_whether_a_configuration_fits(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["check", "--config", "launch/configs/llama3_8b.yaml", "--gpu", "h100"]
    code, out, _ = run(capsys, *base, "--world-size", "64")
    assert code == 0 and "MFU" in out
    code, _, err = run(capsys, *base, "--world-size", "63")
    assert code == 2 and "parallel" in err
    flags = ["--parallel.recompute", "none", "--train.micro_batch_size", "64"]
    code, _, err = run(capsys, *base, "--world-size", "64", *flags)
    assert code == 2 and "GB" in err and "What fits" in err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--model": "gpt9"}, "there is no model 'gpt9'"),
        ({"--gpu": "h10"}, "Did you mean h100"),
        ({"--model": "gpt3-175b"}, "do not fit 16 x 86 GB"),
        ({"--global-batch": "0"}, "Use 1 or more"),
        ({"--framework": "NeMo-Megatrom"}, "Did you mean NeMo-Megatron? Use one of megalite, "),
        ({"--cluster": "elsewhere"}, "Use one of selene, "),
        ({"--gpus": "4096", "--global-batch": "2"}, "fewer than the replicas"),
    ],
)
def test_bad_input_is_answered_in_a_sentence_and_exits_2(
    changes: dict[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {**dict(zip(SMALL[::2], SMALL[1::2], strict=True)), **changes}
    code, out, err = run(capsys, "rank", *(w for pair in given.items() for w in pair))
    assert code == 2 and out == "" and words in err
    assert "Traceback" not in err and err.count("\n") == 1


def test_a_models_file_is_read_and_its_mistakes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("model: {preset: gpt2-124m, num_layers: 6}\n")
    words = ["--gpus", "1", "--gpu", "a100-40", "--global-batch", "8", "--json"]
    code, out, _ = run(capsys, "rank", "--model", str(path), *words)
    assert code == 0 and json.loads(out)["parameters"] < 100e6
    path.write_text("model: {num_layer: 6}\n")
    code, _, err = run(capsys, "rank", "--model", str(path), *words)
    assert code == 2 and "num_layers" in err


def test_the_front_has_no_layout_that_another_beats() -> None:
    from megalite.planner.search import Point

    points = [
        Point(1.0, 5.0, "a", True, True),
        Point(2.0, 3.0, "b", True, True),
        Point(2.5, 4.0, "c", True, True),
        Point(0.5, 1.0, "d", False, True),
    ]
    assert [p.label for p in pareto(points)] == ["b", "a"]


@pytest.mark.parametrize(
    "words",
    [
        ["--memory-gb", "nan"],
        ["--memory-gb", "-4"],
        ["--top", "0"],
        ["--page", "/nowhere/page.html"],
        ["--write", "/proc/plan"],
    ],
)
def test_what_cannot_be_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    cluster = ["--gpus", "8", "--gpu", "a100-80", "--global-batch", "8"]
    assert plan.main(["rank", "--model", "gpt2-124m", *cluster, *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("plan.py: ") and said.count("\n") == 1


@pytest.mark.parametrize(("batch", "words"), [("16", "16 microbatches, "), ("4000", "the first ")])
def test_the_page_says_how_much_of_the_step_is_drawn(
    batch: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    layout = ["--tp", "2", "--pp", "8", "--micro-batch", "1", "--schedule", "1f1b"]
    code, out, _ = run(
        capsys, "rank", *SMALL, *layout, "--global-batch", batch, "--page", str(page)
    )
    assert code == 0
    bubble = re.search(r"1f1b .* ([\d.]+%) +[\d.]+ +[\d.]+\n", out)
    text = page.read_text()
    assert bubble and f"1f1b, {words}" in text and bubble[1] in text
    assert (f"of {int(batch):,} microbatches: " in text) == (batch == "4000")


def test_planning_needs_no_torch(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = run_without_torch("plan.py", "rank", *SMALL, "--schedule", "1f1b", "--page", str(page))
    assert done.returncode == 0 and page.exists()
    done = run_without_torch("plan.py", "rank", *SMALL, "--model", "gpt9")
    assert done.returncode == 2 and "there is no model 'gpt9'" in done.stderr
    layout = ("--tp", "2", "--pp", "4", "--micro-batch", "1", "--virtual-stages", "1")
    assert run_without_torch("plan.py", "explain", *SMALL, *layout).returncode == 0
    table = ("--csv", str(DATA / "megatron_h100_weak.csv"), "--out", str(tmp_path / "out.csv"))
    assert run_without_torch("plan.py", "predict", *table).returncode == 0
    tiny = str(ROOT / "launch/configs/gpt_tiny_cpu.yaml")
    config = ("--config", tiny, "--world-size", "4", "--gpu", "h100")
    assert run_without_torch("plan.py", "check", *config).returncode == 0
