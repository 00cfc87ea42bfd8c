"""Train a sentencepiece tokenizer on what is not held out of a corpus.

python tools/train_tokenizer.py --source SRC --vocab-size N --out FILE
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from data.split import Packing, split_texts
from data.tokenizer import train_tokenizer
from megalite.errors import ConfigError
from tools.prepare_data import add_source, source_of


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_source(parser)
    parser.add_argument("--vocab-size", type=int, required=True, help="number of pieces")
    parser.add_argument("--out", metavar="FILE", required=True, help="the model file to write")
    parser.add_argument(
        "--max-mb", type=int, default=64, help="of more text, take an even sample (%(default)s)"
    )
    args = parser.parse_args(argv)
    try:
        _train(args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _train(args: argparse.Namespace) -> None:
    source, packing = source_of(args), Packing(args.val_fraction, args.seed)
    with tempfile.TemporaryDirectory() as cache:
        documents = source.open(Path(cache))
        texts = (text for split, text in split_texts(documents, packing) if split == "train")
        size = max(1, args.max_mb) << 20
        trained = train_tokenizer(texts, args.vocab_size, args.out, max_bytes=size)
    print(
        f"{args.out}: {args.vocab_size} pieces from {trained.used_bytes:,} of "
        f"{trained.total_bytes:,} bytes of text"
    )


if __name__ == "__main__":
    sys.exit(main())
