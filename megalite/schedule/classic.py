"""Schedules with a whole backward pass, each a pure function to what one rank computes."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.schedule.action import Action, Op

RankActions = list[Action]


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
    return grouped_one_f_one_b(rank, pp, num_microbatches, virtual_stages, pp, 2)


def grouped_one_f_one_b(
    rank: int, pp: int, num_microbatches: int, virtual_stages: int, group: int, stairs: int
) -> RankActions:
    """1F1B over several chunks, ``group`` microbatches through each; the warm-up of a rank has
    ``stairs`` F more than that of the next. Fewer of both hold less memory and may wait more."""
    first = min(num_microbatches, group + num_microbatches % group)
    starts = range(first, num_microbatches, group)
    groups = [range(first), *(range(start, start + group) for start in starts)]
    warmup = stairs * (pp - rank - 1) + (virtual_stages - 1) * first
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
