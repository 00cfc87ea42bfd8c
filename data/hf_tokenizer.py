"""A tokenizer of ours in the files that ``transformers`` loads, with the same ids for every text.

sentencepiece writes a space as a mark, so ours spells the mark itself in bytes. Here the pieces
have plain spaces in its place: nothing is normalised, the mark is no piece, and what is no piece
is spelled in bytes, as newlines are.
"""

from __future__ import annotations

import json
from typing import Any

from data.manifest import TOKENIZER
from data.tokenizer import SPACE_MARK, Tokenizer


def hf_files(tokenizer: Tokenizer, context: int) -> dict[str, bytes]:
    """The content of tokenizer.json, tokenizer_config.json and the sentencepiece model, by name.

    Of a tokenizer that ``train_tokenizer`` did not make, whose normalisation is not known here,
    only the sentencepiece model.

    Args:
        context: the most tokens that the model sees.
    """
    found = {TOKENIZER: tokenizer.model}
    if tokenizer.exact:
        found["tokenizer.json"] = _json(_tokenizer(tokenizer))
        found["tokenizer_config.json"] = _json(_settings(tokenizer, context))
    return found


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode()


def _settings(tokenizer: Tokenizer, context: int) -> dict[str, Any]:
    names = _names(tokenizer)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": names[tokenizer.eod],
        "unk_token": names[tokenizer.unknown],
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        # Text that looks like a border is text: no text encodes to the border.
        "split_special_tokens": True,
    }


def _names(tokenizer: Tokenizer) -> list[str]:
    return [piece.text.replace(SPACE_MARK, " ") for piece in tokenizer.pieces()]


def _tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    names, special = _names(tokenizer), sorted({tokenizer.unknown, tokenizer.eod})
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": names[i], **flags, "special": True} for i in special],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": names[tokenizer.unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {name: i for i, name in enumerate(names)},
            "merges": _merges(tokenizer, names),
        },
    }


def _merges(tokenizer: Tokenizer, names: list[str]) -> list[list[str]]:
    """Every pair of pieces that makes a piece, in the order in which they are merged."""
    normal = {
        names[i]: piece.score
        for i, piece in enumerate(tokenizer.pieces())
        if not (piece.control or piece.byte or i == tokenizer.unknown)
    }
    return [
        [name[:cut], name[cut:]]
        for name in sorted(normal, key=lambda name: (-normal[name], name))
        for cut in range(1, len(name))
        if name[:cut] in normal and name[cut:] in normal
    ]
