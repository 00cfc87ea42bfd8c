"""The page of a run: what it says, that it fetches nothing, and that no text can break it."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.build import make_plan
from launch.config import Config
from launch.page import read_run
from launch.partition import layers_of
from megalite.config import to_yaml
from megalite.errors import ConfigError
from megalite.mesh_shape import MeshShape
from megalite.metrics import EvalRecord, EventLog, MetricsLog, StepRecord
from megalite.report.chart import HEIGHT, WIDTH
from megalite.report.curves import curves
from megalite.report.history import History, read_history
from megalite.report.html import Html, join, tag
from megalite.report.pipeline import timeline_figure
from megalite.report.series import (
    block_means,
    compact,
    duration,
    log_ticks,
    short,
    thin,
    tick_labels,
    ticks,
)
from megalite.schedule.action import COMPUTE
from megalite.schedule.generators import build_schedule
from megalite.schedule.lower import lower
from megalite.schedule.simulate import Timeline, simulate
from tools.report import main

ROOT = Path(__file__).resolve().parents[2]
VOID = ("meta", "link", "img", "br", "input")
LAYOUT = "tp 2 x pp 2 x dp 2, interleaved_1f1b"


class Page(HTMLParser):
    """A page's elements as (name, attributes, own text), which have to be nested properly."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str], list[str]]] = []
        self._open: list[int] = []
        self.source = text
        self.feed(text)
        self.close()
        assert not self._open, "an element is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {k: v or "" for k, v in attrs}, []))
        if tag not in VOID:
            self._open.append(len(self.found) - 1)

    def handle_endtag(self, tag: str) -> None:
        assert self.found[self._open.pop()][0] == tag, "elements overlap"

    def handle_data(self, data: str) -> None:
        if self._open:
            self.found[self._open[-1]][2].append(data)

    def texts(self, name: str, class_: str = "") -> list[str]:
        return [
            "".join(text)
            for found, attributes, text in self.found
            if found == name and class_ in attributes.get("class", "").split(" ") + [""]
        ]

    def attributes(self, name: str, key: str, class_: str = "") -> list[str]:
        return [
            attributes[key]
            for found, attributes, _ in self.found
            if found == name
            and key in attributes
            and class_ in attributes.get("class", "").split(" ") + [""]
        ]

    @property
    def text(self) -> str:
        return " ".join("".join(text) for name, _, text in self.found if name != "style")


def outside(page: Page) -> list[str]:
    """Everything in a page that would fetch or run something."""
    names = ("script", "link", "img", "iframe", "object", "embed", "image", "use", "base")
    found = [name for name, _, _ in page.found if name in names]
    for _, attributes, _ in page.found:
        found += [k for k in attributes if k in ("src", "href", "srcset", "data", "action")]
        found += [k for k in attributes if k.startswith(("on", "xlink"))]
    return found + re.findall(r"https?:|url\(|@import|javascript:", page.source)


def step(number: int, **changes: Any) -> StepRecord:
    base = StepRecord(
        step=number,
        loss=8.0 / math.sqrt(number),
        grad_norm=2.0 / number,
        lr=0.002,
        tokens=4096 * number,
        samples=32 * number,
        step_time_s=0.5,
        tokens_per_s=8192.0,
        skipped=False,
        layout=LAYOUT,
    )
    return replace(base, **changes)


def make_config(**run: Any) -> Config:
    cfg = Config()
    return replace(
        cfg,
        model=replace(cfg.model, num_layers=6, vocab_size=2048),
        parallel=replace(cfg.parallel, tp=2, pp=2, virtual_stages=2, schedule="interleaved_1f1b"),
        train=replace(cfg.train, steps=20),
        run=replace(cfg.run, **{"dir": "runs/one", **run}),
    )


