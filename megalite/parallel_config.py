"""How a model is laid out over ranks, and every rule about layouts. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from megalite.errors import ConfigError
from megalite.mesh_shape import AXES, MeshShape
from megalite.schedule.generators import SCHEDULES, find_schedule
from megalite.schedule.placement import place_layers


@dataclass(frozen=True)
class ParallelConfig:
    """The layout; data parallelism takes what is left: dp = world size / (tp x pp)."""

    tp: int = 1
    """Ranks that share every layer (tensor parallelism)."""
    pp: int = 1
    """Ranks that share the depth of the model (pipeline parallelism)."""
    virtual_stages: int = 1
    """Stages on each pipeline rank."""
    schedule: str = "1f1b"
    """Order of a rank's work: gpipe, 1f1b, ..., auto or file:PATH (a wrong name lists all)."""
    schedule_memory: float = 0.0
    """For schedule auto: the most microbatches in flight on a rank; 0: pp, as 1f1b has."""
    sequence_parallel: bool = False
    """Also cut the sequence over tp where layers are not; no effect at tp = 1."""
    zero1: bool = False
    """Spread the optimizer's state over dp."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What is computed a second time in the backward pass to save memory."""
    partition: Literal["uniform", "balanced", "profile"] | tuple[int, ...] = "uniform"
    """How layers are spread over stages: evenly, by formula, as measured, or each stage's count."""
    rank_order: str = "pp,dp,tp"
    """The axes from the slowest to the fastest varying with the rank."""
    reconfigure: tuple[str, ...] = ()
    """Changes of layout in mid-run, each STEP:FIELD=VALUE[,FIELD=VALUE...]; or step -> fields."""


