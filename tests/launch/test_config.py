"""The whole configuration: value rules, taking up a run, the launcher's environment, the report."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from data.config import DataConfig, sources
from launch.config import (
    Config,
    check,
    check_same_run,
    facts_of,
    fit,
    load_config,
    num_microbatches,
    resolve_vocab,
    violations,
)
from megalite.config import to_yaml, values_of
from megalite.errors import ConfigError
from megalite.parallel_config import problems
from model.config import PRESETS

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "launch/configs/gpt_tiny_cpu.yaml")


def of(*flags: str, config: str = TINY) -> Config:
    return load_config(["--config", config, *flags])


def broken(*flags: str, world_size: int = 1, config: str = TINY) -> list[str]:
    """The fields of the rules that a configuration breaks."""
    return [error.field for error in violations(of(*flags, config=config), world_size)]


@pytest.mark.parametrize(
    ("path", "world_size"),
    [
        (path, {"llama3_8b": 64, "gpt2_124m": 8}.get(path.stem, 1))
        for path in sorted((ROOT / "launch/configs").glob("*.yaml"))
    ],
    ids=lambda value: getattr(value, "stem", value),
)
def test_every_shipped_file_loads_and_breaks_no_rule(path: Path, world_size: int) -> None:
    check(of(config=str(path)), world_size)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_the_tiny_model_fits_every_layout_of_eight_ranks(tp: int, pp: int) -> None:
    if tp * pp <= 8:
        check(of("--parallel.tp", str(tp), "--parallel.pp", str(pp)), 8)


def test_the_defaults_lack_nothing_but_data() -> None:
    assert [error.field for error in violations(Config(), 1)] == ["data.path"]


def test_the_file_may_stand_anywhere_among_the_flags_but_only_once() -> None:
    flags = ["--train.steps", "3"]
    want = load_config(["--config", TINY, *flags])
    assert load_config([*flags, f"--config={TINY}"]) == want and want.train.steps == 3
    for bad in (["--config"], ["--config", "--train.steps", "3"], ["--config="]):
        with pytest.raises(ConfigError, match="--config: no file is named"):
            load_config(bad)
    with pytest.raises(ConfigError, match="two files: a and b"):
        load_config(["--config", "a", "--config", "b"])


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_fills_the_model_and_fields_given_override_it(name: str) -> None:
    cfg = load_config(["--model.preset", name, "--model.num_layers", "3"])
    want = {**PRESETS[name], "num_layers": 3, "preset": name}
    assert {key: getattr(cfg.model, key) for key in want} == want
    assert not [e for e in violations(cfg, 1) if e.field.startswith("model.")]


def test_an_unknown_preset_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean llama3-8b"):
        load_config(["--model.preset", "llama3_8b"])


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--model.vocab_size", "-1"], "model.vocab_size"),
        (["--model.norm_eps", "0"], "model.norm_eps"),
        (["--model.position", "rope", "--model.hidden_size", "260"], "model.hidden_size"),
        (["--model.hidden_size", "255"], "model.num_heads"),
        (["--model.num_kv_heads", "3"], "model.num_kv_heads"),
        (["--model.num_layers", "0"], "model.num_layers"),
        (["--data.path", "0:a"], "data.path"),
        (["--data.path", "2:"], "data.path"),
        (["--optim.lr", "-1", "--optim.min_lr", "-2"], "optim.lr"),
        (["--optim.lr", "1e-6"], "optim.min_lr"),
        (["--optim.warmup_steps", "-1"], "optim.warmup_steps"),
        (["--optim.betas", "0.9", "1"], "optim.betas"),
        (["--optim.eps", "0"], "optim.eps"),
        (["--optim.clip_grad_norm", "-1"], "optim.clip_grad_norm"),
        (["--train.steps", "-1"], "train.steps"),
        (["--train.global_batch_size", "0"], "train.global_batch_size"),
        (["--train.micro_batch_size", "0"], "train.micro_batch_size"),
        (["--train.seed", str(2**63)], "train.seed"),
        (["--train.eval_every", "-1"], "train.eval_every"),
        (["--train.loss_scale", "1e300"], "train.loss_scale"),
        (["--train.loss_scale", "1e-300"], "train.loss_scale"),
        (["--train.loss_scale_interval", "99999999999999999999"], "train.loss_scale_interval"),
        (["--checkpoint.every", "-1"], "checkpoint.every"),
        (["--checkpoint.keep", "0"], "checkpoint.keep"),
        (["--checkpoint.resume", "atuo"], "checkpoint.resume"),
        (["--run.dir", ""], "run.dir"),
        (["--run.stop_at", "-1"], "run.stop_at"),
        (["--parallel.tp", "3"], "parallel.tp"),
    ],
)
def test_a_value_that_cannot_work_is_named(flags: list[str], field: str) -> None:
    assert broken(*flags)[0] == field
    assert broken() == []


@pytest.mark.parametrize(
    "flags",
    [
        ["--train.steps", "0"],
        ["--train.steps", "4", "--optim.warmup_steps", "10"],
        ["--optim.clip_grad_norm", "0", "--optim.weight_decay", "0"],
        ["--optim.lr", "0", "--optim.min_lr", "0"],
        ["--train.global_batch_size", "1", "--train.micro_batch_size", "8"],
        ["--train.dtype", "fp64", "--run.wandb", "disabled"],
        ["--run.wandb", "online"],
        ["--checkpoint.every", "0", "--train.eval_every", "0"],
        ["--checkpoint.resume", str(ROOT)],
        ["--model.ffn_hidden_size", "64", "--model.hidden_size", "32"],
    ],
)
def test_a_value_at_the_edge_can_work(flags: list[str]) -> None:
    assert broken(*flags) == []


def test_the_limits_that_an_error_names_can_be_used() -> None:
    (problem,) = (e for e in violations(of("--train.loss_scale", "0"), 1) if "loss" in e.field)
    named = re.search(r"is not in \[(.+), (.+)\]", str(problem))
    assert named
    for value in named.groups():
        assert broken("--train.loss_scale", value) == []


def test_the_first_of_several_problems_counts_the_others() -> None:
    with pytest.raises(ConfigError, match=r"tp=3.* \(2 more: tools/check_layout\.py"):
        check(of("--parallel.tp", "3"), 8)


def test_microbatches_are_rounded_up() -> None:
    cfg = of("--train.global_batch_size", "10", "--train.micro_batch_size", "1")
    assert [num_microbatches(cfg, dp) for dp in (1, 4, 5, 16)] == [10, 3, 2, 1]


def test_model_facts_are_resolved() -> None:
    facts = facts_of(of().model)
    assert (facts.num_kv_heads, facts.ffn, facts.tied) == (4, 704, True)


def test_the_vocabulary_is_the_tokenizers_unless_it_is_larger() -> None:
    assert resolve_vocab(of(), 2048).model.vocab_size == 2048
    larger = of("--model.vocab_size", "2100")
    assert resolve_vocab(larger, 2048) == larger
    with pytest.raises(ConfigError, match=r"model\.vocab_size: 2000 is less than .*2048.*or 0"):
        resolve_vocab(of("--model.vocab_size", "2000"), 2048)


def test_a_run_is_taken_up_in_another_layout_and_nothing_else(tmp_path: Path) -> None:
    saved = tmp_path / "config.yaml"
    cfg = resolve_vocab(of(), 2048)
    saved.write_text(to_yaml(cfg))
    assert check_same_run(cfg, saved) == []
    free = replace(
        cfg,
        model=replace(cfg.model, preset=""),
        parallel=replace(cfg.parallel, tp=2),
        run=replace(cfg.run, stop_at=3),
    )
    assert check_same_run(free, saved) == [("parallel.tp", 1, 2), ("run.stop_at", 0, 3)]
    other = replace(
        free, optim=replace(cfg.optim, lr=1.0), train=replace(cfg.train, global_batch_size=7)
    )
    with pytest.raises(ConfigError) as caught:
        check_same_run(other, saved)
    text = str(caught.value)
    assert "optim.lr was 0.002 and is 1.0, train.global_batch_size was 8 and is 7" in text
    assert "parallel.tp" not in text and "run.stop_at" not in text


def plan_file(folder: Path, text: str) -> Config:
    path = folder / "plan.txt"
    path.write_text(text)
    flags = ("--parallel.pp", "2", "--train.global_batch_size", "2")
    return of(*flags, "--train.micro_batch_size", "1", "--parallel.schedule", f"file:{path}")


GRID = "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n"


def test_a_schedule_file_is_read_and_proven_before_anything_starts(tmp_path: Path) -> None:
    check(plan_file(tmp_path, GRID), 2)
    found = {
        "1B0 needs 1F0 first": GRID.replace("1F0 1B0", "1B0 1F0"),
        "0F0 repeats 0F0 of step 0": GRID.replace("0F0 0F1", "0F0 0F0"),
        "has 2 ranks, pp=4": GRID,
        "cannot read": "",
    }
    for problem, text in found.items():
        cfg = plan_file(tmp_path, text)
        if problem.startswith("has"):
            cfg = replace(cfg, parallel=replace(cfg.parallel, pp=4))
        if not text:
            (tmp_path / "plan.txt").unlink()
        with pytest.raises(ConfigError, match=problem) as caught:
            check(cfg, 4)
        assert len(str(caught.value).splitlines()) == 1
    assert [e.field for e in violations(cfg, 4)] == ["parallel.schedule"]


def test_sources_have_weights_that_are_1_unless_given() -> None:
    cfg = DataConfig(path=("a/b", "2:c", "0.5:d:e", "x:y", ":z"))
    assert sources(cfg) == [(1.0, "a/b"), (2.0, "c"), (0.5, "d:e"), (1.0, "x:y"), (1.0, ":z")]
    for entry in ("0:a", "-1:a", "nan:a", "inf:a", "2:", ""):
        with pytest.raises(ConfigError, match=r"data\.path"):
            sources(DataConfig(path=(entry,)))


SCRIPT = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from launch.config import check, load_config, report_config_error
from launch.world import world_from_env
from megalite.errors import ConfigError
try:
    check(load_config(sys.argv[1:]), world_from_env().size)
except ConfigError as error:
    report_config_error(error)
assert "torch" not in sys.modules
print("fine")
"""


