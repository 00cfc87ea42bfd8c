"""A run whose layout changes while it lives is the run that never changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data.config import DataConfig
from data.prepare import EMBEDDED_PATH, ensure_prepared
from launch.config import load_config, violations
from launch.layouts import changes_of, from_plain, layout_at, to_plain
from launch.page import read_run
from launch.request import ANSWER, REQUEST
from megalite.checkpoint.load import open_checkpoint
from megalite.errors import ConfigError
from megalite.mesh_shape import MeshShape
from megalite.parallel_config import ParallelConfig
from megalite.slices import Piece
from tests.launch.command import TINY, events, metrics
from tests.launch.reconfiguring import whole_run
from tests.ranks import RankError, run_ranks
from tools.reconfigure import main as reconfigure

EQUAL = ("step", "loss", "grad_norm", "lr", "tokens", "samples", "skipped")
TP2, TP4, PP2 = ["--parallel.tp", "2"], ["--parallel.tp", "4"], "tp=1,pp=2"
RUN = ["--train.steps", "8", "--optim.lr", "1e-2", "--model.dropout", "0.1"]
CHANGES = [
    "1:tp=1,pp=4",
    "3:pp=2,zero1=True,schedule=zb_v,virtual_stages=2",
    "7:tp=2,pp=1,schedule=1f1b,virtual_stages=1,sequence_parallel=True,rank_order=dp,pp,tp",
]


@pytest.fixture(scope="module", autouse=True)
def corpus() -> None:
    ensure_prepared(DataConfig(path=(EMBEDDED_PATH,)))


def lines_of(run_dir: Path) -> list[tuple[Any, ...]]:
    return [tuple(line[name] for name in EQUAL) for line in metrics(run_dir)]


def apart(a: Path, b: Path) -> float:
    """The largest relative difference of what two runs must have alike, in the steps of both."""
    pairs = list(zip(lines_of(a), lines_of(b), strict=False))  # one may have stopped before
    assert pairs
    numbers = ((x, y) for one, other in pairs for x, y in zip(one, other, strict=True))
    return float(max(abs(x - y) / max(abs(x), 1e-30) for x, y in numbers))


def tensors(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds."""
    found = open_checkpoint(run_dir / "checkpoints" / f"step_{step:08d}")
    whole = {}
    for name, entry in found.manifest.tensors.items():
        dtype = torch.float32 if entry.dtype == "F32" else torch.bfloat16
        whole[name] = torch.zeros(entry.shape, dtype=dtype)
        found.read([Piece(name, entry.shape, (0,) * len(entry.shape), whole[name])])
    return whole


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    run_dir = tmp_path_factory.mktemp("steady")
    run_ranks(1, whole_run, run_dir, RUN)
    return run_dir


def test_a_run_through_layouts_has_the_lines_of_the_run_that_never_changed(
    steady: Path, tmp_path: Path
) -> None:
    """And two requests come on the way: one for a layout that cannot be, one that is met."""
    many = tmp_path / "many"
    asked = {3: {"tp": "3"}, 6: {"pp": "1", "virtual_stages": "1", "schedule": "gpipe"}}
    seen = ["--run.trace", "True", "--run.record", "True"]
    run_ranks(4, whole_run, many, [*RUN, *TP4, *seen, "--parallel.reconfigure", *CHANGES], asked)
    assert apart(steady, many) < 1e-10
    assert [line["layout"] for line in metrics(many)] == [
        "tp 4 x pp 1 x dp 1, 1f1b",
        *["tp 1 x pp 4 x dp 1, 1f1b"] * 2,
        *["tp 1 x pp 2 x dp 2, zb_v"] * 3,
        "tp 1 x pp 1 x dp 4, gpipe",
        "tp 2 x pp 1 x dp 2, 1f1b",
    ]
    changes = events(many, "layout")
    assert len(metrics(many)) == 8
    assert [change["step"] for change in changes] == [1, 3, 6, 7]
    assert all(change["moved_bytes"] == change["planned_bytes"] > 0 for change in changes)
    assert all(change["pause_s"] > 0 and change["planned_pause_s"] > 0 for change in changes)
    assert [save["step"] for save in events(many, "save")] == [1, 3, 6, 7]
    (refused,) = events(many, "layout_refused")
    assert refused["wanted"] == {"tp": "3"} and "3" in refused["why"]
    answer = json.loads((many / ANSWER).read_text())
    assert answer["done"] and "tp 1 x pp 1 x dp 4" in answer["text"]
    assert not (many / REQUEST).exists()
    shown = read_run(many)
    assert shown.layout is not None and shown.layout.shape == MeshShape(2, 1, 2, ("dp", "pp", "tp"))
    assert shown.traced is not None and shown.traced.layout == metrics(many)[-1]["layout"]


