"""``explain``: where the time and the memory of one layout go."""

from __future__ import annotations

from typing import Any

from megalite.planner.cost import LayerCosts
from megalite.planner.estimate import Estimator
from megalite.planner.pipeline import lowered
from megalite.schedule.lost_time import lost_time
from megalite.schedule.simulate import Timeline, simulate_step
from tools.planning.words import layout_json, memory_json

_MOST_DRAWN = 24
"""Microbatches of a timeline: more cannot be told apart."""


def explanation(e: Estimator) -> dict[str, Any]:
    """Shares of the step by cause, a layer by kind of work, memory by rank and kind."""
    estimate = e.estimate()
    return {
        "layout": layout_json(estimate),
        "time": _shares(e, estimate.step_s / e.machine.scalar),
        "layer_s": _layer(e),
        "memory": [memory_json(m) for m in estimate.memory],
        "stages": [[r.start, r.stop] for r in e.layers],
    }


def _shares(e: Estimator, step_s: float) -> dict[str, float]:
    """Of the rank that computes most; a long pipeline by a shorter one of the same kind."""
    p, job = e.job.parallel, e.job
    pipelined = e.pipeline()
    busy = max(pipelined.busy)
    found = {"forward and backward": busy}
    idle = pipelined.makespan - busy
    if p.pp > 1:
        few = min(job.microbatches, 8 * p.pp)
        lost = lost_time(lowered(p.schedule, p.pp, few, p.virtual_stages), e.costs)
        rank = max(lost, key=lambda x: x.busy)
        whole = rank.idle or 1.0
        found |= {
            "bubble: warm-up and drain": idle * rank.warm_up_and_drain / whole,
            "bubble: uneven stages": idle * rank.imbalance / whole,
            "pipeline messages": idle * rank.communication / whole,
            "data-parallel reduction": idle * rank.data_parallel / whole,
        }
    else:
        found["data-parallel reduction"] = idle
    found["tied embedding"] = e.tie_s
    found["optimizer"] = e.optimizer_s
    return {name: seconds / step_s for name, seconds in found.items()}


def _layer(e: Estimator) -> dict[str, float]:
    """One layer and microbatch, by kind of work."""
    job, machine = e.job, e.machine
    costs = LayerCosts(job.shape, job.split, job.micro_batch, e.k, machine.framework)
    layer = costs.layer()
    core, _ = costs.attention_forward()
    exchange, _ = costs.exchange()
    return {
        "forward": layer.forward,
        "  of it attention": core,
        "  of it tp collectives": exchange,
        "backward, input gradient": layer.input_grad,
        "backward, weight gradient": layer.weight_grad,
        "host, forward": layer.host_forward,
        "host, backward": layer.host_backward,
    }


def timeline(e: Estimator) -> Timeline:
    """Of the first microbatches, if there are many."""
    p = e.job.parallel
    few = min(e.job.microbatches, max(_MOST_DRAWN, 2 * p.pp))
    return simulate_step(lowered(p.schedule, p.pp, few, p.virtual_stages), e.costs)
