"""Predicts measured runs from a table of their shapes and layouts. No torch.

Only the columns of ``INPUTS`` are read. A trailing ``?`` belongs to a value that its source leaves
uncertain: it is taken all the same. A blank is the planner's own best.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod

from megalite.errors import ConfigError, ScheduleError
from megalite.parallel_config import ParallelConfig, divisors, problems
from megalite.planner.constants import Constants, Stacks, load_constants, load_stacks
from megalite.planner.estimate import Estimate, Estimator, Job, Machine
from megalite.planner.hardware import HardwareSpec, find_hardware
from megalite.planner.shape import ModelShape
from megalite.schedule.generators import SCHEDULES

INPUTS = (
    "gpu",
    "gpu_mem_gb",
    "params_b",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "gated_mlp",
    "seq",
    "vocab",
    "gpus",
    "tp",
    "pp",
    "vpp",
    "dp",
    "mbs",
    "gbs",
    "recompute",
    "seq_par",
    "zero",
    "schedule",
    "precision",
    "attn",
    "framework",
    "cluster",
    "partition",
)
_SCHEDULES = {
    "none": "1f1b",
    "1f1b-interleaved": "interleaved_1f1b",
    "interleaved": "interleaved_1f1b",
    "interleaved-1f1b": "interleaved_1f1b",
}
_LARGEST = {
    **dict.fromkeys(("layers", "heads", "kv_heads"), 1e5),
    **dict.fromkeys(("hidden", "ffn", "gpus", "tp", "pp", "vpp", "dp", "mbs", "gbs"), 1e7),
    **dict.fromkeys(("gpu_mem_gb", "params_b"), 1e6),
    **dict.fromkeys(("seq", "vocab"), 1e8),
}
"""Of the columns of numbers: what is above, not above 0, or no number says as little as a blank."""
_FAMILIES = {
    "b200": "b200", "b300": "b200", "h200": "h200", "h100": "h100", "h800": "h100",
    "h20": "h100", "a100": "a100", "a800": "a100",
}  # fmt: skip
_BYTES = {"fp32": 4, "tf32": 4, "fp64": 8}
_USUAL_MFU = 0.4
"""For a row that says too little to be simulated."""


@dataclass(frozen=True)
class Prediction:
    """Of one row; ``estimate`` is missing where only 6 N D at a usual rate was left to say.

    ``note`` says what was taken otherwise than the row has it, and why nothing was simulated.
    """

    iter_time_s: float
    estimate: Estimate | None = None
    rough_gb: float = 0.0
    note: str = ""

    @property
    def mem_gb(self) -> float:
        """Of the fullest rank, as the framework's users see it."""
        if self.estimate is None:
            return self.rough_gb
        most = max(m.allocated for m in self.estimate.memory)
        return most * self.estimate.machine.framework.reserve / 2**30


def predict(
    row: Mapping[str, str],
    constants: Constants | None = None,
    stacks: Stacks | None = None,
) -> Prediction:
    """The step time in seconds and the memory in GB of a row."""
    given = _given(row)
    stacks = stacks or load_stacks()
    machine = _machine(given, constants or load_constants(), stacks)
    given, notes = _known_schedule(given)
    why = "no layout of these numbers is legal"
    try:
        shape, rounded = _cuttable(_shape(given, stacks), given)
        given, fewer = _fewer_stages(shape, given)
        best = _best(shape, given, machine)
        notes += [*rounded, *fewer]
        if best is None:
            why = _why_not(shape, given) or why
    except (ConfigError, ScheduleError, ArithmeticError, LookupError, ValueError) as error:
        best, why = None, _first_line(error)
    except MemoryError:
        best, why = None, "too large to be simulated"
    if best is None:
        return _by_size(given, machine, why)
    return Prediction(best.step_s, best, note="; ".join(notes))


def _first_line(error: Exception) -> str:
    if isinstance(error, ConfigError):
        return error.problem
    if isinstance(error, ScheduleError):
        return str(error).splitlines()[0]
    return "layers or hidden is missing, or out of proportion"