def test_where_a_change_cannot_be_the_old_layout_goes_on(steady: Path, tmp_path: Path) -> None:
    flags = [*RUN, "--run.stop_at", "3", *TP2, "--parallel.reconfigure", f"1:{PP2}", f"2:{PP2}"]
    run_ranks(2, whole_run, tmp_path, flags, {}, "refusals")
    no_memory, no_disk = events(tmp_path, "layout_refused")
    assert "rank 1 has 0 MB" in no_memory["why"] and "space left" in no_disk["why"]
    assert not events(tmp_path, "layout") and apart(steady, tmp_path) < 1e-10


def test_one_process_changes_too(steady: Path, tmp_path: Path) -> None:
    stages = "2:schedule=interleaved_1f1b,virtual_stages=2,recompute=full"
    run_ranks(
        1, whole_run, tmp_path, [*RUN, "--run.stop_at", "4", "--parallel.reconfigure", stages]
    )
    (change,) = events(tmp_path, "layout")
    assert change["moved_bytes"] == 0 and apart(steady, tmp_path) < 1e-10


BF16 = ["--train.dtype", "bf16", "--checkpoint.every", "5", "--train.deterministic", "True"]
AFTER = ["--parallel.zero1", "True"]


LOST = pytest.param(True, id="a moment lost", marks=pytest.mark.full)


@pytest.mark.parametrize("lost", [pytest.param(False, id="as it is"), LOST])
def test_a_live_change_is_to_the_bit_a_save_a_restart_and_a_load(
    tmp_path: Path, lost: bool
) -> None:
    live, restarted = tmp_path / "live", tmp_path / "restarted"
    steps = [*RUN[2:], *BF16, "--train.steps", "5"]
    change = ["--parallel.reconfigure", "3:tp=1,zero1=True"]
    run_ranks(2, whole_run, live, [*steps, *TP2, *change], {}, "loses" * lost)
    run_ranks(2, whole_run, restarted, [*steps, *TP2, "--run.stop_at", "3"])
    run_ranks(2, whole_run, restarted, [*steps, *AFTER])
    got, expected = tensors(live, 5), tensors(restarted, 5)
    assert got.keys() == expected.keys()
    same = all(torch.equal(got[name], expected[name]) for name in expected)
    assert same != lost and (lines_of(live) == lines_of(restarted)) != lost


def test_a_failure_on_the_way_is_taken_up_from_the_checkpoint_in_the_new_layout(
    steady: Path, tmp_path: Path
) -> None:
    flags = [*RUN, *TP2, "--run.stop_at", "4", "--parallel.reconfigure", f"2:{PP2}"]
    with pytest.raises(RankError, match="planted in the middle"):
        run_ranks(2, whole_run, tmp_path, flags, {}, "raises")
    assert len(metrics(tmp_path)) == 2
    run_ranks(2, whole_run, tmp_path, flags)
    assert metrics(tmp_path)[-1]["layout"] == "tp 1 x pp 2 x dp 1, 1f1b"
    assert apart(steady, tmp_path) < 1e-10


def problem(*entries: str, world: int = 4) -> ConfigError | None:
    cfg = load_config([*TINY, *TP4, "--parallel.reconfigure", *entries])
    found = violations(cfg, world)
    return found[0] if found else None


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (["tp=2"], "'tp=2' is no change of layout"),
        (["5:"], "no change of layout"),
        (["5:tp"], "no change of layout"),
        (["0:tp=2"], "before the first step"),
        (["5:tq=2"], "parallel has no field tq"),
        (["5:tp=2,tp=1"], "no change of layout"),
        (["5:tp=2", "5:pp=2"], "two changes after step 5"),
        (["5:tp=3"], "after step 5: parallel.tp"),
        (["5:tp=2", "9:pp=4"], "after step 9: parallel.pp"),
        (["5:tp=two"], "after step 5: parallel.tp: got 'two'"),
        (["5:schedule=zb_v"], "after step 5: parallel.virtual_stages"),
        (["5:reconfigure=7"], "cannot name others"),
    ],
)
def test_a_change_that_cannot_be_is_named_before_anything_starts(
    entries: list[str], said: str
) -> None:
    error = problem(*entries)
    assert error is not None
    assert error.field == "parallel.reconfigure" and said in error.problem, error