def write_run(
    run_dir: Path,
    steps: Iterable[StepRecord],
    evals: Iterable[EvalRecord] = (),
    events: Iterable[Mapping[str, Any]] = ({"event": "start", "step": 0, "layout": LAYOUT},),
    cfg: Config | None = None,
) -> Path:
    """A run directory as the writers of a run leave it, but for the clock."""
    log = MetricsLog.open(run_dir, 0)
    for record in steps:
        log.write(record)
    for evaluation in evals:
        log.write_eval(evaluation)
    log.close()
    EventLog(run_dir).close()
    lines = [json.dumps({"time": 1.8e9 + 60 * i, **event}) for i, event in enumerate(events)]
    (run_dir / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (run_dir / "config.yaml").write_text(to_yaml(cfg or make_config()), encoding="utf-8")
    return run_dir


def report(run_dir: Path) -> Page:
    assert main([str(run_dir)]) == 0
    return Page((run_dir / "report.html").read_text(encoding="utf-8"))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    evals = [EvalRecord.of(n, 6.0 - n / 10, 2.5, 4096 * n) for n in (10, 20)]
    events = [
        {"event": "start", "step": 0, "layout": LAYOUT},
        {"event": "save", "step": 10, "path": "runs/one/checkpoints/step_00000010"},
        {"event": "start", "step": 10, "layout": LAYOUT},
        {"event": "save", "step": 20, "path": "/elsewhere/step_00000020"},
    ]
    return write_run(tmp_path / "first", map(step, range(1, 21)), evals, events)


def test_the_page_says_how_the_run_went(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = report(run_dir)
    assert capsys.readouterr().out == f"report of this run: {run_dir / 'report.html'}\n"
    assert page.texts("h1") == ["first"]
    assert page.texts("p", "good") == ["Complete: 20 of 20 steps are done"]
    assert page.texts("dd", "big") == ["20", "1.789", "2.308", "81.9k", "10.0 s", "8,192"]
    for small in (
        "8 at step 1",
        "best 2.308 at step 20",
        "81,920",
        "3 min 00 s from first",
        "8 ra",
    ):
        assert small in page.text
    assert page.texts("figcaption") and page.texts("span", "newest") == [
        "1.789",
        "2.308",
        "0.1",
        "0.002",
        "8,192",
    ]
    assert "num_layers: 6" in page.texts("pre")[-1]


def test_the_page_fetches_and_runs_nothing(run_dir: Path) -> None:
    assert outside(report(run_dir)) == []
    for bad in (
        "<img src='x.png'>",
        "<script></script>",
        "<p style='background:url(x)'></p>",
        "<a href='http://x'></a>",
        "<p onclick='x'></p>",
    ):
        assert outside(Page(bad)), bad


def test_no_text_of_a_run_becomes_markup(tmp_path: Path) -> None:
    nasty = "<script>alert('1')</script> & \"two\" </title><b>"
    events = [
        {"event": nasty, "step": nasty, "layout": f"{LAYOUT} {nasty}", nasty: [nasty, {"a": 1}]}
    ]
    records = [step(1, layout=nasty), step(2)]
    page = report(
        write_run(tmp_path / "x", records, (), events, make_config(name=nasty, dir=nasty))
    )
    assert outside(page) == []
    assert page.texts("h1") == [nasty] and page.texts("title")[0] == f"{nasty} - megalite"
    row = page.texts("td")[-5:]
    assert (
        row[2:4] == [nasty, nasty] and nasty in row[4] and json.dumps([nasty, {"a": 1}]) in row[4]
    )
    assert page.texts("pre")[-1] == (tmp_path / "x" / "config.yaml").read_text(encoding="utf-8")
    assert outside(Page(tag("p", Html("<script></script>"))))
    assert tag("p", "<&'\"", title="<&'\"") == (
        '<p title="&lt;&amp;&#x27;&quot;">&lt;&amp;&#x27;&quot;</p>'
    )
    assert join(["<", Html("<")]) == "&lt;<"


def test_the_same_files_give_the_same_page(run_dir: Path, tmp_path: Path) -> None:
    first = report(run_dir).source
    out = tmp_path / "again.html"
    assert main([str(run_dir), "--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == first
    with open(run_dir / "events.jsonl", "a") as file:
        file.write('{"time": 1800000300, "event": "stall"}\n')
    assert report(run_dir).source != first


def damage(run_dir: Path, how: str) -> list[str]:
    """Spoil a run; the arguments to report it."""
    metrics = run_dir / "metrics.jsonl"
    match how:
        case "no directory":
            return [str(run_dir / "nowhere")]
        case "no metrics":
            metrics.unlink()
        case "no config":
            (run_dir / "config.yaml").unlink()
        case "not JSON":
            metrics.write_text("step 1\n")
        case "no line":
            metrics.write_text("[1, 2]\n")
        case "no loss":
            metrics.write_text(metrics.read_text().replace('"loss"', '"lose"'))
        case "text":
            metrics.write_text(metrics.read_text().replace("0.002", '"much"'))
        case "falling":
            metrics.write_text(metrics.read_text() * 2)
        case "bad config":
            (run_dir / "config.yaml").write_text("parallel:\n  tpp: 2\n")
        case "bad out":
            return [str(run_dir), "--out", str(run_dir / "no" / "page.html")]
    return [str(run_dir)]


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("no directory", "nowhere/metrics.jsonl"),
        ("no metrics", "there is no file"),
        ("no config", "config.yaml"),
        ("not JSON", "metrics.jsonl cannot be read"),
        ("no line", "metrics.jsonl cannot be read"),
        ("no loss", "metrics.jsonl has a line without 'loss'"),
        ("text", "'much' is no number"),
        ("falling", "do not rise"),
        ("bad config", "parallel.tp"),
        ("bad out", "No such file or directory"),
    ],
)
def test_what_is_no_run_is_one_line_and_exit_2(
    run_dir: Path, how: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(damage(run_dir, how)) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
    assert named in said.err and not (run_dir / "report.html").exists()


def test_the_command_exits_with_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/report.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
    )
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1


def test_a_line_that_is_being_written_is_left_out(run_dir: Path) -> None:
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 21, "lo')
    assert read_history(run_dir).num_steps == 20


def test_a_run_without_steps_or_without_anything_has_a_page(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "started", []))
    assert page.texts("p", "part") == ["No step of 20 is done"]
    assert page.texts("figure") == [] and len(page.texts("span", "rank")) == 8
    page = report(write_run(tmp_path / "empty", [], (), ()))
    assert page.texts("table") == [] and "None." in page.texts("p", "note")


def test_one_step_without_evaluation_is_a_dot(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "x", [step(1)]))
    assert page.texts("p", "part") == ["Not complete: 1 of 20 steps are done"]
    assert page.texts("p", "empty") == ["No value to draw"]
    dots = page.attributes("path", "d", "dot")
    assert len(dots) == 4 and all(re.fullmatch(rf"M{WIDTH // 2} \d+h0", d) for d in dots)
    assert "no evaluation" in page.text


