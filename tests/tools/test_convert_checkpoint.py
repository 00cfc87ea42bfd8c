"""Checkpoints to transformers, to torch, and back."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.files import whole_directory
from data.tokenizer import Tokenizer, train_tokenizer
from launch.build import build
from launch.config import Config
from launch.convert import export_hf
from launch.job import share_text
from launch.run_dir import check_named_checkpoint
from launch.state import Position, find_checkpoint, open_saver, restore, save_state
from megalite.checkpoint.load import open_checkpoint
from megalite.checkpoint.manifest import alone
from megalite.errors import ConfigError
from megalite.mesh import Mesh, Transport
from megalite.parallel_config import mesh_shape
from model import hf_files
from model.config import GPTConfig
from tests.checkpoint.jobs import flip, names_in, rewrite
from tests.model.test_hf import GPT2, LLAMA, load, weights
from tests.parity.harness import TRAIN, config
from tests.ranks import run_ranks
from tools.convert_checkpoint import main

STEP = "step_00000003"
TEXT = Path(__file__).read_text()
# The vocabulary has more rows than the tokenizer has ids, and no even number of them.
VOCAB = 361
MODELS = {
    "gpt2": replace(GPT2, vocab_size=VOCAB),
    "llama": replace(LLAMA, vocab_size=VOCAB),
    "llama, tied, 1 kv head": replace(
        LLAMA, vocab_size=VOCAB, tied_embeddings=True, num_kv_heads=1
    ),
}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (4, {"tp": 2, "pp": 2, "sequence_parallel": True}),
    (2, {"zero1": True}),
]


def config_of(model: GPTConfig, dtype: str = "fp32", **layout: Any) -> Config:
    return config(model, train=replace(TRAIN, dtype=dtype), **layout)  # type: ignore[arg-type]


def saved(transport: Transport, root: Path, layout: dict[str, Any]) -> None:
    """A checkpoint of each kind of model, with known weights."""
    for name, model in MODELS.items():
        cfg = config_of(model, **layout)
        mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
        training = build(cfg, mesh)
        load(weights(model), training)
        saver = open_saver(training, share_text(mesh), root / name / "checkpoints")
        save_state(training, Position(3, 18, 270, 3), saver)
        mesh.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The run directories of each layout."""
    root = tmp_path_factory.mktemp("runs")
    train_tokenizer([TEXT], 360, root / "a.model")
    for n, (ranks, layout) in enumerate(LAYOUTS):
        run_ranks(ranks, saved, root / str(n), layout)
        for name in MODELS:
            (root / str(n) / name / "tokenizer.model").write_bytes((root / "a.model").read_bytes())
    return [root / str(n) for n in range(len(LAYOUTS))]


def checkpoint(run: Path) -> Path:
    return run / "checkpoints" / STEP


def convert(*words: object) -> int:
    return main([str(word) for word in words])


def export(run: Path, out: Path, *more: object) -> Path:
    assert convert("--checkpoint", checkpoint(run), "--to", "hf", "--out", out, *more) == 0
    return out


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


ROWS = torch.randint(0, VOCAB, (3, 16), generator=torch.Generator().manual_seed(3))


def our_logits(path: Path, model: GPTConfig) -> Tensor:
    """(b, s, v) of one process that took up the checkpoint."""
    training = build(config_of(model), Mesh.single())
    restore(training, open_checkpoint(path), alone)
    with torch.no_grad():
        return training.gpt[0](ROWS).transpose(0, 1)


def their_logits(folder: Path) -> Tensor:
    import transformers

    module, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(report.values()), report
    assert module.dtype == torch.float32
    with torch.no_grad():
        logits: Tensor = module(input_ids=ROWS).logits
    return logits


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_every_layout_exports_the_same_files_and_transformers_computes_the_same(
    name: str, runs: list[Path], tmp_path: Path
) -> None:
    import transformers

    folders = [export(run / name, tmp_path / str(n)) for n, run in enumerate(runs)]
    first, *others = map(content, folders)
    assert all(other == first for other in others)
    model = MODELS[name]
    expected = our_logits(checkpoint(runs[0] / name), model)
    assert apart(their_logits(folders[0]), expected) < 1e-5
    rows = {
        key: tensor.shape[0]
        for key, tensor in load_file(folders[0] / "model.safetensors").items()
        if key.endswith(("wte.weight", "embed_tokens.weight", "lm_head.weight"))
    }
    assert set(rows.values()) == {VOCAB} and len(rows) == 2 - model.tied_embeddings
    settings = json.loads(first["config.json"])
    tokenizer = Tokenizer(first["tokenizer.model"])
    assert settings["vocab_size"] == VOCAB > tokenizer.vocab_size > tokenizer.eod
    assert settings["eos_token_id"] == tokenizer.eod
    assert json.loads(first["generation_config.json"])["eos_token_id"] == tokenizer.eod
    theirs = transformers.AutoTokenizer.from_pretrained(folders[0])
    assert theirs(TEXT, truncation=False)["input_ids"] == tokenizer.encode(TEXT)