@dataclass(frozen=True)
class ModelFacts:
    """What layouts depend on, in plain numbers; ``num_kv_heads`` and ``ffn`` resolved."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    ffn: int
    seq_length: int
    vocab_size: int = 0
    tied: bool = True


_ENDS = 2  # embedding and head
_MODEL_FIELDS = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_heads",
    "num_kv_heads": "num_kv_heads",
    "ffn": "ffn_hidden_size",
    "seq_length": "seq_length",
}


def mesh_shape(parallel: ParallelConfig, world_size: int) -> MeshShape:
    """The axis sizes of ``world_size`` ranks.

    Raises:
        ConfigError: if tp x pp does not divide the world, or the rank order is none.
    """
    errors = [*_sizes(parallel), *_rank_order(parallel)] or [*_world(parallel, world_size)]
    for error in errors:
        raise error
    dp = world_size // (parallel.tp * parallel.pp)
    return MeshShape(parallel.tp, parallel.pp, dp, _order(parallel))


def check(
    parallel: ParallelConfig,
    facts: ModelFacts,
    world_size: int,
    global_batch_size: int = 1,
    micro_batch_size: int = 1,
) -> None:
    """Raise the first of ``problems``."""
    for error in problems(parallel, facts, world_size, global_batch_size, micro_batch_size):
        raise error


def problems(
    parallel: ParallelConfig,
    facts: ModelFacts,
    world_size: int,
    global_batch_size: int = 1,
    micro_batch_size: int = 1,
) -> list[ConfigError]:
    """Every rule that a layout breaks; an empty list means that it can be run.

    A global batch that micro_batch_size x dp does not divide is legal: the last microbatch's
    missing rows are ignored tokens. So is one layer more on some stages than on others. Where the
    embedding and the head count as layers (balanced, profile) they can fill a stage each, and a
    list may give a stage nothing at all.
    """
    sizes = [*_sizes(parallel), *_model_sizes(facts)]
    found = [*sizes, *_batch(global_batch_size, micro_batch_size), *_rank_order(parallel)]
    found += _schedule(parallel)
    if not sizes:  # the rules below divide by these numbers
        found += [*_heads(facts), *_world(parallel, world_size, facts)]
        found += [*_tensor(parallel, facts, world_size), *_pipeline(parallel, facts)]
        found += _partition(parallel, facts)
    return found


def num_stages(parallel: ParallelConfig) -> int:
    return parallel.pp * parallel.virtual_stages


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _order(parallel: ParallelConfig) -> tuple[str, ...]:
    return tuple(axis.strip() for axis in parallel.rank_order.split(","))


def _sizes(parallel: ParallelConfig) -> Iterator[ConfigError]:
    for name in ("tp", "pp", "virtual_stages"):
        if (value := getattr(parallel, name)) < 1:
            yield ConfigError(f"parallel.{name}", f"{value} is less than 1", "Use 1 or more")


def _batch(global_batch_size: int, micro_batch_size: int) -> Iterator[ConfigError]:
    for name, value in (
        ("global_batch_size", global_batch_size),
        ("micro_batch_size", micro_batch_size),
    ):
        if value < 1:
            yield ConfigError(
                f"train.{name}", f"{value} sequences are less than 1", "Use 1 or more"
            )


def _model_sizes(facts: ModelFacts) -> Iterator[ConfigError]:
    for name, field in _MODEL_FIELDS.items():
        if (value := getattr(facts, name)) < 1:
            zero = ", or 0 for as many as heads" if name == "num_kv_heads" else ""
            yield ConfigError(f"model.{field}", f"{value} is less than 1", f"Use 1 or more{zero}")


def _heads(facts: ModelFacts) -> Iterator[ConfigError]:
    hidden, heads, kv = facts.hidden_size, facts.num_heads, facts.num_kv_heads
    if hidden % heads:
        yield ConfigError(
            "model.num_heads",
            f"model.hidden_size={hidden} cannot be cut into {heads} equal heads",
            f"Use one of model.num_heads={_some(divisors(hidden), heads)}, "
            f"or model.hidden_size={_multiples(hidden, heads)}",
        )
    if heads % kv:
        yield ConfigError(
            "model.num_kv_heads",
            f"model.num_heads={heads} cannot share {kv} key/value heads evenly",
            f"Use one of model.num_kv_heads={_some(divisors(heads), kv)}",
        )


def _rank_order(parallel: ParallelConfig) -> Iterator[ConfigError]:
    if sorted(_order(parallel)) != sorted(AXES):
        yield ConfigError(
            "parallel.rank_order",
            f"{parallel.rank_order!r} does not name each of pp, dp and tp once",
            f"The usual order is {','.join(AXES)}",
        )


def _schedule(parallel: ParallelConfig) -> Iterator[ConfigError]:
    name, v = parallel.schedule, parallel.virtual_stages
    try:
        schedule = find_schedule(name)
    except ConfigError as error:
        yield error
        return
    if not parallel.schedule_memory >= 0:
        yield ConfigError(
            "parallel.schedule_memory",
            f"{parallel.schedule_memory} is less than 0",
            f"Use pp={parallel.pp} or more, or 0 for that",
        )
    if v > 0 and not schedule.allows(v):
        want = schedule.fewest
        others = [n for n, s in SCHEDULES.items() if s.allows(v)]
        other = f", or parallel.schedule={_any_of(others)}" if others else ""
        yield ConfigError(
            "parallel.virtual_stages",
            f"{v} stages a rank, but schedule {name} has {want}",
            f"Use parallel.virtual_stages={want}{other}",
        )


def _world(
    parallel: ParallelConfig, world_size: int, facts: ModelFacts | None = None
) -> Iterator[ConfigError]:
    tp, pp = parallel.tp, parallel.pp
    if world_size > 0 and world_size % (tp * pp) == 0:
        return
    below = max(world_size, 0) // (tp * pp) * tp * pp
    worlds = [w for w in (below, below + tp * pp) if w > 0]
    pairs = _pairs(parallel, facts, world_size) if facts is not None else []
    near = "".join(f", or use tp={t} pp={p} dp={world_size // (t * p)}" for t, p in pairs[:3])
    yield ConfigError(
        "parallel.tp" if world_size % tp else "parallel.pp",
        f"world size {world_size} is not tp={tp} x pp={pp} x dp: "
        f"dp would be {world_size / (tp * pp):.4g}",
        f"Start {_any_of(worlds)} processes{near}",
    )


def _pairs(parallel: ParallelConfig, facts: ModelFacts, world_size: int) -> list[tuple[int, int]]:
    """The (tp, pp) that suit world and model, nearest first."""
    found = [
        (tp, pp)
        for tp in divisors(world_size)
        for pp in divisors(world_size // tp)
        if tp_fits(tp, facts, parallel.sequence_parallel)
        and pp * parallel.virtual_stages <= facts.num_layers
    ]
    return sorted(
        found,
        key=lambda p: abs(math.log2(p[0] / parallel.tp)) + abs(math.log2(p[1] / parallel.pp)),
    )


def tp_fits(tp: int, facts: ModelFacts, sequence_parallel: bool = False) -> bool:
    """Whether a model's layers can be cut into ``tp`` parts."""
    kv = facts.num_kv_heads
    whole = facts.num_heads % tp == 0 and facts.ffn % tp == 0 and (kv % tp == 0 or tp % kv == 0)
    return whole and not (sequence_parallel and facts.seq_length % tp)


