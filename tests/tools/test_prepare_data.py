from __future__ import annotations

import json
from pathlib import Path

import pytest

from data.dataset import TokenDataset
from tools import prepare_data, train_tokenizer


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    rows = [{"body": f"This is document number {i}.\nIt has two lines.\n"} for i in range(50)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare(*arguments: object) -> int:
    return prepare_data.main([str(a) for a in arguments])


def test_a_corpus_goes_from_a_file_to_shards_that_verify(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "t.model", tmp_path / "shards"
    common = ["--source", str(corpus), "--column", "body"]
    assert train_tokenizer.main([*common, "--vocab-size", "320", "--out", str(model)]) == 0
    assert f"{model}: 320 pieces from " in capsys.readouterr().out
    assert prepare(*common, "--tokenizer", model, "--out", out, "--val-fraction", 0.1) == 0
    assert "held out: 5 of 50 documents" in capsys.readouterr().out
    train, val = (TokenDataset.open(out, split) for split in ("train", "val"))
    assert (train.split.num_documents, val.split.num_documents) == (45, 5)
    assert train.utf8_bytes + val.utf8_bytes == sum(
        len(json.loads(line)["body"]) for line in corpus.read_text().splitlines()
    )
    assert prepare("--verify", out) == 0
    shard = out / "train_00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    capsys.readouterr()
    assert prepare("--verify", out) == 2
    assert "train_00000.bin: it has " in capsys.readouterr().err


def test_a_tokenizer_can_be_trained_on_the_way(corpus: Path, tmp_path: Path) -> None:
    common = ["--source", corpus, "--column", "body", "--out", tmp_path / "a"]
    assert prepare(*common, "--vocab-size", 320) == 0
    assert TokenDataset.open(tmp_path / "a").manifest.vocab_size == 320


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "x", "--tokenizer", "t"], "--source: it is missing"),
        (["--source", "x", "--tokenizer", "t"], "--out: it is missing"),
        (["--source", "x", "--out", "y"], "--tokenizer: exactly one of"),
        (["--source", "x", "--out", "y", "--tokenizer", "none"], "data.tokenizer: none: No such"),
        (["--source", "none.txt", "--out", "y", "--vocab-size", "300"], "--source: none.txt does"),
        (["--verify", "none"], "data.path: none: there are no prepared shards"),
    ],
)
def test_bad_input_exits_2_with_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert prepare(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
    assert not (tmp_path / "y").exists()


def test_a_tokenizer_of_nothing_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("short")
    arguments = ["--source", str(tmp_path / "a.txt"), "--out", str(tmp_path / "t")]
    assert train_tokenizer.main([*arguments, "--vocab-size", "9000"]) == 2
    assert "error: --vocab-size: " in capsys.readouterr().err
    assert not (tmp_path / "t").exists()