def run(script: Path, *launcher: str, tp: str = "3") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *launcher, str(script), "--config", TINY, "--parallel.tp", tp],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_one_process_prints_the_message_and_exits_with_2(script: Path) -> None:
    done = run(script)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "world size 1 is not tp=3" in done.stderr


def test_a_good_configuration_needs_no_torch(script: Path) -> None:
    done = run(script, tp="1")
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


def test_under_torchrun_the_message_stands_once_in_the_last_lines(script: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = run(script, *torchrun)
    text = done.stdout + done.stderr
    assert done.returncode not in (0, None)
    message = "world size 4 is not tp=3 x pp=1 x dp: dp would be 1.333"
    assert text.count(message) == 1, text
    assert message in "\n".join(text.splitlines()[-20:])
    assert "NO_OTHER_FAILURES" in text, text


def test_a_rank_that_alone_found_the_error_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from launch.config import report_config_error

    file = tmp_path / "3" / "error.json"
    file.parent.mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr("launch.config.signal.signal", lambda *_: None)
    for told in (True, False):
        with pytest.raises(SystemExit) as caught:
            report_config_error(ConfigError("a.b", "wrong", "Right"), patience_s=0.01)
        assert caught.value.code == 2
        assert (capsys.readouterr().err == "") is told
        if told:
            assert json.loads(file.read_text())["message"]["message"] == "a.b: wrong. Right"
            file.unlink()
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))