def _tensor(parallel: ParallelConfig, facts: ModelFacts, world: int) -> Iterator[ConfigError]:
    tp, heads, kv = parallel.tp, facts.num_heads, facts.num_kv_heads
    fitting = [t for t in divisors(heads) if tp_fits(t, facts, parallel.sequence_parallel)]
    inside = [t for t in fitting if world > 0 and world % (t * parallel.pp) == 0]
    use = f"Use one of parallel.tp={_some(inside or fitting, tp)}"
    if heads % tp:
        whole = [h for h in divisors(facts.hidden_size) if h % tp == 0]
        whole = [h for h in whole if h % kv == 0 or kv == heads]
        other = f", or one of model.num_heads={_some(whole, heads, 3)}" if whole else ""
        yield ConfigError(
            "parallel.tp",
            f"model.num_heads={heads} cannot be cut into tp={tp} equal parts",
            f"{use}{other}",
        )
    if kv % tp and tp % kv and kv != heads:
        yield ConfigError(
            "parallel.tp",
            f"model.num_kv_heads={kv} key/value heads can be neither cut into tp={tp} equal parts "
            "nor copied to equally many ranks each",
            use,
        )
    if facts.ffn % tp:
        yield ConfigError(
            "parallel.tp",
            f"model.ffn_hidden_size={facts.ffn} cannot be cut into tp={tp} equal parts",
            f"{use}, or model.ffn_hidden_size={_multiples(facts.ffn, tp)}",
        )
    if parallel.sequence_parallel and facts.seq_length % tp:
        yield ConfigError(
            "parallel.sequence_parallel",
            f"model.seq_length={facts.seq_length} cannot be cut into tp={tp} equal parts",
            f"{use}, or model.seq_length={_multiples(facts.seq_length, tp)}, "
            "or parallel.sequence_parallel=False",
        )


def _pipeline(parallel: ParallelConfig, facts: ModelFacts) -> Iterator[ConfigError]:
    pp, v = parallel.pp, parallel.virtual_stages
    more = _ENDS if parallel.partition in ("balanced", "profile") else 0
    layers = facts.num_layers + more
    if isinstance(parallel.partition, str) and layers < pp * v:
        ways = [f"parallel.pp={layers // v} or less"] if layers >= v else []
        if v > 1 and layers >= pp:
            ways.append(f"parallel.virtual_stages={layers // pp} or less")
        ways.append(f"model.num_layers={pp * v - more} or more")
        ends = ", with embedding and head," if more else ""
        yield ConfigError(
            "parallel.virtual_stages" if v > 1 and layers >= pp else "parallel.pp",
            f"model.num_layers={facts.num_layers}{ends} are fewer than the {pp * v} stages of "
            f"pp={pp} x virtual_stages={v}",
            f"Use {', or '.join(ways)}",
        )


