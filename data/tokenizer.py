"""A byte-fallback BPE tokenizer that gives every text back exactly."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from data.files import write_whole
from megalite.errors import ConfigError

EOD_PIECE = "<eod>"
"""The name of the document border; a control symbol, so no text encodes to it."""

SPACE_MARK = "\u2581"
# sentencepiece writes a space as this mark, so the mark itself has to be spelled in bytes. A
# newline is never inside a piece: cutting there changes nothing and bounds the length of a piece
# of work.
_CUT = re.compile(f"([\n{SPACE_MARK}])")
# The trainer drops a line that has one of these.
_CUT_TRAINING = re.compile(f"[\n\r\t\0{SPACE_MARK}\u2585]")
_MAX_LINE = 4096
_SAMPLE_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class TrainedOn:
    """What a tokenizer was trained on: UTF-8 bytes that were used, of all that were read."""

    used_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Piece:
    """An entry of a vocabulary; of the pairs that make a piece, those of the highest score are
    merged first."""

    text: str
    score: float
    control: bool
    byte: bool


class Tokenizer:
    """Text to token ids and back.

    For a tokenizer of ``train_tokenizer``, ``decode(encode(text)) == text`` for every text.
    Any other sentencepiece model that has an end-of-sentence piece works too; its own
    normalisation then applies.
    """

    def __init__(self, model: bytes) -> None:
        """From the bytes of a sentencepiece model.

        Raises:
            ValueError: if they are none, or if it has no end-of-sentence piece.
        """
        processor = _sentencepiece().SentencePieceProcessor
        try:
            self._sp = processor(model_proto=model)
        except (RuntimeError, TypeError) as error:
            raise ValueError("it is no sentencepiece model") from error
        if self._sp.vocab_size() == 0:
            raise ValueError("it is no sentencepiece model")
        self.vocab_size: int = self._sp.vocab_size()
        self.eod: int = self._sp.eos_id()
        self.unknown: int = self._sp.unk_id()
        self.model = model
        self.hash: str = xxhash.xxh3_128_hexdigest(model)
        if not 0 <= self.eod < self.vocab_size:
            raise ValueError("it has no end-of-sentence piece to put between documents")
        self.exact: bool = self._sp.id_to_piece(self.eod) == EOD_PIECE
        self._spelled = {c: self._bytes(c) for c in ("\n", SPACE_MARK)} if self.exact else {}

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a model file.

        Raises:
            ConfigError: if the file is missing, damaged, or not usable.
        """
        fix = "Name a file of tools/train_tokenizer.py"
        try:
            return cls(Path(path).read_bytes())
        except OSError as error:
            problem = error.strerror or str(error)
            raise ConfigError("data.tokenizer", f"{path}: {problem}", fix) from error
        except ValueError as error:
            raise ConfigError("data.tokenizer", f"{path}: {error}", fix) from error

    def encode(self, text: str) -> list[int]:
        """Token ids, without a document border."""
        if not self.exact:
            return list(self._sp.encode(text))
        parts = _CUT.split(text)
        pieces = self._sp.encode(parts[::2], num_threads=1)
        ids: list[int] = list(pieces[0])
        for mark, piece in zip(parts[1::2], pieces[1:], strict=True):
            ids += self._spelled[mark]
            ids += piece
        return ids

    def pieces(self) -> list[Piece]:
        """The vocabulary, by id."""
        sp = self._sp
        return [
            Piece(sp.id_to_piece(i), sp.get_score(i), sp.is_control(i), sp.is_byte(i))
            for i in range(self.vocab_size)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """The text; borders vanish, and bytes that are no UTF-8 become U+FFFD."""
        return str(self._sp.decode([int(i) for i in ids]))

    def _bytes(self, char: str) -> list[int]:
        return [self._sp.piece_to_id(f"<0x{byte:02X}>") for byte in char.encode()]


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, out_path: str | Path, *, max_bytes: int = 64 << 20
) -> TrainedOn:
    """Train a BPE tokenizer with byte fallback and write it to ``out_path``, whole or not at all.

    The same texts give the same file. Of more than ``max_bytes`` of text, an even sample of
    lines is taken, about half of ``max_bytes`` or more, so memory does not grow with the corpus.

    Raises:
        ConfigError: if there is no text, or ``vocab_size`` does not fit to it.
    """
    lines, used, total = _sample(_lines(texts), max_bytes)
    if not lines:
        raise ConfigError("--source", "there is no text to train a tokenizer on", "Name another")
    model = io.BytesIO()
    try:
        _sentencepiece().SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=4 * _MAX_LINE + 1,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            eos_piece=EOD_PIECE,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _vocabulary_error(str(error), vocab_size, used) from error
    Tokenizer(model.getvalue())
    write_whole(Path(out_path), model.getvalue())
    return TrainedOn(used, total)


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """What the trainer may see of each text: lines without the characters that it refuses."""
    for text in texts:
        for line in _CUT_TRAINING.split(text):
            for start in range(0, len(line), _MAX_LINE):
                yield line[start : start + _MAX_LINE]


def _sample(lines: Iterator[str], max_bytes: int) -> tuple[list[str], int, int]:
    """(lines, their bytes, bytes of all lines); halves the share that is kept when full."""
    kept: list[tuple[int, int, str]] = []
    limit, used, total = 1 << 64, 0, 0
    for number, line in enumerate(lines):
        size = len(line.encode())
        total += size
        # A Weyl sequence: evenly spread over the corpus at every limit.
        key = (number + 1) * _SAMPLE_STEP % (1 << 64)
        if key >= limit:
            continue
        kept.append((key, size, line))
        used += size
        while used > max_bytes and len(kept) > 1:
            limit //= 2
            kept = [k for k in kept if k[0] < limit]
            used = sum(k[1] for k in kept)
    return [k[2] for k in kept], used, total


def _vocabulary_error(message: str, vocab_size: int, used: int) -> ConfigError:
    if high := re.search(r"too high \(\d+\).*<= (\d+)", message):
        problem = f"{used} bytes of text do not give {vocab_size} pieces"
        return ConfigError("--vocab-size", problem, f"Use at most {high[1]}, or more text")
    if low := re.search(r"required_chars\. (\d+) vs (\d+)", message):
        problem = f"{vocab_size} pieces cannot hold 256 bytes and the characters of the text"
        return ConfigError("--vocab-size", problem, f"Use at least {int(low[2]) + 1}")
    return ConfigError("--vocab-size", f"sentencepiece refused: {message}", "Use another size")


def _sentencepiece() -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        raise ConfigError(
            "data.tokenizer", "the package sentencepiece is missing", "Run make setup"
        ) from error
    return sentencepiece
