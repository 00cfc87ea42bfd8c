"""Export a checkpoint to transformers or torch, import one of transformers, or verify one.

--checkpoint DIR --to hf --out DIR     a GPT-2 or a Llama, with its tokenizer, for transformers
--checkpoint DIR --to torch --out DIR  model.pt: the weights by name, for torch.load
--from-hf DIR --out DIR                a checkpoint: --checkpoint.resume DIR begins a run with it
--verify DIR                           every file's hash, every tensor's every element

Needs no GPU and no process group, and holds one tensor at a time (--to torch: the model once).
Exits 0, or 2 with what is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from launch.convert import export_hf, export_torch, import_hf, verify
from megalite.errors import CheckpointError, ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--checkpoint", type=Path, metavar="DIR", help="to be exported")
    what.add_argument("--from-hf", type=Path, metavar="DIR", help="to be imported")
    what.add_argument("--verify", type=Path, metavar="DIR", help="to be verified")
    parser.add_argument("--to", choices=("hf", "torch"), help="the form of the export")
    parser.add_argument("--out", type=Path, metavar="DIR", help="a directory to be made")
    parser.add_argument("--tokenizer", default="", metavar="FILE", help="default: the run's own")
    parser.add_argument(
        "--max-file-mb", type=int, default=5120, help="of one weight file (%(default)s)"
    )
    args = parser.parse_args(argv)
    if (args.checkpoint is None) != (args.to is None):
        parser.error("--checkpoint and --to belong together")
    if (args.verify is None) == (args.out is None):
        parser.error("--out is needed, or --verify alone")
    if args.max_file_mb < 1:
        parser.error("--max-file-mb is 1 or more")
    try:
        return _run(args)
    except (ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    if args.verify is not None:
        told, bad = verify(args.verify)
        print(told)
        print("".join(f"error: {error}\n" for error in bad), end="", file=sys.stderr)
        return 2 if bad else 0
    if args.from_hf is not None:
        print(import_hf(args.from_hf, args.out))
    elif args.to == "hf":
        print(export_hf(args.checkpoint, args.out, args.tokenizer, args.max_file_mb << 20))
    else:
        print(export_torch(args.checkpoint, args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