def _partition(parallel: ParallelConfig, facts: ModelFacts) -> Iterator[ConfigError]:
    counts, stages, layers = parallel.partition, num_stages(parallel), facts.num_layers
    if isinstance(counts, str):
        return
    if len(counts) != stages or sum(counts) != layers or min(counts) < 0:
        advice = "Use fewer stages"
        if layers >= stages:
            even = place_layers([1.0] * layers, stages)
            advice = f"Use such as {' '.join(str(len(r)) for r in even)}"
        yield ConfigError(
            "parallel.partition",
            f"{' '.join(map(str, counts))} has {len(counts)} stages and {sum(counts)} layers; "
            f"pp={parallel.pp} x virtual_stages={parallel.virtual_stages} has {stages} stages, "
            f"the model has {layers} layers, and a count is 0 or more",
            f"{advice}, or parallel.partition=uniform",
        )


def nearest_legal(
    parallel: ParallelConfig, facts: ModelFacts, world_size: int, count: int = 4
) -> list[ParallelConfig]:
    """Legal layouts of the same world, by their distance from ``parallel``.

    The distance is the sum of |log2| of the changes in tp, pp and virtual_stages, and a little
    for each other field that has to change. Empty if the model or the world allows none.
    """
    if world_size < 1 or any(_model_sizes(facts)) or any(_heads(facts)):
        return []
    found: dict[ParallelConfig, float] = {}
    for candidate in _candidates(parallel, facts, world_size):
        if not problems(candidate, facts, world_size):
            found[candidate] = _distance(parallel, candidate)
    return sorted(found, key=lambda c: (found[c], c.tp, c.pp, c.virtual_stages))[:count]


def _candidates(
    parallel: ParallelConfig, facts: ModelFacts, world_size: int
) -> Iterator[ParallelConfig]:
    base = replace(parallel, rank_order=_legal_order(parallel))
    names = [n for n in (base.schedule, "1f1b", "interleaved_1f1b") if n in SCHEDULES]
    for tp in (t for t in divisors(world_size) if facts.num_heads % t == 0):
        most = max(facts.num_layers + _ENDS, base.pp)  # a list may leave stages empty
        for pp in (p for p in divisors(world_size // tp) if p <= most):
            powers = {1 << i for i in range((facts.num_layers // pp).bit_length())}
            for v in sorted({*powers, max(1, base.virtual_stages)}):
                name = next(n for n in names if SCHEDULES[n].allows(v))
                changed = replace(base, tp=tp, pp=pp, virtual_stages=v, schedule=name)
                if any(_partition(changed, facts)):
                    changed = replace(changed, partition="uniform")
                if changed.sequence_parallel and facts.seq_length % tp:
                    changed = replace(changed, sequence_parallel=False)
                yield changed


def _legal_order(parallel: ParallelConfig) -> str:
    return ",".join(AXES) if any(_rank_order(parallel)) else parallel.rank_order


def _distance(a: ParallelConfig, b: ParallelConfig) -> float:
    ratios = (b.tp / max(1, a.tp), b.pp / max(1, a.pp), b.virtual_stages / max(1, a.virtual_stages))
    others = ("schedule", "sequence_parallel", "partition", "rank_order")
    changed: int = sum(getattr(a, name) != getattr(b, name) for name in others)
    return sum(abs(math.log2(ratio)) for ratio in ratios) + 0.3 * changed


def describe(parallel: ParallelConfig, world_size: int) -> str:
    """A legal layout in one line, in the words of the flags."""
    dp = world_size // (parallel.tp * parallel.pp)
    text = f"tp={parallel.tp} pp={parallel.pp} dp={dp}"
    if parallel.virtual_stages > 1:
        text += f" virtual_stages={parallel.virtual_stages}"
    text += f" schedule={parallel.schedule}"
    return text + (" sequence_parallel=True" if parallel.sequence_parallel else "")


def _some(values: list[int], near: int, count: int = 6) -> str:
    """The values nearest to ``near``, in order."""
    return ", ".join(map(str, sorted(sorted(values, key=lambda v: abs(v - near))[:count])))


def _multiples(number: int, of: int) -> str:
    low = number // of * of
    return _any_of([m for m in (low, low + of) if m > 0])


def _any_of(values: list[int] | list[str]) -> str:
    return " or ".join(map(str, values))
