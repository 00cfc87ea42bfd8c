"""Text from a checkpoint, in any layout:

torchrun --nproc-per-node N launch/generate.py --checkpoint DIR --prompt TEXT --max-new-tokens N

Several prompts are gone on with together, and dealt to the replicas. Temperature 0 takes the
likeliest token each time; with one seed the text is the same in every layout.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from data.config import DataConfig
from data.tokenizer import Tokenizer
from launch.build import DTYPES
from launch.config import Config, TrainConfig, facts_of, report_config_error
from launch.job import die, joined, share_text
from launch.sample import load_decoder
from launch.stored import model_of, open_named, tokenizer_of
from launch.world import world_from_env
from megalite import parallel_config
from megalite.checkpoint.load import Checkpoint
from megalite.errors import ConfigError
from megalite.mesh import Mesh
from megalite.parallel_config import ParallelConfig, mesh_shape
from model.generate import Sampling, generate


def main(argv: Sequence[str]) -> None:
    try:
        args, world = parse(argv), world_from_env()
        checkpoint = open_named("--checkpoint", args.checkpoint)
        cfg = config_of(args, checkpoint)
        parallel_config.check(cfg.parallel, facts_of(cfg.model), world.size)
        tokenizer = tokenizer_of(args.checkpoint, args.tokenizer, cfg.model)
        check_text(args.prompt)
        prompts = [tokenizer.encode(text) or [tokenizer.eod] for text in args.prompt]
    except ConfigError as error:
        report_config_error(error)
    try:
        with joined(mesh_shape(cfg.parallel, world.size), world) as mesh:
            run(args, cfg, mesh, checkpoint, tokenizer, prompts)
    except BaseException as error:  # whatever it is, the other ranks must not wait for this one
        die(error, world)


def check_text(prompts: Sequence[str]) -> None:
    """A command line may hold bytes that are no text.

    Raises:
        ConfigError: that names the prompt.
    """
    for number, text in enumerate(prompts, 1):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                "--prompt", f"number {number} is no UTF-8 at {error.start}", "Give it as UTF-8"
            ) from error


class Parser(argparse.ArgumentParser):
    """Reports as all of our commands do: once a node, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError("flags", message, "See --help")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command's flags.

    Raises:
        ConfigError: for one that is unknown, missing or out of range.
    """
    about = __doc__.partition("\n")[0]
    parser = Parser(description=about, allow_abbrev=False)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--prompt",
        action="append",
        nargs="+",
        required=True,
        metavar="TEXT",
        help="one or several, each to be gone on with; an empty one starts a document",
    )
    parser.add_argument("--max-new-tokens", type=int, required=True, metavar="N")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, help="of the likeliest tokens; 0: all")
    parser.add_argument("--top-p", type=float, default=1.0, help="of the likeliest tokens' share")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (%(default)s)")
    parser.add_argument("--tokenizer", default="", metavar="FILE", help="default: the run's own")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="a line a prompt, for a program")
    for name in ("tp", "pp"):
        parser.add_argument(f"--parallel.{name}", dest=name, type=int, default=1, metavar="N")
    args = parser.parse_args([_hyphens(word) for word in argv])
    args.prompt = [text for texts in args.prompt for text in texts]
    _check(args)
    return args


def _hyphens(word: str) -> str:
    """Underscores in a flag's name count as hyphens."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def _check(args: argparse.Namespace) -> None:
    for name, good, fix in (
        ("--max-new-tokens", args.max_new_tokens >= 0, "Use 0 or more"),
        ("--temperature", 0 <= args.temperature < float("inf"), "Use 0 or more"),
        ("--top-k", args.top_k >= 0, "Use 1 or more, or 0 for all"),
        ("--top-p", 0 < args.top_p <= 1, "Use a share above 0, up to 1"),
    ):
        if not good:
            value = getattr(args, name[2:].replace("-", "_"))
            raise ConfigError(name, f"{value} is out of range", fix)


def config_of(args: argparse.Namespace, checkpoint: Checkpoint) -> Config:
    """What a run of this model in this layout would have said."""
    reset = bool(checkpoint.extra.get("reset_at_document", False))
    return Config(
        model=model_of(checkpoint.path, checkpoint.extra),
        parallel=ParallelConfig(tp=args.tp, pp=args.pp),
        data=DataConfig(reset_at_document=reset),
        train=TrainConfig(dtype=args.dtype),
    )


def run(
    args: argparse.Namespace,
    cfg: Config,
    mesh: Mesh,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
) -> None:
    """Load, generate on each replica, print on rank 0."""
    share = share_text(mesh)
    model = load_decoder(cfg, mesh, checkpoint, share, tokenizer.eod)
    if mesh.rank == 0:
        _say_what_is_cut(prompts, args.max_new_tokens, model.context)
    mine = range(mesh.dp.index, len(prompts), mesh.dp.size)
    added = generate(
        model,
        [prompts[n] for n in mine],
        args.max_new_tokens,
        Sampling(args.temperature, args.top_k, args.top_p, args.seed, tokenizer.vocab_size),
        stop=lambda token: token == tokenizer.eod,
        numbers=mine,
    )
    found = dict(zip(mine, added, strict=True)) if mesh.tp.index == mesh.pp.index == 0 else {}
    parts = [json.loads(text) for text in share(json.dumps(found))]
    whole = {int(n): ids for part in parts for n, ids in part.items()}
    if mesh.rank == 0:
        for n, text in enumerate(args.prompt):
            print(_shown(args, n, text, tokenizer, whole[n]), flush=True)


def _say_what_is_cut(prompts: Sequence[Sequence[int]], added: int, context: int) -> None:
    longest = max(map(len, prompts)) + added
    if longest > context:
        print(
            f"note: up to {longest} tokens are more than the model's context; it sees the last "
            f"{context} at a time, and each token costs a pass over them",
            file=sys.stderr,
            flush=True,
        )


def _shown(
    args: argparse.Namespace, n: int, prompt: str, tokenizer: Tokenizer, ids: Sequence[int]
) -> str:
    text = tokenizer.decode(ids)
    if args.json:
        return json.dumps({"prompt": prompt, "text": text, "tokens": list(ids)})
    if len(args.prompt) == 1:
        return prompt + text
    return ("\n" if n else "") + f"[{n + 1}] {prompt}{text}"


if __name__ == "__main__":
    main(sys.argv[1:])
