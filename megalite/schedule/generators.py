"""Schedules by name: pure functions to what each rank computes, without any communication."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from megalite.errors import ConfigError
from megalite.schedule.action import Action, Op, Plan
from megalite.schedule.placement import Placement, place_stages

RankActions = list[Action]
FORWARD_QUEUE = 2  # outputs of a stage that may wait for the next one in a forward-only plan


def naive(rank: int, pp: int, num_microbatches: int) -> RankActions:
    """One microbatch through the whole pipeline and back, then the next."""
    return _alternate(rank, pp, 1, [range(num_microbatches)], warmup=0)


def one_f_one_b(rank: int, pp: int, num_microbatches: int) -> RankActions:
    """1F1B: at most ``pp - rank`` microbatches are in flight on ``rank``.

    Source: Narayanan et al. 2019 (PipeDream), section 3.2, with a flush each step
    (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1).
    """
    return _alternate(rank, pp, 1, [range(num_microbatches)], warmup=pp - rank - 1)


def looped_bfs(rank: int, pp: int, num_microbatches: int, virtual_stages: int) -> RankActions:
    """Every microbatch through a chunk before the next chunk; GPipe where there is one chunk.

    Source: Lamy-Poirier 2023 (arXiv:2211.05953); Huang et al. 2019 (GPipe, arXiv:1811.06965).
    """
    everything = num_microbatches * virtual_stages
    return _alternate(rank, pp, virtual_stages, [range(num_microbatches)], warmup=everything)


def interleaved_one_f_one_b(
    rank: int, pp: int, num_microbatches: int, virtual_stages: int
) -> RankActions:
    """1F1B over several chunks a rank: ``pp`` microbatches through a chunk, then the next chunk.

    A number of microbatches that ``pp`` does not divide makes the *first* group longer: it
    lengthens the warm-up and costs memory but no time, whereas a short last group dead-locks.

    Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.2.
    """
    if virtual_stages == 1:
        return one_f_one_b(rank, pp, num_microbatches)
    first = min(num_microbatches, pp + num_microbatches % pp)
    starts = range(first, num_microbatches, pp)
    groups = [range(first), *(range(start, start + pp) for start in starts)]
    warmup = 2 * (pp - rank - 1) + (virtual_stages - 1) * first
    return _alternate(rank, pp, virtual_stages, groups, warmup)


def _alternate(
    rank: int, pp: int, virtual_stages: int, groups: Sequence[range], warmup: int
) -> RankActions:
    """``warmup`` forwards, then a forward and a backward in turn, then the other backwards.

    Each group of microbatches goes through the rank's chunks in order, and back in reverse.
    """
    stages = range(rank, pp * virtual_stages, pp)
    forward = [Action(Op.FORWARD, s, m) for group in groups for s in stages for m in group]
    backward = [
        Action(Op.BACKWARD, s, m) for group in groups for s in reversed(stages) for m in group
    ]
    warmup = min(warmup, len(forward))
    steady = len(forward) - warmup
    pairs = zip(forward[warmup:], backward[:steady], strict=True)
    return forward[:warmup] + [a for pair in pairs for a in pair] + backward[steady:]


@dataclass(frozen=True)
class Schedule:
    """How a schedule is made and what it asks for.

    Attributes:
        make: (pp, num_microbatches, virtual_stages) -> every rank's compute actions.
        placement: where its stages lie.
        chunks: how many stages a rank may have.
        split_backward: whether it has I and W in place of B.
    """

    make: Callable[[int, int, int], Iterable[RankActions]]
    placement: Placement = "loop"
    chunks: Literal["one", "two", "any"] = "one"
    split_backward: bool = False

    def allows(self, virtual_stages: int) -> bool:
        return virtual_stages >= 1 if self.chunks == "any" else virtual_stages == self.fewest

    @property
    def fewest(self) -> int:
        return 2 if self.chunks == "two" else 1


SCHEDULES: dict[str, Schedule] = {
    "naive": Schedule(lambda pp, m, v: (naive(r, pp, m) for r in range(pp))),
    "gpipe": Schedule(lambda pp, m, v: (looped_bfs(r, pp, m, 1) for r in range(pp))),
    "1f1b": Schedule(lambda pp, m, v: (one_f_one_b(r, pp, m) for r in range(pp))),
    "interleaved_1f1b": Schedule(
        lambda pp, m, v: (interleaved_one_f_one_b(r, pp, m, v) for r in range(pp)), chunks="any"
    ),
    "looped_bfs": Schedule(
        lambda pp, m, v: (looped_bfs(r, pp, m, v) for r in range(pp)), chunks="any"
    ),
}


def find_schedule(name: str) -> Schedule:
    """The registered schedule.

    Raises:
        ConfigError: for an unknown name.
    """
    if name in SCHEDULES:
        return SCHEDULES[name]
    close = get_close_matches(name, SCHEDULES, n=1)
    hint = f"Did you mean {close[0]}? " if close else ""
    known = ", ".join(SCHEDULES)
    raise ConfigError("parallel.schedule", f"unknown schedule {name!r}", f"{hint}Known: {known}")


def build_schedule(name: str, pp: int, num_microbatches: int, virtual_stages: int = 1) -> Plan:
    """The compute actions of every rank; any number of microbatches from 1 on.

    Raises:
        ConfigError: for an unknown name, or a number that the schedule cannot have.
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
    ranks = schedule.make(pp, num_microbatches, virtual_stages)
    rank_of = place_stages(schedule.placement, pp, virtual_stages)
    return Plan(name, num_microbatches, rank_of, tuple(tuple(actions) for actions in ranks))


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