def test_every_field_has_a_line_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(["--help"])
    text = capsys.readouterr().out
    for name in values_of(Config()):
        flag = f"--{name.replace('_', '-')} "
        assert text.count(flag) == 1
        after = text.split(flag)[1].split("--")[0]
        assert len(after.split("(default")[0].split()) > 2, f"{name} has no help"


def test_help_is_printed_by_one_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit):
        load_config(["--help"])
    assert capsys.readouterr().out == ""


def test_fewer_ranks_get_the_nearest_legal_layout_with_the_same_batch() -> None:
    cfg = load_config(["--model.num_heads", "4", "--parallel.tp", "2", "--parallel.pp", "2"])
    assert fit(cfg, 8) == cfg
    smaller = fit(cfg, 2)
    assert (smaller.parallel.tp, smaller.parallel.pp) in ((2, 1), (1, 2))
    assert smaller.train == cfg.train and not problems(smaller.parallel, facts_of(cfg.model), 2)
    for world in (1, 2, 3, 5, 6, 7):
        assert not problems(fit(cfg, world).parallel, facts_of(cfg.model), world)


def test_fewer_ranks_leave_out_changes_that_they_cannot_make() -> None:
    changes = ("5:tp=4,pp=1", "9:tp=1")
    cfg = load_config(["--model.num_heads", "4", "--parallel.reconfigure", *changes])
    assert fit(cfg, 8) == cfg and fit(cfg, 4) == cfg
    assert fit(cfg, 2).parallel == replace(cfg.parallel, reconfigure=())