def transpose(state: dict[str, Tensor]) -> None:
    name = next(
        n for n in state if n.endswith(("0.attn.c_proj.weight", "0.self_attn.o_proj.weight"))
    )
    state[name] = state[name].t().contiguous()


def interleave(state: dict[str, Tensor]) -> None:
    """The other order of rotary pairs: (2i, 2i + 1)."""
    name = "model.layers.0.self_attn.q_proj.weight"
    rows = state[name].view(LLAMA.num_heads, 2, -1, LLAMA.hidden_size)
    state[name] = rows.transpose(1, 2).reshape(state[name].shape).contiguous()


def swap_query_and_key(state: dict[str, Tensor]) -> None:
    name = "transformer.h.0.attn.c_attn.weight"
    q, k, v = state[name].chunk(3, dim=1)
    state[name] = torch.cat([k, q, v], dim=1)


def tie(state: dict[str, Tensor]) -> None:
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()


FAULTS: list[tuple[str, Callable[[dict[str, Tensor]], None]]] = [
    ("gpt2", transpose),
    ("gpt2", swap_query_and_key),
    ("llama", transpose),
    ("llama", interleave),
    ("llama", tie),
]


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_a_wrong_export_is_seen_in_the_logits(
    name: str, fault: Callable[[dict[str, Tensor]], None], runs: list[Path], tmp_path: Path
) -> None:
    folder = export(runs[0] / name, tmp_path / "hf")
    state = load_file(folder / "model.safetensors")
    fault(state)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    expected = our_logits(checkpoint(runs[0] / name), MODELS[name])
    assert apart(their_logits(folder), expected) > 1e-3


def test_an_export_in_several_files_has_an_index_that_is_true(
    runs: list[Path], tmp_path: Path, capsys: Any
) -> None:
    whole = load_file(export(runs[0] / "llama", tmp_path / "whole") / "model.safetensors")
    folder = tmp_path / "cut"
    export_hf(checkpoint(runs[1] / "llama"), folder, max_file_bytes=40_000)
    index = json.loads((folder / hf_files.INDEX).read_text())
    files = sorted(folder.glob("model-*.safetensors"))
    assert len(files) > 2 and len(set(index["weight_map"].values())) == len(files)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    found = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            found.update({key: path.name for key in file.keys()})  # noqa: SIM118
    assert found == index["weight_map"] and found.keys() == whole.keys()
    assert apart(their_logits(folder), their_logits(tmp_path / "whole")) == 0
    assert convert("--from-hf", folder, "--out", tmp_path / "back") == 0
    capsys.readouterr()
    files[1].rename(tmp_path / "away")
    assert convert("--from-hf", folder, "--out", tmp_path / "no") == 2
    assert files[1].name in capsys.readouterr().err
    save_file({"x": torch.zeros(1)}, files[1])
    assert convert("--from-hf", folder, "--out", tmp_path / "no") == 2
    assert "is only in model" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def taken_up(transport: Transport, source: Path, root: Path, cfg: Config) -> None:
    """Begin a run with an import and save it."""
    mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
    training, share = build(cfg, mesh), share_text(mesh)
    found = find_checkpoint(cfg, mesh, root / "checkpoints", share)
    begun = str(source.resolve())
    assert found is not None and restore(training, found, share) == Position(begun=begun)
    save_state(training, Position(3), open_saver(training, share, root / "checkpoints"))
    mesh.close()