def test_a_loss_that_is_not_finite_is_said_and_leaves_a_gap(tmp_path: Path) -> None:
    nan = {"loss": math.nan, "grad_norm": math.inf, "skipped": True}
    last = report(write_run(tmp_path / "last", [step(1), step(2), step(3, **nan)]))
    assert last.texts("p", "bad") == ["Step 3 of 20 is bad: loss nan, gradient norm inf"]
    assert last.texts("span", "newest")[0] == "nan"
    records = [step(n, **nan) if n == 3 else step(n) for n in range(1, 21)]
    page = report(write_run(tmp_path / "middle", records))
    assert page.texts("p", "verdict") == [
        "Complete: 20 of 20 steps are done; 1 bad step among them"
    ]
    lines = page.attributes("path", "d", "line")
    assert [line.count("M") for line in lines] == [2, 2, 1, 1]  # loss, norm, lr, speed
    assert page.attributes("path", "d", "bad") == [f"M{round(2 / 19 * WIDTH)} {HEIGHT}v-71"] * 4


def test_values_beyond_any_axis_do_not_break_it(tmp_path: Path) -> None:
    values = [1e300, -1e300, 1e-300, 0.0, 5e-324, 1.0, math.inf, -math.inf, math.nan, 1e99, 1e-99]
    records = [
        step(n, loss=v, grad_norm=v, lr=v, tokens_per_s=abs(v)) for n, v in enumerate(values, 1)
    ]
    evals = [EvalRecord.of(n, v, None, 0) for n, v in enumerate(values, 1)]
    page = report(write_run(tmp_path / "x", records, evals))
    assert "Held-out loss" in page.text
    for path in page.attributes("path", "d"):
        assert re.fullmatch(r"[MLhv\d \-]*", path)
    for value in values:
        report(write_run(tmp_path / f"{value}", [step(n, loss=value, lr=value) for n in (1, 2)]))


def history(loss: np.ndarray[Any, np.dtype[np.float64]]) -> History:
    x = np.arange(1.0, len(loss) + 1)
    names = ("grad_norm", "lr", "tokens", "step_time_s", "tokens_per_s")
    columns = {"step": x, "loss": loss, "skipped": 0 * x, **dict.fromkeys(names, 1 + 0 * x)}
    none = dict.fromkeys(("step", "val_loss", "bits_per_byte"), np.empty(0))
    return History(columns, none, (), ())


def test_a_long_run_is_thinned_but_its_spike_is_not_lost() -> None:
    loss = np.full(300_000, 2.0)
    loss[123_456] = 9.0
    page = Page("".join(curves(history(loss))))
    raw = page.attributes("path", "d", "raw")[0]
    points = [tuple(map(int, p)) for p in re.findall(r"(\d+) (\d+)", raw)]
    assert len(points) <= 2000 and len(page.source) < 150_000
    top = min(points, key=lambda point: point[1])
    assert abs(top[0] - 123_456 / 300_000 * WIDTH) <= 2 and top[1] < 0.1 * HEIGHT
    assert sum(y < 0.9 * HEIGHT for _, y in points) == 1