def _known_schedule(given: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """With 1F1B, interleaved where there are virtual stages, in place of a schedule that is not
    known or does not have so many stages a rank."""
    name = _SCHEDULES.get(given.get("schedule", ""), given.get("schedule", ""))
    v = _whole(given, "vpp", 1)
    if name in ("", "1f1b", "interleaved_1f1b"):
        return given, []
    if name in SCHEDULES and SCHEDULES[name].allows(v):
        return given, []
    several = f" with {v} stages a rank" if v > 1 else ""
    note = f"schedule {name}{several} is not known: taken for 1f1b"
    return {k: x for k, x in given.items() if k != "schedule"}, [note]


def _cuttable(shape: ModelShape, given: Mapping[str, str]) -> tuple[ModelShape, list[str]]:
    """The shape with what the row's tp cannot cut rounded up, and what was."""
    tp = _whole(given, "tp", 1)
    heads = _up(shape.heads, tp)
    kv = heads if shape.kv == shape.heads else shape.kv
    kv = next(
        k for k in range(min(kv, heads), heads + 1)
        if heads % k == 0 and (k % tp == 0 or tp % k == 0)
    )  # fmt: skip
    cut = _flag(given.get("seq_par", "0"))
    new = replace(
        shape,
        heads=heads,
        kv_heads=kv if shape.kv_heads else 0,
        hidden=_up(shape.hidden, heads),
        ffn=_up(shape.wide, tp) if shape.wide % tp else shape.ffn,
        seq=_up(shape.seq, tp) if cut else shape.seq,
    )
    found = []
    for name, old, now in (
        ("heads", shape.heads, new.heads),
        ("kv_heads", shape.kv, new.kv),
        ("hidden", shape.hidden, new.hidden),
        ("ffn", shape.wide, new.wide),
        ("seq", shape.seq, new.seq),
    ):
        if old != now:
            found.append(f"{name} {old} taken for {now}: cut into {tp} x {heads // tp} heads")
    return new, found


def _fewer_stages(shape: ModelShape, given: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """With as many virtual stages as there are layers for, if the row has more."""
    v, most = _whole(given, "vpp", 1), max(1, shape.layers // _whole(given, "pp", 1))
    if v <= most:
        return given, []
    note = f"vpp {v} taken for {most}: {shape.layers} layers"
    return {**given, "vpp": str(most)}, [note]


def _up(number: int, unit: int) -> int:
    """The next multiple."""
    return -(-number // unit) * unit


def _why_not(shape: ModelShape, given: Mapping[str, str]) -> str:
    """The first rule that the row's own numbers break."""
    tp, pp = _whole(given, "tp", 1), _whole(given, "pp", 1)
    gpus = _whole(given, "gpus", 1)
    if gpus < tp * pp:
        return f"{gpus} GPUs are fewer than tp={tp} x pp={pp}"
    v, schedule = next(_pipelines(shape, given, pp))
    parallel = ParallelConfig(tp=tp, pp=pp, virtual_stages=v, schedule=schedule)
    found = problems(parallel, shape.facts(), gpus // (tp * pp) * tp * pp, _whole(given, "gbs", 1))
    return found[0].problem if found else ""


def _given(row: Mapping[str, str]) -> dict[str, str]:
    """The inputs of a row, without question marks; a blank is left out."""
    found = {}
    for name in INPUTS:
        text = (row.get(name) or "").strip().removesuffix("?").strip()
        if text and (name not in _LARGEST or _is_size(text, _LARGEST[name])):
            found[name] = text
    if "gpus" not in found and all(name in found for name in ("tp", "pp", "dp")):
        found["gpus"] = str(prod(_whole(found, name) for name in ("tp", "pp", "dp")))
    return found


def _is_size(text: str, most: float) -> bool:
    try:
        return 0 < float(text) <= most
    except ValueError:
        return False


def _number(given: Mapping[str, str], name: str, default: float = 0.0) -> float:
    try:
        return float(given[name])
    except (KeyError, ValueError):
        return default


def _whole(given: Mapping[str, str], name: str, default: int = 0) -> int:
    return int(_number(given, name, default))


def _hardware(given: Mapping[str, str]) -> HardwareSpec:
    text = given.get("gpu", "a100").lower()
    gpu = next((f for name, f in _FAMILIES.items() if name in text), "a100")
    if gpu == "a100":
        small = given.get("gpu_mem_gb", "40" if re.search(r"\b40 ?g?", text) else "80")
        return find_hardware("a100-40" if float(small) <= 48 else "a100-80")
    return find_hardware(gpu)


def is_known_gpu(row: Mapping[str, str]) -> bool:
    """Whether the planner has this row's GPU; else it is taken for an A100."""
    text = _given(row).get("gpu", "a100").lower()
    return any(name in text for name in _FAMILIES)


def _machine(given: Mapping[str, str], constants: Constants, stacks: Stacks) -> Machine:
    framework, cluster = given.get("framework", ""), given.get("cluster", "")
    size = _BYTES.get(given.get("precision", ""), 2)
    return _cached_machine(_hardware(given), framework, cluster, size, constants, _Held(stacks))


class _Held:
    """Stacks by identity, so that they can be part of a key."""

    def __init__(self, stacks: Stacks) -> None:
        self.stacks = stacks

    def __hash__(self) -> int:
        return id(self.stacks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and other.stacks is self.stacks


@lru_cache(maxsize=64)
def _cached_machine(
    hw: HardwareSpec, framework: str, cluster: str, size: int, constants: Constants, held: _Held
) -> Machine:
    stacks = held.stacks
    if cluster in stacks.net_bytes_s:
        hw = hw.with_network(stacks.net_bytes_s[cluster])
    scalar = stacks.scalar(framework, cluster)
    return Machine(hw, stacks.framework(framework), constants, scalar, size)


def _shape(given: Mapping[str, str], stacks: Stacks) -> ModelShape:
    if "layers" not in given or "hidden" not in given:
        raise LookupError
    gated = given.get("gated_mlp", "0") not in ("0", "0.0", "False", "false", "no")
    framework = stacks.framework(given.get("framework", ""))
    shape = ModelShape(
        layers=_whole(given, "layers"),
        hidden=_whole(given, "hidden"),
        heads=_whole(given, "heads", max(1, _whole(given, "hidden") // 128)),
        seq=_whole(given, "seq", 2048),
        vocab=_whole(given, "vocab", 51200),
        kv_heads=_whole(given, "kv_heads"),
        ffn=_whole(given, "ffn"),
        gated=gated,
        bias=not gated,
        rmsnorm=gated,
        learned_positions=not gated,
        fused_attention="flash" in given.get("attn", "flash"),
        vocab_multiple=framework.vocab_multiple,
    )
    told = _number(given, "params_b") * 1e9
    if not gated or not told:
        return shape
    both = [replace(shape, tied=tied) for tied in (True, False)]
    return min(both, key=lambda s: abs(s.num_parameters() - told))


def _by_size(given: Mapping[str, str], machine: Machine, why: str) -> Prediction:
    """6 N D at a usual rate."""
    d, layers = _number(given, "hidden"), _number(given, "layers")
    size = _number(given, "params_b") * 1e9 or 12 * layers * d * d or 1e9
    tokens = _number(given, "gbs", 1) * _number(given, "seq", 2048)
    gpus = max(1.0, _number(given, "gpus", 1))
    step = 6 * size * tokens / (gpus * machine.hw.peak_flops * _USUAL_MFU)
    parts = max(1.0, _number(given, "tp", 1)) * max(1.0, _number(given, "pp", 1))
    note = f"6 N D at {_USUAL_MFU:.0%}, not simulated: {why}"
    return Prediction(step * machine.scalar, None, 18 * size / parts / 2**30, note)


def _best(shape: ModelShape, given: Mapping[str, str], machine: Machine) -> Estimate | None:
    """The fastest of what the blanks leave open; within the memory, if anything is. ZeRO-1 is no
    size but a feature: where a row does not speak of it, it is on only if nothing fits without."""
    if "zero" in given:
        return _fastest(list(_jobs(shape, given)), machine, True) or _fastest(
            list(_jobs(shape, given)), machine, False
        )
    ways = [list(_jobs(shape, {**given, "zero": flag})) for flag in ("0", "1")]
    found = (_fastest(ways[zero], machine, fits) for fits in (True, False) for zero in (0, 1))
    return next((e for e in found if e is not None), None)


def _fastest(jobs: list[Job], machine: Machine, fitting: bool) -> Estimate | None:
    """In the order of bounds, until the next one is above the best time."""
    if len(jobs) == 1 and not fitting:
        return Estimator(jobs[0], machine).estimate()
    best: Estimate | None = None
    for e in sorted((Estimator(j, machine) for j in jobs), key=lambda e: e.lower_bound):
        if best is not None and e.lower_bound * machine.scalar >= best.step_s:
            break
        if fitting and max(m.allocated for m in e.memory()) > machine.hw.memory_bytes:
            continue
        found = e.estimate()
        if best is None or found.step_s < best.step_s:
            best = found
    return best


def _jobs(shape: ModelShape, given: Mapping[str, str]) -> Iterator[Job]:
    """Every job that the row can mean."""
    gpus, gbs = _whole(given, "gpus", 1), _whole(given, "gbs", 1)
    for tp, pp in _splits(shape, given, gpus):
        dp = gpus // (tp * pp)
        for v, schedule in _pipelines(shape, given, pp):
            for mbs, recompute, sp, zero in product(
                _micro_batches(given, gbs, dp), *_options(given, tp)
            ):
                parallel = ParallelConfig(
                    tp=tp,
                    pp=pp,
                    virtual_stages=v,
                    schedule=schedule,
                    sequence_parallel=sp,
                    zero1=zero,
                    recompute=recompute,  # type: ignore[arg-type]
                    partition="balanced"
                    if "embedding" in given.get("partition", "")
                    else "uniform",
                )
                if not problems(parallel, shape.facts(), tp * pp * dp, gbs, mbs):
                    yield Job(shape, parallel, tp * pp * dp, gbs, mbs)


def _splits(shape: ModelShape, given: Mapping[str, str], gpus: int) -> Iterator[tuple[int, int]]:
    dp = _whole(given, "dp")
    tps = [_whole(given, "tp")] if "tp" in given else divisors(gpus)
    for tp in tps:
        pps = [_whole(given, "pp")] if "pp" in given else divisors(max(1, gpus // tp))
        for pp in pps:
            if tp * pp <= gpus and (not dp or tp * pp * dp == gpus or "tp" in given):
                yield tp, pp


def _pipelines(shape: ModelShape, given: Mapping[str, str], pp: int) -> Iterator[tuple[int, str]]:
    name = given.get("schedule", "")
    name = _SCHEDULES.get(name, name)
    if "vpp" in given:
        ways = [max(1, _whole(given, "vpp", 1))]
    elif pp == 1:
        ways = [1]
    elif shape.layers % pp == 0:
        ways = divisors(shape.layers // pp)
    else:
        ways = [1]
    for v in ways:
        yield (
            v,
            (name or "1f1b")
            if v == 1 and name != "interleaved_1f1b"
            else ("interleaved_1f1b" if name in ("", "1f1b") else name),
        )


def _micro_batches(given: Mapping[str, str], gbs: int, dp: int) -> list[int]:
    if "mbs" in given:
        return [max(1, _whole(given, "mbs", 1))]
    each = max(1, gbs // max(1, dp))
    return [m for m in divisors(each) if m <= 64]


def _options(given: Mapping[str, str], tp: int) -> tuple[list[str], list[bool], list[bool]]:
    recompute = given.get("recompute")
    modes = [recompute] if recompute in ("none", "selective", "full") else ["none", "full"]
    sp = [_flag(given["seq_par"])] if "seq_par" in given else [False, True]
    return modes, (sp if tp > 1 else [False]), [_flag(given["zero"])]


def _flag(text: str) -> bool:
    return text not in ("0", "0.0", "False", "false", "no")
