"""What rank, explain and check are asked: a model, a machine, a batch, and what is given."""

from __future__ import annotations

import argparse
from dataclasses import replace

from megalite.errors import ConfigError
from megalite.parallel_config import ParallelConfig, check
from megalite.planner.candidates import HEADROOM, SEARCHED, Request
from megalite.planner.constants import load_stacks
from megalite.planner.estimate import Estimator, Job, Machine
from megalite.planner.hardware import find_hardware, known_hardware
from tools.planning.models import find_model, shape_of

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_NUMBERS = ("tp", "pp", "virtual_stages", "micro_batch")


def add_arguments(args: argparse.ArgumentParser) -> None:
    """The options that ``request_of`` reads."""
    known = ", ".join(known_hardware())
    args.add_argument("--model", required=True, help="a preset, or a YAML file with a model")
    args.add_argument("--gpus", required=True, type=int)
    args.add_argument("--gpu", required=True, help=f"{known}, or a file that measure wrote")
    args.add_argument("--global-batch", required=True, type=int, help="sequences a step")
    args.add_argument("--memory-gb", type=float, default=0.0, help="instead of the GPU's own")
    args.add_argument(
        "--headroom", type=float, default=100 * HEADROOM, metavar="PERCENT",
        help="of the memory that must stay free (default: %(default)g), beside the reserve for "
        "context and NCCL that is counted in every layout",
    )  # fmt: skip
    args.add_argument("--dtype", choices=sorted(BYTES), default="bf16")
    args.add_argument("--framework", default="megalite", help="as in predict; default: megalite")
    args.add_argument("--cluster", default="", help="as in predict: its network and its scalar")
    args.add_argument(
        "--attention", choices=("fused", "unfused"), default="fused", help="whether scores exist"
    )
    given = args.add_argument_group("what is given (the rest is searched)")
    for name in _NUMBERS:
        given.add_argument(f"--{name.replace('_', '-')}", type=int)
    given.add_argument("--schedule", choices=SEARCHED)
    given.add_argument("--recompute", choices=("none", "selective", "full"))
    given.add_argument("--sequence-parallel", type=_flag, metavar="BOOL")
    given.add_argument("--zero1", type=_flag, metavar="BOOL")
    given.add_argument("--partition", choices=("uniform", "balanced"))


def _flag(text: str) -> bool:
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")


def machine_of(args: argparse.Namespace) -> Machine:
    stacks, hw = load_stacks(), find_hardware(args.gpu)
    if args.cluster:
        hw = hw.with_network(stacks.network(args.cluster))
    return Machine(
        hw,
        stacks.known(args.framework),
        scalar=stacks.scalar(args.framework, args.cluster),
        element_bytes=BYTES[args.dtype],
    )


def request_of(args: argparse.Namespace, best: int = 5) -> Request:
    """What to search.

    Raises:
        ConfigError: for an unknown model or GPU, and numbers less than 1.
    """
    for name in ("gpus", "global_batch", *_NUMBERS):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}", f"got {value}", "Use 1 or more")
    if best < 1:
        raise ConfigError("--top", f"got {best}", "Use 1 or more")
    machine = machine_of(args)
    shape = shape_of(find_model(args.model), args.attention == "fused")
    shape = replace(shape, vocab_multiple=machine.framework.vocab_multiple)
    names = (*_NUMBERS, "schedule", "recompute", "sequence_parallel", "zero1", "partition")
    fixed = {n: getattr(args, n) for n in names if getattr(args, n) is not None}
    if not 0 <= args.memory_gb < float("inf"):
        raise ConfigError("--memory-gb", f"{args.memory_gb} is no size", "Use GB, or 0 for its own")
    if not 0 <= args.headroom < 100:
        raise ConfigError("--headroom", f"{args.headroom} is no percentage", "Use 0 to 99")
    return Request(
        shape,
        machine,
        args.gpus,
        args.global_batch,
        args.memory_gb * 1e9,
        args.headroom / 100,
        best,
        fixed=fixed,
    )


def estimator_of(request: Request, parallel: ParallelConfig, micro_batch: int) -> Estimator:
    """Of one layout.

    Raises:
        ConfigError: if it is not legal.
    """
    check(parallel, request.shape.facts(), request.gpus, request.global_batch, micro_batch)
    job = Job(request.shape, parallel, request.gpus, request.global_batch, micro_batch)
    return Estimator(job, request.machine)
