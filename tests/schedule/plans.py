"""Plans that no generator makes, for tests."""

from __future__ import annotations

import random
from collections.abc import Sequence

from megalite.schedule.action import Action, Op, Plan


def random_plan(seed: int, rank_of: Sequence[int], num_microbatches: int) -> Plan:
    """What the ranks did in one random execution: legal by construction, in no sensible order.

    Each backward is either whole or split.
    """
    rng = random.Random(seed)
    last = len(rank_of) - 1
    actions: list[list[Action]] = [[] for _ in range(max(rank_of) + 1)]
    split = {(s, m): rng.random() < 0.5 for s in range(last + 1) for m in range(num_microbatches)}
    ready = [Action(Op.FORWARD, 0, m) for m in range(num_microbatches)]
    while ready:
        a = ready.pop(rng.randrange(len(ready)))
        actions[rank_of[a.stage]].append(a)
        if a.op is Op.FORWARD and a.stage < last:
            ready.append(Action(Op.FORWARD, a.stage + 1, a.microbatch))
            continue
        if a.op is Op.INPUT_GRAD:
            ready.append(Action(Op.WEIGHT_GRAD, a.stage, a.microbatch))
        if a.op is Op.WEIGHT_GRAD or (a.op is not Op.FORWARD and a.stage == 0):
            continue
        stage = a.stage if a.op is Op.FORWARD else a.stage - 1
        op = Op.INPUT_GRAD if split[stage, a.microbatch] else Op.BACKWARD
        ready.append(Action(op, stage, a.microbatch))
    return Plan("random", num_microbatches, tuple(rank_of), tuple(map(tuple, actions)))


def edited(plan: Plan, rank: int, before: str, after: str) -> Plan:
    """The plan with a run of one rank's actions replaced by another; both as text."""
    text = " ".join(map(str, plan[rank]))
    assert f" {text} ".count(f" {before} ") == 1, f"{before!r} is not once in {text!r}"
    changed = f" {text} ".replace(f" {before} ", f" {after} ").split()
    actions = list(plan.actions)
    actions[rank] = tuple(map(Action.parse, changed))
    return plan.replace(actions)
