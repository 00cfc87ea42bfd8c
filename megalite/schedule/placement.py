"""Which rank has which stage, and which stage has which layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf
from typing import Literal, assert_never

from megalite.errors import ConfigError

Placement = Literal["loop", "v"]
_FIELD = "parallel.partition"


def place_stages(placement: Placement, pp: int, virtual_stages: int) -> tuple[int, ...]:
    """The pipeline rank of each stage: round and round, or there and back (two stages a rank)."""
    match placement:
        case "loop":
            return tuple(range(pp)) * virtual_stages
        case "v":
            return (*range(pp), *reversed(range(pp)))
        case _:
            assert_never(placement)


def place_layers(
    costs: Sequence[float],
    num_stages: int,
    *,
    first_extra: float = 0.0,
    last_extra: float = 0.0,
    mode: str | Sequence[int] = "uniform",
    rank_of: Sequence[int] = (),
) -> tuple[range, ...]:
    """Cuts the layers into one contiguous range a stage.

    "uniform" gives each stage as many layers as the others, or one more, the last and the first
    stage last of all. "balanced" makes the dearest rank as cheap as any cut can: that is what
    bounds a step of many microbatches. Where ranks have one stage each, the sum of squares is
    then least; where equal layers go round several stages a rank, each rank's stages are then as
    equal as they can be, because a long stage lengthens the warm-up; where unequal layers do,
    the dearest *stage* is as cheap as it can be. A list gives each stage's number of layers.
    Balanced and listed stages may be empty: they pass on what they get.

    Args:
        costs: what each layer costs, >= 0, in any unit.
        first_extra: what the first stage costs besides (embedding), in the same unit.
        last_extra: what the last stage costs besides (head and loss).
        mode: "uniform", "balanced", or the numbers of layers.
        rank_of: the rank of each stage; by default each has its own.
    Raises:
        ConfigError: if uniform stages would be empty, or a list does not fit.
    """
    layers = len(costs)
    if mode == "uniform":
        if layers < num_stages:
            raise ConfigError(
                _FIELD,
                f"{layers} layers cannot fill {num_stages} stages (pp x virtual_stages)",
                f"Use at most {layers} stages, or list each stage's count, some of them 0",
            )
        return _ranges(_uniform_counts(layers, num_stages))
    if mode == "balanced":
        extras = [0.0] * num_stages
        extras[0] += first_extra
        extras[-1] += last_extra
        if len(set(rank_of)) < len(rank_of) and len(set(costs)) == 1:
            return _ranges(_dealt_counts(layers, costs[0], extras, rank_of))
        return _balanced(costs, extras)
    if isinstance(mode, str):
        raise ConfigError(
            _FIELD, f"unknown mode {mode!r}", "Use uniform, balanced or a list of layer counts"
        )
    return _ranges(_checked_counts(mode, layers, num_stages))


def _ranges(counts: Sequence[int]) -> tuple[range, ...]:
    ends = list(accumulate(counts))
    return tuple(range(end - count, end) for count, end in zip(counts, ends, strict=True))


def _checked_counts(counts: Sequence[int], layers: int, num_stages: int) -> Sequence[int]:
    shown = list(counts)
    if len(counts) != num_stages:
        raise ConfigError(
            _FIELD,
            f"{shown} has {len(counts)} counts for {num_stages} stages (pp x virtual_stages)",
            f"Give {num_stages} counts that sum to {layers}",
        )
    if min(counts) < 0 or sum(counts) != layers:
        raise ConfigError(
            _FIELD,
            f"{shown} sums to {sum(counts)} and its least count is {min(counts)}",
            f"Give {num_stages} counts of at least 0 that sum to {layers}",
        )
    return counts


def _uniform_counts(layers: int, num_stages: int) -> list[int]:
    """The surplus goes to the stages between, evenly spread, then to the first."""
    count, surplus = divmod(layers, num_stages)
    between = max(num_stages - 2, 0)
    spread = min(surplus, between)
    favoured = {1 + (2 * i + 1) * between // (2 * spread) for i in range(spread)}
    if surplus > spread:
        favoured.add(0)
    return [count + (s in favoured) for s in range(num_stages)]


def _dealt_counts(
    layers: int, cost: float, extras: Sequence[float], rank_of: Sequence[int]
) -> list[int]:
    """Equal layers, dealt one by one to the cheapest stage of the cheapest rank.

    With equal layers no other way ends with a cheaper dearest rank, or within the ranks' numbers
    with a cheaper dearest stage: every sum of a convex function of the loads is least.
    """
    stage_cost = list(extras)
    rank_cost = dict.fromkeys(rank_of, 0.0)
    for stage, rank in enumerate(rank_of):
        rank_cost[rank] += extras[stage]
    counts = [0] * len(extras)
    for _ in range(layers):
        least = min(rank_cost.values())
        stages = [s for s, rank in enumerate(rank_of) if rank_cost[rank] == least]
        stage = min(stages, key=lambda s: (stage_cost[s], s))
        counts[stage] += 1
        stage_cost[stage] += cost
        rank_cost[rank_of[stage]] += cost
    return counts


def _balanced(costs: Sequence[float], extras: Sequence[float]) -> tuple[range, ...]:
    """Two passes of one dynamic programme: the least possible maximum, then under that bound
    the least sum of squares."""
    total = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, end: int) -> float:
        return total[end] - total[start] + extras[stage]

    layers, num_stages = len(costs), len(extras)
    even = _ranges(_uniform_counts(layers, num_stages))
    bound = max(cost(s, r.start, r.stop) for s, r in enumerate(even))
    cut = _best_cut(layers, num_stages, cost, bound, max)
    bound = max(cost(s, r.start, r.stop) for s, r in enumerate(cut))
    return _best_cut(layers, num_stages, cost, bound, lambda sofar, c: sofar + c * c)


def _best_cut(
    layers: int,
    num_stages: int,
    cost: Callable[[int, int, int], float],
    bound: float,
    join: Callable[[float, float], float],
) -> tuple[range, ...]:
    """The cut with no stage above ``bound`` whose costs, joined from the left, come to least."""
    best = [0.0] + [inf] * layers
    starts: list[list[int]] = []
    for stage in range(num_stages):
        found, start_of = [inf] * (layers + 1), [0] * (layers + 1)
        for end in range(layers + 1):
            for start in range(end, -1, -1):
                c = cost(stage, start, end)
                if c > bound:
                    break
                if (value := join(best[start], c)) < found[end]:
                    found[end], start_of[end] = value, start
        best = found
        starts.append(start_of)
    cut: list[range] = []
    end = layers
    for start_of in reversed(starts):
        cut.insert(0, range(start_of[end], end))
        end = start_of[end]
    return tuple(cut)