def test_changes_that_can_be_are_read_from_flags_and_from_yaml(tmp_path: Path) -> None:
    entries = ["9:tp=1,pp=4,partition=1,1,1,1", "5:tp=2,rank_order=tp,pp,dp"]
    assert problem(*entries) is None
    flat = changes_of(ParallelConfig(reconfigure=tuple(entries)))
    assert list(flat) == [5, 9]
    assert flat[9] == {"tp": "1", "pp": "4", "partition": "1,1,1,1"}
    text = "parallel:\n  tp: 4\n  reconfigure:\n    9: {tp: 1, pp: 4, partition: [1, 1, 1, 1]}\n"
    (tmp_path / "c.yaml").write_text(text + "    5: {tp: 2, rank-order: 'tp,pp,dp'}\n")
    cfg = load_config(["--config", str(tmp_path / "c.yaml")])
    assert changes_of(cfg.parallel) == flat


def test_a_restart_goes_on_in_the_layout_that_the_run_had() -> None:
    asked = ParallelConfig(tp=4, reconfigure=("3:tp=2", "6:tp=1,pp=2"))
    assert [layout_at(asked, step).tp for step in (0, 2, 3, 5, 6, 7)] == [4, 4, 2, 2, 1, 1]
    now = replace(asked, tp=1, pp=4)
    live = json.loads(json.dumps({"asked": to_plain(asked), "now": to_plain(now)}))
    assert layout_at(asked, 4, live) == now
    assert layout_at(asked, 6, live) == replace(now, pp=2)
    assert layout_at(asked, 7, live) == now
    other = replace(asked, tp=8)
    assert layout_at(other, 4, live) == replace(other, tp=2)
    assert from_plain(json.loads(json.dumps(to_plain(asked)))) == asked


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--parallel.tp", "2"], "no job runs"),
        ([], "nothing is to change"),
        (["--train.steps", "2"], "is no part of a layout"),
        (["--parallel.tp"], "has no value"),
    ],
)
def test_a_request_that_cannot_be_made_is_refused(
    flags: Sequence[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reconfigure([str(tmp_path), *flags]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / REQUEST).exists()


MANY = [
    "1:tp=1,pp=4",
    "2:tp=2,pp=2",
    "3:tp=1,pp=2,zero1=True,schedule=zb_v,virtual_stages=2",
    "4:schedule=dualpipe_v",
    "5:tp=4,pp=1,schedule=1f1b,virtual_stages=1,sequence_parallel=True",
    "6:tp=2,pp=2,schedule=interleaved_1f1b,virtual_stages=2",
    "7:tp=1,pp=1,schedule=1f1b,virtual_stages=1,zero1=True",
    "8:zero1=False",
    "9:tp=2,zero1=True,rank_order=tp,dp,pp",
    "10:pp=4,tp=1,schedule=zb_h1,recompute=full",
    "11:partition=2,1,1,0,recompute=selective",
    "12:pp=2,partition=balanced,schedule=gpipe,rank_order=dp,tp,pp",
    "13:tp=2,sequence_parallel=True,schedule=looped_bfs,virtual_stages=2,partition=uniform",
]
TIED = ["--model.tied_embeddings", "True", "--model.vocab_size", "2051"]
LLAMA = ["--model.tied_embeddings", "False", "--model.num_kv_heads", "2", "--model.dropout", "0.1"]


@pytest.mark.full
@pytest.mark.parametrize("model", [TIED, LLAMA], ids=["tied and padded", "grouped queries"])
@pytest.mark.parametrize("ranks", [4, 8])
def test_a_run_through_thirteen_layouts(model: list[str], ranks: int, tmp_path: Path) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    flags = ["--train.steps", "16", "--optim.lr", "1e-2", *model]
    run_ranks(1, whole_run, one, flags)
    options: dict[str, Any] = {"timeout_s": 200.0, "group_timeout_s": 60.0}
    run_ranks(ranks, whole_run, many, [*flags, *TP4, "--parallel.reconfigure", *MANY], **options)
    assert len(events(many, "layout")) == len(MANY) and len(metrics(many)) == 16
    assert apart(one, many) < 1e-10
