"""``launch/generate.py``: any checkpoint, any layout, one text."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.tokenizer import Tokenizer, train_tokenizer
from launch.build import build
from launch.config import Config
from launch.generate import check_text, main
from launch.job import share_text
from launch.sample import load_decoder, sample
from launch.state import Position, open_saver, save_state
from megalite.checkpoint.load import open_checkpoint
from megalite.checkpoint.manifest import alone
from megalite.errors import ConfigError
from megalite.mesh import DONE, Axis, Mesh, Transport
from megalite.parallel_config import mesh_shape
from model.config import GPTConfig
from model.generate import Decoder, Sampling, generate
from tests.checkpoint.jobs import flip
from tests.launch.command import launcher, run
from tests.model.test_hf import GPT2, LLAMA, load, weights
from tests.parity.harness import TRAIN, config
from tests.ranks import run_ranks

VOCAB, IDS, EOD = 361, 360, 1
TEXT = Path(__file__).read_text()
MODELS = {
    "gpt2": replace(GPT2, vocab_size=VOCAB, num_layers=4),
    "llama": replace(LLAMA, vocab_size=VOCAB, num_layers=4),
}
PROMPTS = [[17, 111, 200], [40, 41, 42, 43, 44, 45, 46], [9]]
LAYOUTS: dict[str, list[dict[str, int]]] = {
    "gpt2": [{"tp": 2, "pp": 2}, {"pp": 4}, {"tp": 2}, {}],
    "llama": [{"tp": 4}, {"tp": 2, "pp": 2}],  # 2 kv heads
}
DRAWN = Sampling(0.8, top_k=60, top_p=0.95, seed=11, num_ids=IDS)
GREEDY = Sampling(0.0, num_ids=IDS)


def config_of(model: GPTConfig, dtype: str, **layout: Any) -> Config:
    return config(model, train=replace(TRAIN, dtype=dtype), **layout)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory of each model: a checkpoint in bf16 and the tokenizer."""
    root = tmp_path_factory.mktemp("generate")
    for name, model in MODELS.items():
        training = build(config_of(model, "bf16"), Mesh.single())
        load(weights(model), training)
        save_state(training, Position(2), open_saver(training, alone, root / name / "checkpoints"))
        train_tokenizer([TEXT], IDS, root / name / "tokenizer.model")
    return root


def checkpoint(root: Path, name: str) -> Path:
    return root / name / "checkpoints/step_00000002"


def texts(model: Decoder, mesh: Mesh, sampling: Sampling, stops: set[int]) -> dict[int, list[int]]:
    """What this replica makes of its prompts."""
    mine = range(mesh.dp.index, len(PROMPTS), mesh.dp.size)
    prompts = [PROMPTS[n] for n in mine]
    found = generate(model, prompts, 14, sampling, stop=stops.__contains__, numbers=mine)
    return dict(zip(mine, found, strict=True))


def in_layouts(
    transport: Transport, root: Path, stops: dict[str, set[int]]
) -> list[dict[int, list[int]]]:
    """Of every model and layout, greedy and drawn."""
    found = []
    for name, model in MODELS.items():
        stored = open_checkpoint(checkpoint(root, name), verify="none")
        for layout in LAYOUTS[name]:
            cfg = config_of(model, "fp32", **layout)
            mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
            loaded = load_decoder(cfg, mesh, stored, share_text(mesh), EOD)
            found += [texts(loaded, mesh, how, stops[name]) for how in (GREEDY, DRAWN)]
            mesh.close()
    return found


def serial(root: Path, name: str, stops: set[int]) -> list[dict[int, list[int]]]:
    mesh = Mesh.single()
    stored = open_checkpoint(checkpoint(root, name), verify="none")
    loaded = load_decoder(config_of(MODELS[name], "fp32"), mesh, stored, alone, EOD)
    return [texts(loaded, mesh, how, stops) for how in (GREEDY, DRAWN)]


def test_every_layout_gives_the_text_of_one_process(root: Path) -> None:
    free = {name: serial(root, name, set()) for name in MODELS}
    stops = {name: {texts[0][5], texts[1][11]} for name, (texts, _) in free.items()}
    expected = [
        each for name in MODELS for _ in LAYOUTS[name] for each in serial(root, name, stops[name])
    ]
    assert len({len(text) for each in expected for text in each.values()}) > 2
    assert all(max(text, default=0) < IDS for each in expected for text in each.values())
    for rank in run_ranks(4, in_layouts, root, stops):
        assert len(rank) == len(expected)
        for got, want in zip(rank, expected, strict=True):
            assert got == {n: want[n] for n in got}
    drawn = free["gpt2"][1]
    assert drawn[0] != free["gpt2"][0][0]


def noisy(transport: Transport, root: Path, told: bool) -> list[list[int]]:
    """Ranks whose logits differ, as they may in the last bits; ``told`` what is chosen, or not."""
    cfg = config_of(MODELS["gpt2"], "fp32", tp=2)
    mesh = Mesh.create(mesh_shape(cfg.parallel, 2), transport)
    stored = open_checkpoint(checkpoint(root, "gpt2"), verify="none")
    loaded = load_decoder(cfg, mesh, stored, share_text(mesh), EOD)
    real = Decoder.gathered
    draw = torch.Generator().manual_seed(mesh.rank)

    def differing(self: Decoder, logits: Tensor) -> Tensor:
        whole = real(self, logits)
        return whole + torch.randn(whole.shape, generator=draw)

    Decoder.gathered = differing  # type: ignore[method-assign]
    if not told:
        Axis.broadcast = lambda *_: DONE  # type: ignore[method-assign]
    found = generate(loaded, PROMPTS, 8, DRAWN)
    mesh.close()
    return found