@given(st.lists(st.floats(width=32), min_size=1, max_size=200), st.integers(1, 20))
def test_thinning_keeps_the_extremes_of_every_column(values: list[float], columns: int) -> None:
    y = np.array(values)
    x = np.arange(len(y), dtype=np.float64)
    low, high = 0.0, max(1.0, len(y) - 1.0)
    tx, ty = thin(x, y, low, high, columns)
    assert len(tx) == len(ty) <= max(2 * columns, 1) and (np.diff(tx) >= 0).all()
    finite = y[np.isfinite(y)]
    if finite.size:
        assert (np.nanmin(ty), np.nanmax(ty)) == (finite.min(), finite.max())
    else:
        assert np.isnan(ty).all()


def test_block_means_skip_what_is_not_finite() -> None:
    x = np.arange(7.0)
    y = np.array([1.0, 3.0, math.nan, 5.0, math.inf, math.nan, 7.0])
    mx, my = block_means(x, y, 2)
    assert mx.tolist() == [0.5, 2.5, 4.5, 6.0]
    np.testing.assert_array_equal(my, [2.0, 5.0, math.nan, 7.0])


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12))
def test_ticks_are_few_round_and_inside(low: float, width: float) -> None:
    high = low + width
    if high - low < 1e-6 * abs(low):
        return
    found = ticks(low, high)
    slack = 1e-6 * (high - low)
    assert 1 <= len(found) <= 7 and len(tick_labels(found)) == len(found)
    assert all(low - slack <= t <= high + slack for t in found)


@given(st.floats(-30, 30), st.floats(0.05, 40))
def test_ticks_of_a_log_axis_are_inside(low: float, decades: float) -> None:
    found = log_ticks(10**low, 10 ** (low + decades))
    assert 1 <= len(found) <= 13 and found == sorted(found)
    assert all(low - 1e-3 <= math.log10(t) <= low + decades + 1e-3 for t in found)


def test_numbers_are_short() -> None:
    assert tick_labels([0.0, 0.5, 1.0]) == ["0", "0.5", "1.0"]
    assert tick_labels([0.0, 2e-5, 4e-5]) == ["0", "2e-5", "4e-5"]
    assert tick_labels([5000.0, 10000.0, 12500.0]) == ["5.0k", "10.0k", "12.5k"]
    assert tick_labels([-2e6, 0.0, 1e6]) == ["-2M", "0", "1M"] and tick_labels([]) == []
    shown = [compact(v) for v in (0.5, 123.4, 9999.0, 12345.0, 999_999.0, 8.19e9, math.nan)]
    assert shown == ["0.5", "123", "9,999", "12.3k", "1M", "8.19B", "nan"]
    assert [short(v) for v in (1e-5, 0.1, 30.0, 1e6)] == ["1e-5", "0.1", "30", "1M"]
    times = [duration(s) for s in (5.25, 59.99, 3600.0, 1e6, math.inf)]
    assert times == ["5.2 s", "1 min 00 s", "1 h 00 min", "11 d 13 h", "inf"]


def test_every_rank_and_every_layer_is_in_the_layout(run_dir: Path) -> None:
    page, shape = report(run_dir), MeshShape(tp=2, pp=2, dp=2)
    titles = page.attributes("span", "title", "rank")
    for rank, at in ((r, shape.coords(r)) for r in range(8)):
        assert f"rank {rank}: pp {at['pp']}, dp {at['dp']}, tp {at['tp']}" in titles
    assert len(titles) == 8 and page.texts("pre")[0] == shape.table()
    cfg = make_config()
    assert [list(r) for r in layers_of(cfg, make_plan(cfg, 2))] == [[0], [1, 2], [3, 4], [5]]
    stages = dict(
        zip(
            [t for t in page.texts("b") if t.startswith("stage")],
            [t.strip() for t in page.texts("div") if "layer" in t],
            strict=True,
        )
    )
    assert stages == {
        "stage 0": "embedding, layer 0",
        "stage 1": "layers 1 to 2",
        "stage 2": "layers 3 to 4",
        "stage 3": "layer 5, head and loss",
    }
    run = read_run(run_dir)
    assert run.layout and run.layout.plan.rank_of == (0, 1, 0, 1)


def planned(name: str, pp: int, num_microbatches: int, virtual_stages: int = 1) -> Timeline:
    plan = lower(build_schedule(name, pp, num_microbatches, virtual_stages))
    one = [1.0] * plan.num_stages
    return simulate(plan, one, one, one)