@pytest.mark.parametrize("name", MODELS)
def test_an_import_becomes_a_run_in_another_layout_and_the_same_export(
    name: str, runs: list[Path], tmp_path: Path, capsys: Any
) -> None:
    before = export(runs[0] / name, tmp_path / "before")
    assert convert("--from-hf", before, "--out", tmp_path / "import") == 0
    assert f"--checkpoint.resume {tmp_path / 'import'} --model." in capsys.readouterr().out
    assert convert("--verify", tmp_path / "import") == 0
    cfg = config_of(MODELS[name], tp=2, pp=2)
    resume = replace(cfg.checkpoint, resume=str(tmp_path / "import"))
    cfg = replace(cfg, checkpoint=resume)
    check_named_checkpoint(cfg)
    other = replace(cfg, model=replace(cfg.model, rope_theta=1.0))
    with pytest.raises(ConfigError, match="model.rope_theta"):
        check_named_checkpoint(other)
    run = tmp_path / "run"
    run_ranks(4, taken_up, tmp_path / "import", run, cfg)
    (run / "tokenizer.model").write_bytes((tmp_path / "import/tokenizer.model").read_bytes())
    after = export(run, tmp_path / "after")
    assert content(after) == content(before)


def test_an_import_gives_a_bf16_run_the_finer_master_weights(
    runs: list[Path], tmp_path: Path
) -> None:
    model = MODELS["gpt2"]
    export(runs[0] / "gpt2", tmp_path / "hf")
    assert convert("--from-hf", tmp_path / "hf", "--out", tmp_path / "import") == 0
    training = build(config_of(model, "bf16"), Mesh.single())
    restore(training, open_checkpoint(tmp_path / "import"), alone)
    stored = {name: tensor.float() for name, tensor in weights(model).items()}
    for piece in training.flat.weight_pieces():
        assert torch.equal(piece.tensor, stored[piece.name].bfloat16())
    held = {p.name: p.tensor for p in training.optimizer.pieces()}
    for name, tensor in stored.items():
        assert torch.equal(held[f"optim.master.{name}"], tensor)
        assert not torch.equal(tensor.bfloat16().float(), tensor)
        assert not held[f"optim.exp_avg.{name}"].any()


