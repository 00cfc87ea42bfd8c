from __future__ import annotations

import io
import random
import sys
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from data.tokenizer import EOD_PIECE, Tokenizer, train_tokenizer
from megalite.errors import ConfigError

TEXT = "In the beginning was the word,\nand the word was 42 words  long.\n\tSo it was.\n" * 3
TRICKY = [
    "",
    " ",
    "\n",
    "\n\n\n",
    " lead",
    "trail ",
    "two  spaces   three",
    "tab\tand\ttab",
    "windows\r\nline",
    "nul\0nul",
    "\ufeffbyte order mark",
    "\u2581 the mark of a space \u2581\u2581",
    "\u2585\u2047",
    "<eod> <s> </s> <unk> <0x0A>",
    "e\u0301 is not \u00e9",
    "\uff21\ufb01 \u2460",
    "emoji \U0001f600\U0001f468\u200d\U0001f469",
    "\u4e2d\u6587 \u0639\u0631\u0628",
    "a\u00a0b\u2003c\u3000d",
    "\U0010ffff\ue000",
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "a.model"
    train_tokenizer([TEXT], 330, path)
    return path


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.load(path)


@pytest.mark.parametrize("text", TRICKY)
def test_a_tricky_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


CHARS = st.integers(0, 0x10FFFF).filter(lambda c: not 0xD800 <= c < 0xE000).map(chr)


@given(text=st.lists(st.one_of(st.sampled_from("\n\t \u2581the"), CHARS)).map("".join))
def test_every_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.eod not in ids and tokenizer.unknown not in ids


def test_sentencepiece_alone_would_lose_its_own_mark(path: Path) -> None:
    plain = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
    assert plain.decode(plain.encode("a\u2581b")) != "a\u2581b"


def test_lines_and_the_whole_encode_alike(tokenizer: Tokenizer) -> None:
    lines = TEXT.splitlines(keepends=True)
    assert tokenizer.encode(TEXT) == [i for line in lines for i in tokenizer.encode(line)]


def test_pieces_are_learned(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(TEXT)) < len(TEXT) / 2


def test_the_border_has_an_id_of_its_own_and_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([tokenizer.eod]) == ""
    assert tokenizer.eod not in tokenizer.encode(EOD_PIECE)


def test_training_twice_gives_one_file(path: Path, tmp_path: Path) -> None:
    train_tokenizer(iter([TEXT]), 330, tmp_path / "b.model")
    assert (tmp_path / "b.model").read_bytes() == path.read_bytes()
    train_tokenizer([TEXT + "other words here"], 330, tmp_path / "c.model")
    assert (tmp_path / "c.model").read_bytes() != path.read_bytes()


def test_a_vocabulary_beyond_the_text_says_what_fits(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--vocab-size: .* do not give 5000 pieces. Use at most"):
        train_tokenizer([TEXT], 5000, tmp_path / "a.model")
    assert not list(tmp_path.iterdir())


def test_a_vocabulary_below_the_bytes_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        train_tokenizer([TEXT], 100, tmp_path / "a.model")
    assert caught.value.field == "--vocab-size"
    least = int(caught.value.fix.removeprefix("Use at least "))
    train_tokenizer([TEXT], least, tmp_path / "a.model")


@pytest.mark.parametrize("texts", [[], [""], ["\n\n"]])
def test_no_text_is_refused(texts: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no text"):
        train_tokenizer(texts, 300, tmp_path / "a.model")


def test_long_lines_and_odd_characters_are_trained_on_too(tmp_path: Path) -> None:
    line = "xyzzyplugh" * 2000
    for text in (line, f"a\t{line}", f"\u2585 {line}"):
        train_tokenizer([text], 280, tmp_path / "a.model")
        assert len(Tokenizer.load(tmp_path / "a.model").encode(line)) < len(line) / 4


def test_a_large_corpus_is_sampled_and_the_rest_counted(tmp_path: Path) -> None:
    words = random.Random(0).choices("lorem ipsum dolor sit amet consectetur".split(), k=20_000)
    text = "\n".join(" ".join(words[i : i + 10]) for i in range(0, len(words), 10))
    trained = train_tokenizer([text], 300, tmp_path / "a.model", max_bytes=20_000)
    assert trained.total_bytes == len(text.replace("\n", ""))
    assert 8_000 < trained.used_bytes <= 20_000
    again = train_tokenizer([text], 300, tmp_path / "b.model", max_bytes=20_000)
    assert again == trained
    assert (tmp_path / "a.model").read_bytes() == (tmp_path / "b.model").read_bytes()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.tokenizer: .*none.model: No such file"):
        Tokenizer.load(tmp_path / "none.model")


@pytest.mark.parametrize("content", [b"", b"no model", b"\x80" * 100])
def test_a_foreign_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.model").write_bytes(content)
    with pytest.raises(ConfigError, match="no sentencepiece model"):
        Tokenizer.load(tmp_path / "a.model")


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.99])
def test_a_truncated_file_is_refused(path: Path, share: float, tmp_path: Path) -> None:
    content = path.read_bytes()
    (tmp_path / "a.model").write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ConfigError, match="data.tokenizer"):
        Tokenizer.load(tmp_path / "a.model")


def other_model(**more: object) -> bytes:
    """A model that was not trained by ``train_tokenizer``."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=model,
        vocab_size=60,
        model_type="bpe",
        minloglevel=2,
        **more,
    )
    return model.getvalue()


def test_a_model_without_an_end_piece_is_refused() -> None:
    with pytest.raises(ValueError, match="no end-of-sentence piece"):
        Tokenizer(other_model(eos_id=-1))


def test_another_model_works_with_its_own_rules() -> None:
    tokenizer = Tokenizer(other_model())
    assert tokenizer.decode(tokenizer.encode("the word")) == "the word"
    assert tokenizer.unknown in tokenizer.encode("\u4e2d")


def test_without_the_package_the_advice_is_one_line(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ConfigError, match="sentencepiece is missing. Run make setup") as caught:
        Tokenizer.load(path)
    assert "\n" not in str(caught.value)