def test_the_timeline_has_a_cell_for_every_computation() -> None:
    timeline = planned("interleaved_1f1b", 3, 4, 2)
    page = Page(timeline_figure(timeline))
    shown = [text for text in page.texts("title") if "microbatch" in text]
    expected = [
        f"{'forward' if a.op.value == 'F' else 'backward'} of microbatch {a.microbatch}, "
        f"stage {a.stage}, from {start:g} to {end:g}"
        for rank, actions in enumerate(timeline.plan.actions)
        for a, start, end in zip(actions, timeline.start[rank], timeline.end[rank], strict=True)
        if a.op in COMPUTE
    ]
    assert shown == expected and len(shown) == 2 * 6 * 4
    rects = [attributes for name, attributes, _ in page.found if name == "rect"]
    idle = [r for r in rects if r.get("class") == "idle"]
    busy = sum(float(r["width"]) for r in rects if r not in idle)
    whole = sum(float(r["width"]) for r in idle)
    assert busy / whole == pytest.approx(1 - timeline.bubble_fraction, abs=0.01)
    assert busy / whole != pytest.approx(1 - planned("naive", 3, 4).bubble_fraction, abs=0.1)


def test_a_large_step_is_cut_to_its_ends() -> None:
    timeline = planned("1f1b", 40, 60)
    text = timeline_figure(timeline)
    page = Page(text)
    names = [t for t in page.texts("span") if t.startswith("pp ")]
    assert names[15:17] == ["pp 15", "pp 24"] and len(names) == 32
    left_out = timeline.makespan - 192
    assert page.texts("p") == [
        f"The {left_out:,.0f} units in the middle are left out. 8 ranks in the middle are left out."
    ]
    assert len(text) < 800_000
    assert "left out" not in timeline_figure(planned("1f1b", 4, 8))


def test_many_ranks_are_shown_by_their_ends(tmp_path: Path) -> None:
    cfg = make_config()
    cfg = replace(cfg, train=replace(cfg.train, global_batch_size=4096))
    events = [{"event": "start", "step": 0, "layout": "tp 2 x pp 2 x dp 512, interleaved_1f1b"}]
    page = report(write_run(tmp_path / "x", [step(1)], (), events, cfg))
    titles = page.attributes("span", "title", "rank")
    assert len(titles) == 2 * 15 * 2 and titles[-1] == "rank 2047: pp 1, dp 511, tp 1"
    assert "2,048 ranks" in page.text and len(page.texts("pre")) == 1


def test_restarts_are_marked_and_events_listed(run_dir: Path) -> None:
    page = report(run_dir)
    marks = page.attributes("path", "d", "restart")
    assert marks == [f"M{round(9 / 19 * WIDTH)} {HEIGHT}v-{HEIGHT}"] * 5
    cells = page.texts("td")[-20:]
    assert cells[5:10] == [
        "2027-01-15 08:01:00",
        "1 min 00 s",
        "save",
        "10",
        "path checkpoints/step_00000010",
    ]
    assert cells[-1] == "path /elsewhere/step_00000020"


def test_of_many_events_the_first_and_the_last_are_listed(tmp_path: Path) -> None:
    events = [{"event": "save", "step": n} for n in range(1000)]
    page = report(write_run(tmp_path / "x", [step(1, layout=LAYOUT)], (), events))
    assert "… 800 more …" in page.texts("td")
    assert len([t for t in page.texts("td") if t == "save"]) == 200


def test_events_without_a_usable_time_are_listed_too(run_dir: Path) -> None:
    lines = [{"event": "a"}, {"time": "nan", "event": "b"}, {"time": 1e99, "event": "c"}]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = report(run_dir)
    assert [t for t in page.texts("td") if t in "abc" and t] == ["a", "b", "c"]


def test_a_step_that_is_no_number_is_refused(run_dir: Path) -> None:
    (run_dir / "eval.jsonl").write_text('{"step": "nan", "val_loss": 1, "bits_per_byte": 1}\n')
    with pytest.raises(ConfigError, match=r"eval\.jsonl.*do not rise"):
        read_history(run_dir)


def test_a_run_that_is_to_be_traced_says_that_there_is_no_trace(tmp_path: Path) -> None:
    said = "no trace of a step has been written"
    traced = write_run(tmp_path / "traced", [step(1)], cfg=make_config(trace=True))
    assert any(said in text for text in report(traced).texts("small"))
    assert said not in report(write_run(tmp_path / "not", [step(1)])).text
