"""What to say about a ranking: in words, and what more memory or faster links would bring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megalite.planner.estimate import Estimate, Estimator, Job, Machine
from megalite.planner.search import WORTH, Ranking

_CLOSE = 1.03
"""A layout at most so much slower than the best is as good, if it is simpler."""
BUBBLE_LIMIT = 0.15
_GB = 1e9


def advice(r: Ranking) -> list[str]:
    """Whether plain data parallelism would do, and what limits the best layout."""
    best, found = r.best[0], []
    p = best.job.parallel
    plain = _plain(r)
    if p.tp == p.pp == 1:
        found.append("plain data parallelism is the fastest: no tensor or pipeline parallelism")
    elif plain is not None and plain.step_s <= _CLOSE * best.step_s:
        more = plain.step_s / best.step_s - 1
        than = (
            f"{more:.1%} slower" if more >= 0 else f"{-more:.1%} faster, if it were not ruled out"
        )
        zero = " with zero1" if plain.job.parallel.zero1 else ""
        again = plain.job.parallel.recompute
        also = f" and recompute {again}" if again != "none" else ""
        found.append(
            f"plain data parallelism{zero}{also}, micro-batch {plain.job.micro_batch}, would do: "
            f"it fits and is {than}"
        )
    if p.tp > r.request.machine.hw.node_size:
        found.append("tp goes beyond a node: its collectives are on the network")
    return found


def bubble_warning(e: Estimate) -> str:
    """More than a limit of the pipeline idle: what would fill it; else nothing."""
    if e.bubble_fraction <= BUBBLE_LIMIT:
        return ""
    p, m = e.job.parallel, e.job.microbatches
    return (
        f"warning: {e.bubble_fraction:.0%} of the pipeline is idle: "
        f"{m} microbatch{'es' * (m > 1)} for pp={p.pp}"
        f" x {p.virtual_stages} stages; a larger global batch would fill it"
    )


def sensitivity(r: Ranking) -> list[str]:
    """What the best layout is short of."""
    return [*_memory(r), *_links(r.best[0])]


def _plain(r: Ranking) -> Estimate | None:
    """The fastest layout of data parallelism alone that fits."""
    request = r.request
    if request.gpus > request.global_batch:
        return None
    best: Estimate | None = None
    each = -(-request.global_batch // request.gpus)
    for recompute in ("none", "full"):
        for micro in (m for m in range(1, min(each, 64) + 1) if each % m == 0):
            job = r.best[0].job
            parallel = replace(
                job.parallel,
                tp=1,
                pp=1,
                virtual_stages=1,
                schedule="1f1b",
                sequence_parallel=False,
                zero1=request.gpus > 1,
                recompute=recompute,
                partition="uniform",
            )
            plain = Job(job.shape, parallel, job.world_size, job.global_batch, micro)
            e = Estimator(plain, request.machine)
            if max(m.total for m in e.memory()) <= request.cap:
                found = e.estimate()
                if best is None or found.step_s < best.step_s:
                    best = found
    return best


def _memory(r: Ranking) -> Iterator[str]:
    """The layout that needs least more memory of those that are worth it."""
    best = r.best[0]
    for e in r.too_big:
        p = e.job.parallel
        yield (
            f"{1 - e.step_s / best.step_s:.0%} faster with tp={p.tp} pp={p.pp} micro-batch "
            f"{e.job.micro_batch} recompute {p.recompute} {p.schedule} if you had "
            f"{(e.peak_bytes - r.request.cap) / _GB:.1f} GB more"
        )


def _links(best: Estimate) -> Iterator[str]:
    """What twice a bandwidth, or a rate, brings to this layout."""
    machine, hw = best.machine, best.machine.hw
    now = Estimator(best.job, machine).earliest_s
    for name, field in (
        ("the network", "net_bytes_s"),
        ("the links inside a node", "link_bytes_s"),
        ("the memory bandwidth", "hbm_bytes_s"),
        ("the rate of matrix products", "peak_flops"),
    ):
        changed = replace(hw, **{field: 2 * getattr(hw, field)})
        other = Machine(
            changed, machine.framework, machine.constants, machine.scalar, machine.element_bytes
        )
        gain = 1 - Estimator(best.job, other).earliest_s / now
        if gain >= WORTH:
            yield f"{gain:.0%} less time with twice {name}"