class Bomb:
    """A pickle that makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_is_refused_and_not_read(tmp_path: Path, runs: list[Path], capsys: Any) -> None:
    folder = export(runs[0] / "gpt2", tmp_path / "hf")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    capsys.readouterr()
    assert convert("--from-hf", folder, "--out", tmp_path / "out") == 2
    assert "pytorch_model.bin, a pickle" in capsys.readouterr().err
    assert not (tmp_path / "exploded").exists() and not (tmp_path / "out").exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mistral"}, "model_type: 'mistral' is not supported"),
        ({"sliding_window": 64}, "sliding_window: 64"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling"),
        ({"attention_bias": True}, "mlp_bias"),
        ({"head_dim": 16}, "head_dim"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
    ],
)
def test_what_our_model_does_not_have_is_refused_by_name(
    change: dict[str, Any], words: str, runs: list[Path], tmp_path: Path, capsys: Any
) -> None:
    folder = export(runs[0] / "llama", tmp_path / "hf")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    capsys.readouterr()
    assert convert("--from-hf", folder, "--out", tmp_path / "out") == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_damaged_directories_are_refused_by_file(
    runs: list[Path], tmp_path: Path, capsys: Any
) -> None:
    folder = export(runs[0] / "llama", tmp_path / "hf")
    whole = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"

    def refused(words: str) -> None:
        capsys.readouterr()
        assert convert("--from-hf", folder, "--out", tmp_path / "out") == 2
        assert words in capsys.readouterr().err
        assert names_in(tmp_path) == ["hf"]

    save_file({n: t for n, t in whole.items() if n != name}, folder / "model.safetensors")
    refused(f"{name} is missing")
    save_file({**whole, name: whole[name].t().contiguous()}, folder / "model.safetensors")
    refused(f"{name} has shape")
    save_file({**whole, "model.extra": whole[name].clone()}, folder / "model.safetensors")
    refused("model.extra has no place")
    save_file({**whole, name: whole[name].to(torch.int32)}, folder / "model.safetensors")
    refused(f"{name} is of torch.int32")
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    refused("model.safetensors: ")
    (folder / hf_files.INDEX).write_text(json.dumps({"weight_map": {name: "../x.safetensors"}}))
    refused("no safetensors file beside it")
    (folder / "config.json").write_text("[]")
    refused("config.json holds no settings")


def test_torch_reads_the_weights_by_name(runs: list[Path], tmp_path: Path) -> None:
    for n, run in enumerate(runs):
        out = tmp_path / str(n)
        path = checkpoint(run / "llama")
        assert convert("--checkpoint", path, "--to", "torch", "--out", out) == 0
        state = torch.load(out / "model.pt", weights_only=True)
        expected = weights(MODELS["llama"])
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[k], t.float()) for k, t in expected.items())
        assert json.loads((out / "config.json").read_text()) == asdict(MODELS["llama"])


def test_verify_names_every_bad_file(runs: list[Path], tmp_path: Path, capsys: Any) -> None:
    path = checkpoint(runs[1] / "gpt2")
    assert convert("--verify", path) == 0
    assert "every hash is right" in capsys.readouterr().out
    files = sorted(path.glob("*.safetensors"))
    assert len(files) == 4
    originals = {file: file.read_bytes() for file in files}
    try:
        for file in files[1:3]:
            flip(file)
        assert convert("--verify", path) == 2
        told = capsys.readouterr()
        assert "bad: 2 of them" in told.out
        assert [str(f) in told.err for f in files] == [False, True, True, False]
        files[0].unlink()
        assert convert("--verify", path) == 2
        assert f"error: {files[0]}: No such file" in capsys.readouterr().err
        out = tmp_path / "out"
        assert convert("--checkpoint", path, "--to", "hf", "--out", out) == 2
        assert files[0].name in capsys.readouterr().err and not out.exists()
    finally:
        for file, data in originals.items():
            file.write_bytes(data)
    assert convert("--verify", tmp_path) == 2
    assert convert("--checkpoint", runs[1] / "gpt2", "--to", "torch", "--out", tmp_path / "x") == 2
    assert f"Name a checkpoint, such as {path}" in capsys.readouterr().err


def test_verify_says_what_no_run_could_go_on_from(
    runs: list[Path], tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / checkpoint(runs[1] / "gpt2").name
    shutil.copytree(checkpoint(runs[1] / "gpt2"), path)
    assert convert("--verify", path) == 0 and "note:" not in capsys.readouterr().out
    rewrite(path, lambda doc: doc["extra"].pop("position"))
    assert convert("--verify", path) == 0
    told = capsys.readouterr().out
    assert "every hash is right" in told and "note: no run can go on from it: " in told


def test_an_export_is_there_whole_or_not_at_all(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "out"
    words = ["--checkpoint", checkpoint(runs[0] / "gpt2"), "--to", "hf", "--out", out]
    real = hf_files.write_file

    def full(path: Path, data: Any) -> Any:
        if path.suffix == ".safetensors":
            next(iter(data))
            raise OSError(28, "No space left on device")
        return real(path, data)

    with monkeypatch.context() as patched:
        patched.setattr(hf_files, "write_file", full)
        assert convert(*words) == 2
    assert "No space left" in capsys.readouterr().err and names_in(tmp_path) == []
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial/left").write_text("by a killed one")
    assert convert(*words) == 0 and names_in(tmp_path) == ["out"]
    assert not (out / "left").exists()
    before = content(out)
    assert convert(*words) == 2
    assert "exists already" in capsys.readouterr().err and content(out) == before
    with pytest.raises(ConfigError, match="cannot be written"), whole_directory(out / "x/y/config"):
        (tmp_path / "out/x/y/.config.partial").rmdir()


def test_without_a_tokenizer_the_model_alone_is_exported(
    runs: list[Path], tmp_path: Path, capsys: Any
) -> None:
    own = runs[0] / "gpt2/tokenizer.model"
    aside = own.rename(tmp_path / "aside.model")
    try:
        folder = export(runs[0] / "gpt2", tmp_path / "hf")
        assert "no tokenizer" in capsys.readouterr().out
        assert names_in(folder) == ["config.json", "generation_config.json", "model.safetensors"]
        named = export(runs[0] / "gpt2", tmp_path / "named", "--tokenizer", aside)
        assert "tokenizer.json" in names_in(named)
        big = tmp_path / "big.model"
        train_tokenizer([TEXT], 400, big)
        words = ["--to", "hf", "--out", tmp_path / "no", "--tokenizer", big]
        assert convert("--checkpoint", checkpoint(runs[0] / "gpt2"), *words) == 2
        assert "has 400 tokens, the model 361" in capsys.readouterr().err
    finally:
        aside.rename(own)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--checkpoint", "x", "--out", "y"],
        ["--from-hf", "x"],
        ["--verify", "x", "--out", "y"],
        ["--checkpoint", "x", "--verify", "y"],
        ["--checkpoint", "x", "--to", "onnx", "--out", "y"],
    ],
)
def test_flags_that_do_not_belong_together_are_refused(words: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
