"""Tokenise a corpus into memory-mapped shards, or check shards that are there.

python tools/prepare_data.py --source SRC --tokenizer FILE --out DIR
python tools/prepare_data.py --verify DIR
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from data.manifest import verify
from data.prepare import EMBEDDED, prepare, summary
from data.sources import DatasetSource, EmbeddedSource, Source
from data.split import SHARD_TOKENS, Packing
from megalite.errors import ConfigError


def add_source(parser: argparse.ArgumentParser) -> None:
    """The flags that say which documents are read, and which of them are held out."""
    add = parser.add_argument
    add(
        "--source",
        metavar="SRC",
        help="a text, jsonl or parquet file, a folder of them, a folder in the hub's form, the id "
        f"of a data set on the hub, or {EMBEDDED!r} for the embedded corpus",
    )
    add("--column", default="text", help="the column with the text (%(default)s)")
    add(
        "--text-unit",
        default="document",
        choices=["document", "paragraph", "line"],
        help="what is one document in a text file: all of it, a paragraph or a line (%(default)s)",
    )
    add("--subset", default="", help="the configuration of a data set in the hub's form")
    add("--split", default="train", help="the split of a data set in the hub's form (%(default)s)")
    add("--val-fraction", type=float, default=0.01, help="share held out (%(default)s)")
    add("--seed", type=int, default=0, help="decides which documents are held out (%(default)s)")


def source_of(args: argparse.Namespace) -> Source:
    """The source that the flags of ``add_source`` name."""
    if not args.source:
        raise ConfigError("--source", "it is missing", "Name a file, a folder or a hub id")
    if args.source == EMBEDDED:
        return EmbeddedSource()
    return DatasetSource(args.source, args.column, args.text_unit, args.subset, args.split)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_source(parser)
    parser.add_argument("--tokenizer", metavar="FILE", help="a file of train_tokenizer.py")
    parser.add_argument(
        "--vocab-size", type=int, help="instead of --tokenizer: train one on what is not held out"
    )
    parser.add_argument("--out", metavar="DIR", help="the directory to make")
    parser.add_argument(
        "--shard-tokens", type=int, default=SHARD_TOKENS, help="tokens a file (%(default)s)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=0,
        help="processes; 0: one a core where it pays (%(default)s)",
    )
    parser.add_argument("--verify", metavar="DIR", help="read every byte and compare hashes")
    args = parser.parse_args(argv)
    try:
        if args.verify:
            print(summary(verify(Path(args.verify))))
            print(f"{args.verify}: every file is as it was written")
        else:
            _prepare(args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _prepare(args: argparse.Namespace) -> None:
    if not args.out:
        raise ConfigError("--out", "it is missing", "Name the directory to make")
    tokenizer = args.tokenizer or args.vocab_size
    if not tokenizer or (args.tokenizer and args.vocab_size):
        raise ConfigError(
            "--tokenizer", "exactly one of --tokenizer and --vocab-size is needed", "Give one"
        )
    packing = Packing(args.val_fraction, args.seed, args.shard_tokens, args.workers)
    prepare(source_of(args), args.out, tokenizer=tokenizer, packing=packing)


if __name__ == "__main__":
    sys.exit(main())
