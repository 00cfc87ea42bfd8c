"""transformers encodes every text to the ids of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from data.hf_tokenizer import hf_files
from data.tokenizer import Tokenizer, train_tokenizer
from tests.data.test_tokenizer import CHARS, TEXT, TRICKY

CORPUS = Path(__file__).read_text() + TEXT


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "a.model"
    train_tokenizer([CORPUS], 420, path)
    return Tokenizer.load(path)


def load(folder: Path, files: dict[str, bytes]) -> Any:
    import transformers

    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def theirs(ours: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(tmp_path_factory.mktemp("hf") / "a", hf_files(ours, 1 << 20))


@pytest.mark.parametrize("text", [*TRICKY, CORPUS, "aaaaaaaaaaaaa" * 9, "<unk><eod> <0xE2>"])
def test_a_tricky_text_has_the_same_ids_and_comes_back(
    ours: Tokenizer, theirs: Any, text: str
) -> None:
    assert theirs(text)["input_ids"] == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text


@given(
    text=st.lists(st.one_of(st.sampled_from([*"\n\t \u2581aeinorst", *CORPUS.split()]), CHARS)).map(
        "".join
    )
)
def test_every_text_has_the_same_ids(ours: Tokenizer, theirs: Any, text: str) -> None:
    assert theirs(text)["input_ids"] == ours.encode(text)


def test_borders_and_sizes_are_known(ours: Tokenizer, theirs: Any) -> None:
    assert (theirs.eos_token_id, theirs.unk_token_id) == (ours.eod, ours.unknown)
    assert len(theirs) == ours.vocab_size and theirs.model_max_length == 1 << 20
    assert theirs.decode([*ours.encode("a b"), ours.eod], skip_special_tokens=True) == "a b"


def swap_two_merges(content: dict[str, Any]) -> None:
    merges = content["model"]["merges"]
    merges[0], merges[3] = merges[3], merges[0]


def keep_marks(content: dict[str, Any]) -> None:
    vocab = content["model"]["vocab"]
    content["model"]["vocab"] = {name.replace(" ", "\u2581"): i for name, i in vocab.items()}
    pairs = content["model"]["merges"]
    content["model"]["merges"] = [[p.replace(" ", "\u2581") for p in pair] for pair in pairs]
    content["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}


@pytest.mark.parametrize("fault", [swap_two_merges, keep_marks])
def test_a_wrong_conversion_is_seen(
    ours: Tokenizer, tmp_path: Path, fault: Callable[[dict[str, Any]], None]
) -> None:
    files = hf_files(ours, 64)
    content = json.loads(files["tokenizer.json"])
    fault(content)
    files["tokenizer.json"] = json.dumps(content).encode()
    other = load(tmp_path / "a", files)
    texts = [*TRICKY, CORPUS]
    assert any(other(text, truncation=False)["input_ids"] != ours.encode(text) for text in texts)


def test_of_a_foreign_tokenizer_only_its_own_file_is_given(tmp_path: Path) -> None:
    prefix = str(tmp_path / "foreign")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.splitlines()),
        model_prefix=prefix,
        vocab_size=150,
        model_type="bpe",
        minloglevel=2,
    )
    tokenizer = Tokenizer.load(prefix + ".model")
    assert hf_files(tokenizer, 64) == {"tokenizer.model": tokenizer.model}
