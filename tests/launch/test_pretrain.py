from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from megalite.metrics import RunLock
from tests.launch.command import (
    ROOT,
    SMALL,
    TINY,
    TRAIN,
    launcher,
    metrics,
    run,
    train,
)

EQUAL = ("step", "loss", "grad_norm", "lr", "tokens", "samples", "skipped")
THREE_D = [
    *("--parallel.tp", "2", "--parallel.pp", "2", "--parallel.sequence_parallel", "True"),
    *("--parallel.schedule", "interleaved_1f1b", "--parallel.virtual_stages", "2"),
]


def assert_same_lines(got: Path, expected: Path, tolerance: float = 1e-10) -> None:
    ours, theirs = metrics(got), metrics(expected)
    assert [line["step"] for line in ours] == list(range(1, len(theirs) + 1))
    for a, b in zip(ours, theirs, strict=True):
        for key in EQUAL:
            bound = tolerance * abs(b[key]) if key in ("loss", "grad_norm") else 0
            assert abs(a[key] - b[key]) <= bound, f"step {b['step']}: {key} {a[key]} != {b[key]}"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 steps of one process that nothing stopped."""
    out = tmp_path_factory.mktemp("alone")
    done = train(1, out, "--train.steps", "50")
    assert done.code == 0, done.output
    return out


def test_a_three_dimensional_run_writes_the_lines_of_one_process(
    alone: Path, tmp_path: Path
) -> None:
    done = train(8, tmp_path, *THREE_D, "--train.steps", "50")
    assert done.code == 0, done.output
    assert_same_lines(tmp_path, alone)


def test_lines_that_differ_are_seen(alone: Path, tmp_path: Path) -> None:
    other, start = tmp_path / "other", tmp_path / "start"
    flags = ["--train.steps", "50", "--run.stop_at", "2"]
    done = train(1, other, *flags, "--train.seed", "7")
    assert done.code == 0, done.output
    start.mkdir()
    lines = (alone / "metrics.jsonl").read_text().splitlines(keepends=True)
    (start / "metrics.jsonl").write_text("".join(lines[:2]))
    with pytest.raises(AssertionError, match="step 1: loss"):
        assert_same_lines(other, start)


def test_a_run_goes_on_in_another_layout_as_if_nothing_had_happened(
    alone: Path, tmp_path: Path
) -> None:
    steps = ["--train.steps", "50", "--checkpoint.every", "10"]
    behind = ["--checkpoint.async_save", "True"]
    first = train(4, tmp_path, *steps, *THREE_D[:4], "--run.stop_at", "10", *behind)
    assert first.code == 0, first.output
    assert len(metrics(tmp_path)) == 10
    # The lines of steps after the checkpoint, as a killed run leaves them, must not stand twice.
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 11, "loss": 0}\n{"step": 12, "lo')
    second = train(4, tmp_path, *steps, "--parallel.pp", "4", *behind)
    assert second.code == 0, second.output
    assert "taking up" in second.output and "going on from" in second.output
    assert_same_lines(tmp_path, alone)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step_00000040", "step_00000050"]


def test_a_run_goes_on_in_another_layout_with_and_without_zero1(
    alone: Path, tmp_path: Path
) -> None:
    steps = ["--train.steps", "50", "--checkpoint.every", "10"]
    zero = ["--parallel.zero1", "True"]
    for ranks, flags in (
        (3, [*zero, "--run.stop_at", "10"]),
        (2, ["--run.stop_at", "20"]),
        (4, [*zero, "--parallel.pp", "2"]),
    ):
        done = train(ranks, tmp_path, *steps, *flags)
        assert done.code == 0, done.output
        assert ("(ZeRO-1)" in done.output) == ("--parallel.zero1" in flags)
    assert_same_lines(tmp_path, alone)


def test_dropout_documents_and_recompute_go_on_in_another_layout(tmp_path: Path) -> None:
    flags = ["--train.steps", "8", "--model.dropout", "0.1", "--data.reset_at_document", "True"]
    once = train(1, tmp_path / "once", *flags)
    assert once.code == 0, once.output
    parted = tmp_path / "parted"
    stop = ["--checkpoint.every", "5", "--run.stop_at", "5", "--parallel.recompute", "full"]
    first = train(4, parted, *flags, *THREE_D, *stop)
    assert first.code == 0, first.output
    other = ["--parallel.pp", "2", "--parallel.schedule", "zb_h1", "--train.micro_batch_size", "1"]
    second = train(2, parted, *flags, *other, "--parallel.recompute", "selective")
    assert second.code == 0, second.output
    assert_same_lines(parted, tmp_path / "once")
    without = train(1, tmp_path / "without", "--train.steps", "1")
    assert without.code == 0, without.output
    assert metrics(tmp_path / "without")[0]["loss"] != metrics(parted)[0]["loss"]


def test_bf16_trains_evaluates_and_samples(tmp_path: Path) -> None:
    flags = ["--train.dtype", "bf16", "--train.steps", "3", "--train.eval_every", "2"]
    flags += ["--parallel.pp", "2", "--parallel.zero1", "True"]
    done = train(4, tmp_path, *flags, "--train.eval_batches", "1", as_user=True)
    assert done.code == 0, done.output
    assert done.output.count("held-out loss") == 2
    assert "sampled from the model" in done.output
    assert f"files of this run: {tmp_path}" in done.output


BAD = {
    "world": (["--parallel.tp", "3"], "parallel.tp", "4"),
    "heads": (["--parallel.tp", "4", "--model.num_heads", "2"], "num_heads", "tp=4"),
    "layers": (["--parallel.pp", "2", "--model.num_layers", "1"], "model.num_layers=1", "2 stages"),
    "unknown": (["--parallel.tpp", "2"], "parallel.tpp", "parallel.tp"),
    "nested": (["--train.lr", "0.1"], "train.lr", "optim.lr"),
    "value": (["--train.seed", "many"], "train.seed", "many"),
    "shards": (["--data.path", "/nowhere"], "data.path", "/nowhere"),
    "tokenizer": (["--data.tokenizer", "/nowhere.model"], "data.tokenizer", "/nowhere.model"),
    "apex": (["--optim.backend", "apex"], "optim.backend", "optim.backend=torch"),
    "dropout": (["--model.dropout", "1.0"], "model.dropout", "not in [0, 1)"),
}


@pytest.mark.parametrize("flags,field,words", BAD.values(), ids=BAD.keys())
def test_a_bad_input_is_one_clear_error_and_nothing_is_written(
    flags: list[str], field: str, words: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    env = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    done = train(1, out, *flags, "--train.steps", "2", **env)
    assert done.code == 2, done.output
    assert field in done.output and words in done.output
    assert "Traceback" not in done.output and len(done.output.splitlines()) <= 3
    assert not out.exists()


def test_under_torchrun_the_message_stands_once_among_the_last_lines(tmp_path: Path) -> None:
    began = time.monotonic()
    done = train(4, tmp_path / "run", "--parallel.tp", "3", "--train.steps", "2", as_user=True)
    assert done.code != 0 and time.monotonic() - began < 30
    message = "world size 4 is not tp=3"
    assert done.output.count(message) == 1, done.output
    assert message in done.last_lines()
    assert not (tmp_path / "run").exists()


def test_a_run_dir_that_holds_another_run_is_refused(alone: Path) -> None:
    before = (alone / "metrics.jsonl").read_bytes()
    done = train(1, alone, "--train.steps", "50", "--optim.lr", "0.5")
    assert done.code == 2
    assert "optim.lr was 0.002 and is 0.5" in done.output
    assert (alone / "metrics.jsonl").read_bytes() == before


def test_a_foreign_apex_is_named(tmp_path: Path) -> None:
    package = tmp_path / "site" / "apex"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ModuleNotFoundError('velruse')")
    flags = ["--optim.backend", "apex", "--train.steps", "1"]
    done = train(1, tmp_path / "run", *flags, PYTHONPATH=str(tmp_path / "site"))
    assert done.code == 2 and "not NVIDIA's" in done.output
    done = train(1, tmp_path / "run", "--train.steps", "1", PYTHONPATH=str(tmp_path / "site"))
    assert done.code == 0 and "AdamW (torch)" in done.output, done.output
    assert "not NVIDIA's" in done.output


def processes_naming(text: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if text in command:
                found.append(command)
    return found


def test_a_rank_that_raises_ends_the_job_with_its_own_error_last(tmp_path: Path) -> None:
    out = tmp_path / "run"
    script = ["tests/launch/failing.py", *TINY, *SMALL, "--run.dir", str(out)]
    flags = ["--train.steps", "1000", "--parallel.tp", "2", "--parallel.pp", "2"]
    began = time.monotonic()
    done = run([*launcher(4), *script, *flags])
    assert done.code != 0 and time.monotonic() - began < 60
    assert "ZeroDivisionError: planted in rank 2" in done.last_lines(), done.output
    assert not processes_naming(str(out))
    assert len(metrics(out)) <= 2


def test_a_clean_run_leaves_no_process_and_says_nothing_alarming(tmp_path: Path) -> None:
    flags = ["--train.steps", "2", "--parallel.tp", "2"]
    done = train(2, tmp_path / "run", *flags, as_user=True)
    assert done.code == 0, done.output
    for word in ("warn", "Traceback", "terminate", "leaked", "destroy"):
        assert word not in done.output, done.output
    assert not processes_naming(str(tmp_path / "run"))


def test_help_is_readable_and_starts_nothing() -> None:
    done = run([sys.executable, TRAIN, "--help"])
    assert done.code == 0 and "--parallel.tp" in done.output


def test_a_directory_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("somebody's\n")
    done = train(1, tmp_path, "--train.steps", "1")
    assert done.code == 2 and "run.dir" in done.output and "metrics.jsonl" in done.output
    assert (tmp_path / "metrics.jsonl").read_text() == "somebody's\n"
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_without_its_config_is_not_taken_up(tmp_path: Path) -> None:
    steps = ["--train.steps", "2", "--checkpoint.every", "1"]
    assert train(1, tmp_path, *steps, "--run.stop_at", "1").code == 0
    (tmp_path / "config.yaml").unlink()
    done = train(1, tmp_path, *steps, "--optim.lr", "0.5")
    assert done.code == 2 and "checkpoints" in done.output and "config.yaml" in done.output


def test_shards_that_were_prepared_anew_are_not_mistaken_for_the_old(tmp_path: Path) -> None:
    def prepare(word: str) -> None:
        text = tmp_path / "text.txt"
        text.write_text("\n".join(f"{word} number {i}" for i in range(3000)))
        command = ["tools/prepare_data.py", "--source", str(text), "--out", str(tmp_path / "mine")]
        done = run([sys.executable, *command, "--tokenizer", "corpora/embedded/tokenizer.model"])
        assert done.code == 0, done.output

    prepare("first")
    steps = ["--train.steps", "2", "--checkpoint.every", "1", "--data.path", str(tmp_path / "mine")]
    assert train(1, tmp_path / "run", *steps, "--run.stop_at", "1").code == 0
    shutil.rmtree(tmp_path / "mine")
    prepare("second")
    done = train(1, tmp_path / "run", *steps)
    assert done.code == 2 and "data.path" in done.output and "prepared anew" in done.output


def test_a_checkpoint_of_another_model_is_refused_and_one_that_fits_is_taken(
    tmp_path: Path,
) -> None:
    steps = ["--train.steps", "2", "--checkpoint.every", "1"]
    assert train(1, tmp_path / "a", *steps).code == 0
    resume = ["--checkpoint.resume", str(tmp_path / "a/checkpoints/step_00000001")]
    done = train(1, tmp_path / "b", *steps, *resume, "--model.num_layers", "2")
    assert done.code == 2 and "model.num_layers" in done.output and not (tmp_path / "b").exists()
    assert train(1, tmp_path / "b", *steps, *resume).code == 0
    assert metrics(tmp_path / "b")[-1]["loss"] == metrics(tmp_path / "a")[-1]["loss"]
    nowhere = train(1, tmp_path / "c", *steps, "--checkpoint.resume", str(tmp_path))
    assert nowhere.code == 2 and "checkpoint.resume" in nowhere.output


def test_a_model_may_have_more_rows_than_the_tokenizer_has_tokens(tmp_path: Path) -> None:
    flags = ["--model.vocab_size", "5000", "--train.steps", "1", "--train.eval_every", "1"]
    done = train(1, tmp_path, *flags, "--train.eval_batches", "1")
    assert done.code == 0 and "sampled from the model" in done.output, done.output


def test_kill_9_of_the_launcher_leaves_no_process(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [*launcher(2), TRAIN, *TINY, *SMALL, "--run.dir", str(out)]
    flags = ["--train.steps", "100000", "--parallel.pp", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        [*command, *flags],
        cwd=ROOT,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    deadline = time.monotonic() + 90
    while not (out / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert len(processes_naming(str(out))) >= 3
    job.kill()
    job.wait()
    while processes_naming(str(out)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not processes_naming(str(out))


@pytest.mark.parametrize("place", ["file/run", "file", "x" * 300])
def test_a_run_dir_that_cannot_be_is_named_before_anything_starts(
    place: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    done = train(1, tmp_path / place, "--train.steps", "1")
    assert done.code == 2 and "run.dir" in done.output and "Traceback" not in done.output


def test_a_run_whose_checkpoints_are_all_bad_ends_with_one_clear_error(tmp_path: Path) -> None:
    steps = ["--train.steps", "2", "--checkpoint.every", "1"]
    assert train(1, tmp_path, *steps, "--run.stop_at", "1").code == 0
    (file,) = (tmp_path / "checkpoints/step_00000001").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    done = train(1, tmp_path, *steps)
    assert done.code == 2 and file.name in done.output and "Traceback" not in done.output
    assert len(metrics(tmp_path)) == 1


def test_two_jobs_in_one_run_dir_are_told_apart(tmp_path: Path) -> None:
    with closing(RunLock(tmp_path / "run")):
        done = train(1, tmp_path / "run", "--train.steps", "1")
    assert done.code == 2 and "is written by process" in done.output
    assert "Traceback" not in done.output


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_gpt2_small_trains_at_full_length_in_tp_and_pp(alone: Path, tmp_path: Path) -> None:
    """After ``alone``, the embedded corpus lies packed where the small configuration has it."""
    flags = {
        "--config": "launch/configs/gpt2_124m.yaml",
        "--data.path": "corpora/embedded",
        "--parallel.tp": "2",
        "--parallel.pp": "2",
        "--parallel.sequence_parallel": "True",
        "--parallel.partition": "balanced",
        "--train.steps": "50",
        "--train.global_batch_size": "2",
        "--train.micro_batch_size": "1",
        "--train.eval_every": "0",
        "--optim.warmup_steps": "5",
        "--checkpoint.every": "0",
        "--run.dir": str(tmp_path),
        "--run.wandb": "disabled",
    }
    words = [word for pair in flags.items() for word in pair]
    done = run([*launcher(4), TRAIN, *words], timeout_s=3500)
    assert done.code == 0, done.output
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 51))
    losses = [line["loss"] for line in lines]
    assert losses[0] == pytest.approx(10.8, abs=0.3)  # log of 50257 words
    assert sum(losses[-5:]) / 5 < 0.75 * losses[0]