def test_ranks_whose_logits_differ_agree_on_the_token(root: Path) -> None:
    first, second = run_ranks(2, noisy, root, True)
    assert first == second
    first, second = run_ranks(2, noisy, root, False)
    assert first != second


def sampled(transport: Transport, layout: dict[str, Any]) -> list[int]:
    cfg = config_of(MODELS["llama"], "fp32", **layout)
    mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
    training = build(cfg, mesh, eod=EOD)
    load(weights(MODELS["llama"]), training)
    found = sample(training, [EOD], 20, IDS, seed=3)
    mesh.close()
    return found


def test_a_model_in_training_samples_the_same_in_every_layout() -> None:
    first = run_ranks(1, sampled, {})[0]
    assert len(first) == 20
    v2 = {"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}
    for layout in ({"tp": 2, "sequence_parallel": True}, v2, {"zero1": True}):
        assert run_ranks(2, sampled, layout) == [first, first]


def words(root: Path, *more: object) -> list[str]:
    path = checkpoint(root, "llama")
    return ["--checkpoint", str(path), "--max-new-tokens", "12", *map(str, more)]


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_the_command_goes_on_with_prompts(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(words(root, "--prompt", "def test", "", "--temperature", 0, "--json"))
    told = capsys.readouterr()
    found = lines(told.out)
    tokenizer = Tokenizer.load(root / "llama/tokenizer.model")
    mesh = Mesh.single()
    stored = open_checkpoint(checkpoint(root, "llama"))
    model = load_decoder(config_of(MODELS["llama"], "fp32"), mesh, stored, alone, EOD)
    ids = [tokenizer.encode("def test"), [tokenizer.eod]]
    expected = generate(model, ids, 12, GREEDY, stop=lambda token: token == EOD)
    assert [line["tokens"] for line in found] == expected
    assert [line["text"] for line in found] == [tokenizer.decode(text) for text in expected]
    assert [line["prompt"] for line in found] == ["def test", ""]
    main(words(root, "--prompt=def test", "--temperature=0", "--top_k", 5))
    assert capsys.readouterr().out == f"def test{found[0]['text']}\n"
    main(words(root, "--prompt", "a" * 40, "--prompt", "b"))
    told = capsys.readouterr()
    assert "are more than the model's context; it sees the last 16" in told.err
    assert told.out.startswith("[1] " + "a" * 40) and "\n[2] b" in told.out


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--prompt", "a", "--parallel.tp", 2], "parallel.tp: world size 1 is not tp=2"),
        (["--prompt", "a", "--temperature", -1], "--temperature: -1.0 is out of range"),
        (["--prompt", "a", "--top-p", 0], "--top-p: 0.0 is out of range"),
        (["--prompt", "a", "--tokenizer", "none"], "--tokenizer: none: No such file"),
        (["--prompt", "a", "--colour", "red"], "flags: unrecognized arguments: --colour red"),
        ([], "flags: the following arguments are required: --prompt"),
    ],
)
def test_bad_input_is_named_with_exit_code_2(
    more: list[object], expected: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words(root, *more))
    assert expected in capsys.readouterr().err


def test_a_prompt_that_is_no_text_is_named() -> None:
    check_text(["", "plain", "\u00e9\u4e16"])
    with pytest.raises(ConfigError, match="--prompt: number 2 is no UTF-8 at 3"):
        check_text(["plain", "abc\udcff"])


def test_a_damaged_checkpoint_is_named_before_a_word_is_said(root: Path, tmp_path: Path) -> None:
    path = checkpoint(root, "gpt2")
    (file,) = path.glob("*.safetensors")
    copy = tmp_path / path.name
    copy.mkdir()
    for each in path.iterdir():
        (copy / each.name).write_bytes(each.read_bytes())
    flip(copy / file.name)
    flags = ["--prompt", "a", "--max-new-tokens", "3", "--tokenizer"]
    tokenizer = str(root / "gpt2/tokenizer.model")
    command = [sys.executable, "launch/generate.py", "--checkpoint", str(copy), *flags, tokenizer]
    done = run(command)
    assert done.code == 2 and f"--checkpoint: {copy / file.name}: is damaged" in done.last_lines(3)


@pytest.mark.full
def test_torchrun_prints_what_one_process_prints(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = words(root, "--prompt", "def test", "import", "--seed", 5, "--json")
    main(flags)
    expected = lines(capsys.readouterr().out)
    assert len(expected) == 2
    layout = ["--parallel.tp", "2", "--parallel.pp", "2"]
    done = run([*launcher(4), "launch/generate.py", *flags, *layout])
    assert done.code == 0 and lines(done.output) == expected, done.output
    bad = run([*launcher(2), "launch/generate.py", *flags, *layout])
    assert "world size 2 is not tp=2 x pp=2" in bad.last_lines()
