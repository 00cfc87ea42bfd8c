"""Schedules by name: pure functions to what each rank computes, without any communication."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Literal

from megalite.errors import ConfigError
from megalite.schedule import zero_bubble
from megalite.schedule.action import Action, Op, Plan
from megalite.schedule.classic import (
    RankActions,
    interleaved_one_f_one_b,
    looped_bfs,
    naive,
    one_f_one_b,
)
from megalite.schedule.costs import Costs, MemoryLimit
from megalite.schedule.files import load_plan
from megalite.schedule.lower import FORWARD_QUEUE
from megalite.schedule.placement import Placement, place_stages
from megalite.schedule.search import search

Rank = Callable[[int, int, int], RankActions]  # (rank, pp, microbatches) -> its computations
Ranks = Callable[[int, int], Sequence[Sequence[Action]]]  # (pp, microbatches) -> all of them


@dataclass(frozen=True)
class Request:
    """What a schedule is asked for; costs and memory matter to ``auto`` alone."""

    pp: int
    num_microbatches: int
    virtual_stages: int
    costs: Costs
    memory: MemoryLimit


@dataclass(frozen=True)
class Schedule:
    """How a schedule is made, and how many stages a rank may have."""

    make: Callable[[Request], Plan]
    chunks: Literal["one", "two", "any"] = "one"

    def allows(self, virtual_stages: int) -> bool:
        return virtual_stages >= 1 if self.chunks == "any" else virtual_stages == self.fewest

    @property
    def fewest(self) -> int:
        return 2 if self.chunks == "two" else 1


def _plan(r: Request, placement: Placement, ranks: Iterable[Sequence[Action]]) -> Plan:
    rank_of = place_stages(placement, r.pp, r.virtual_stages)
    return Plan("", r.num_microbatches, rank_of, tuple(map(tuple, ranks)))


def _one_chunk(make: Rank) -> Schedule:
    return Schedule(
        lambda r: _plan(r, "loop", (make(i, r.pp, r.num_microbatches) for i in range(r.pp)))
    )


def _two_chunks(make: Ranks) -> Schedule:
    return Schedule(lambda r: _plan(r, "v", make(r.pp, r.num_microbatches)), "two")


def _any_chunks(make: Callable[[int, int, int, int], RankActions]) -> Schedule:
    def plan(r: Request) -> Plan:
        return _plan(
            r,
            "loop",
            (make(i, r.pp, r.num_microbatches, r.virtual_stages) for i in range(r.pp)),
        )

    return Schedule(plan, "any")


def _auto(r: Request) -> Plan:
    named = [
        schedule.make(r)
        for name, schedule in SCHEDULES.items()
        if name != "auto" and schedule.allows(r.virtual_stages)
    ]
    return search(r.pp, r.num_microbatches, r.virtual_stages, r.costs, r.memory, named)


SCHEDULES: dict[str, Schedule] = {
    "naive": _one_chunk(naive),
    "gpipe": _one_chunk(lambda rank, pp, m: looped_bfs(rank, pp, m, 1)),
    "1f1b": _one_chunk(one_f_one_b),
    "interleaved_1f1b": _any_chunks(interleaved_one_f_one_b),
    "looped_bfs": _any_chunks(looped_bfs),
    "zb_h1": _one_chunk(lambda rank, pp, m: zero_bubble.zb_h(rank, pp, m, 1)),
    "zb_h2": _one_chunk(lambda rank, pp, m: zero_bubble.zb_h(rank, pp, m, 2)),
    "zb_v": _two_chunks(zero_bubble.zb_v),
    "v_half": _two_chunks(zero_bubble.v_half),
    "v_min": _two_chunks(zero_bubble.v_min),
    "dualpipe_v": _two_chunks(
        lambda pp, m: [zero_bubble.dualpipe_v(rank, pp, m) for rank in range(pp)]
    ),
    "auto": Schedule(_auto, "any"),
}
FILE = "file:"
MOST_ACTIONS = 5_000_000  # F, I and W of a step: a plan of that many takes minutes and gigabytes


def find_schedule(name: str) -> Schedule:
    """The schedule of that name, or ``file:PATH``, which is not read before it is made.

    Raises:
        ConfigError: for an unknown name.
    """
    if name in SCHEDULES:
        return SCHEDULES[name]
    if name.startswith(FILE):
        path = name.removeprefix(FILE)
        return Schedule(
            lambda r: load_plan(path, r.pp, r.num_microbatches, r.virtual_stages), "any"
        )
    close = get_close_matches(name.lower().replace("-", "_"), SCHEDULES, n=1)
    hint = f"Did you mean {close[0]}? " if close else ""
    known = f"{', '.join(SCHEDULES)}, {FILE}PATH"
    raise ConfigError(
        "parallel.schedule", f"unknown schedule {name!r}", f"{hint}Use one of {known}"
    )


def build_schedule(
    name: str,
    pp: int,
    num_microbatches: int,
    virtual_stages: int = 1,
    costs: Costs | None = None,
    memory: MemoryLimit | None = None,
) -> Plan:
    """The compute actions of every rank; any number of microbatches from 1 on.

    Args:
        costs: what ``auto`` plans for; without it all stages and F, I, W cost the same and
            messages nothing.
        memory: what ``auto`` may hold; without it anything.
    Raises:
        ConfigError: for an unknown name, a number that the schedule cannot have, or a file that
            does not fit.
        ScheduleError: for a file that is no schedule.
    """
    schedule = check_request(name, pp, num_microbatches, virtual_stages)
    request = Request(
        pp,
        num_microbatches,
        virtual_stages,
        costs or Costs.equal(pp, virtual_stages),
        memory or MemoryLimit(),
    )
    return replace(schedule.make(request), name=name)


def check_request(name: str, pp: int, num_microbatches: int, virtual_stages: int) -> Schedule:
    """The schedule of that name, if it can be made for these numbers.

    Raises:
        ConfigError: as ``build_schedule``, before anything is made or read.
    """
    schedule = find_schedule(name)
    if pp < 1:
        raise ConfigError("parallel.pp", f"got pp={pp}", "Use at least 1")
    if num_microbatches < 1:
        raise ConfigError(
            "train.global_batch_size",
            f"got {num_microbatches} microbatches a step",
            "Use at least one microbatch",
        )
    if not schedule.allows(virtual_stages):
        need = {
            "one": "exactly one stage",
            "two": "exactly two stages",
            "any": "at least one stage",
        }
        raise ConfigError(
            "parallel.virtual_stages",
            f"{name} has {need[schedule.chunks]} a rank, got virtual_stages={virtual_stages}",
            f"Use virtual_stages={schedule.fewest}{_others(virtual_stages)}",
        )
    actions = 3 * pp * num_microbatches * virtual_stages
    if actions > MOST_ACTIONS:
        raise ConfigError(
            "parallel.schedule",
            f"{pp} ranks x {virtual_stages} stages x {num_microbatches} microbatches are "
            f"{actions:,} F, I and W",
            f"Use fewer: a step may have {MOST_ACTIONS:,}",
        )
    return schedule


def _others(virtual_stages: int) -> str:
    names = [name for name, schedule in SCHEDULES.items() if schedule.allows(virtual_stages)]
    return f", or one of the schedules {', '.join(names)}" if names else ""


def forward_only(rank_of: Sequence[int], num_microbatches: int) -> Plan:
    """Every forward and nothing else, for evaluation; for any placement of stages.

    The order is that of an execution in unit times in which each rank runs the deepest stage
    that has an input, and a stage stops while two of its outputs have not been taken. It always
    goes on: the deepest stage with an input waiting has no output waiting. So F of (stage,
    microbatch) comes after F of (stage + 1, microbatch - FORWARD_QUEUE), on which ``lower`` relies.
    """
    pp, last = max(rank_of) + 1, len(rank_of) - 1
    deepest_first = [[s for s in reversed(range(last + 1)) if rank_of[s] == r] for r in range(pp)]
    done = [0] * (last + 1)
    actions: list[RankActions] = [[] for _ in range(pp)]
    while done[last] < num_microbatches:
        before = tuple(done)
        for rank, stages in enumerate(deepest_first):
            for s in stages:
                has_input = done[s] < (before[s - 1] if s else num_microbatches)
                if has_input and (s == last or done[s] - before[s + 1] < FORWARD_QUEUE):
                    actions[rank].append(Action(Op.FORWARD, s, done[s]))
                    done[s] += 1
                    break
    return Plan("forward_only", num_microbatches, tuple(rank_of), tuple(map(tuple, actions)))
