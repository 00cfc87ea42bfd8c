"""Fits the constants to measured runs, and says how well rows that were left out are predicted.

Iterated reweighted least squares on the logarithm of predicted / measured, within bounds, each
table counting alike; a stack's scalar is the median of its rows' ratios. No torch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megalite.planner.constants import Constants, Stacks, bounds, load_constants, load_stacks
from megalite.planner.rows import INPUTS, predict

_ROBUST = 0.04
"""Errors above this count linearly: rows near out-of-memory must not bend the constants."""
_PRIOR = 0.02
"""Weight of the starting values: a constant that no row speaks of stays where it is."""
_STEP = 0.03  # of a constant's range, for the derivative

Row = Mapping[str, str]
Stack = tuple[str, str]
REFERENCE: tuple[Stack, ...] = (("Megatron-LM 2021", "selene"), ("Megatron-LM 2022", "selene"))
"""Their scalar is 1 while the constants are fitted: the constants are those of tuned software."""


@dataclass(frozen=True)
class Measured:
    """A row, its measured time, and what it counts."""

    row: Row
    time_s: float
    weight: float

    @property
    def stack(self) -> Stack:
        return self.row.get("framework", ""), self.row.get("cluster", "")


@dataclass(frozen=True)
class Fit:
    constants: Constants
    scalars: dict[Stack, float]


def measured_time(row: Row) -> float | None:
    """Seconds a step as measured, or derived from what was; None for a row known to be wrong."""
    if (row.get("exclude") or "").strip():
        return None
    text = (row.get("iter_time_s") or row.get("iter_time_derived_s") or "").strip()
    return float(text) if text else None


def weighted(tables: Mapping[str, Sequence[Row]], weights: Mapping[str, float]) -> list[Measured]:
    """Every usable row; a table's rows share its weight."""
    found = []
    for name, rows in tables.items():
        usable = [(r, t) for r in rows if (t := measured_time(r)) is not None]
        each = weights.get(name, 1.0) / max(1, len(usable)) ** 0.5
        found += [Measured(r, t, each) for r, t in usable]
    return found


def errors(data: Sequence[Measured], constants: Constants, stacks: Stacks) -> np.ndarray:
    """ln(predicted / measured) of each row, without its stack's scalar. Equal rows once."""
    free = replace(stacks, scalars={})
    known: dict[tuple[object, ...], float] = {}
    found = []
    for m in data:
        key = tuple(sorted((k, v) for k, v in m.row.items() if k in INPUTS))
        if key not in known:
            known[key] = predict(m.row, constants, free).iter_time_s
        found.append(math.log(known[key] / m.time_s))
    return np.array(found)


def scalars_of(data: Sequence[Measured], logs: np.ndarray) -> dict[Stack, float]:
    """The weighted median of measured / predicted of each stack."""
    return {
        stack: math.exp(-_median(logs[at], np.array([data[i].weight for i in at])))
        for stack, at in _by_stack(data).items()
    }


def _by_stack(data: Sequence[Measured]) -> dict[Stack, list[int]]:
    found: defaultdict[Stack, list[int]] = defaultdict(list)
    for i, m in enumerate(data):
        found[m.stack].append(i)
    return found


def _median(values: np.ndarray, weight: np.ndarray) -> float:
    """The middle of the values, a row counting as the square of its weight."""
    order = np.argsort(values)
    share = np.cumsum(weight[order] ** 2)
    middle = np.interp(share[-1] / 2, share - weight[order] ** 2 / 2, values[order])
    return float(middle)


def fit(
    data: Sequence[Measured],
    rounds: int = 6,
    free: Sequence[str] | None = None,
    start: Constants | None = None,
    say: bool = False,
) -> Fit:
    """The constants (those named in ``free``; by default all) and every stack's scalar."""
    stacks, limits = load_stacks(), bounds()
    names = list(limits) if free is None else list(free)
    constants = start or load_constants()
    low = np.array([limits[n][0] for n in names])
    high = np.array([limits[n][2] for n in names])
    x = (np.array([getattr(constants, n) for n in names]) - low) / (high - low)
    prior = x.copy()

    def at(x: np.ndarray) -> Constants:
        values = low + np.clip(x, 0, 1) * (high - low)
        return replace(constants, **dict(zip(names, values.tolist(), strict=True)))

    weight = np.array([m.weight for m in data])
    best, logs = math.inf, errors(data, at(x), stacks)
    damping = 1.0
    for _ in range(rounds):
        jacobian = np.stack(
            [
                (errors(data, at(_moved(x, i)), stacks) - logs) / (_moved(x, i)[i] - x[i])
                for i in range(len(names))
            ],
            axis=1,
        )
        loss = _loss(data, logs, weight)
        best = loss
        while damping > 0.1:
            step = _solve(data, logs, jacobian, weight, x, prior)
            trial = np.clip(x + damping * step, 0, 1)
            trial_logs = errors(data, at(trial), stacks)
            trial_loss = _loss(data, trial_logs, weight)
            if trial_loss < best:
                x, logs, best = trial, trial_logs, trial_loss
                break
            damping /= 2
        if say:
            shown = {
                n: float(f"{v:.4g}") for n, v in zip(names, low + x * (high - low), strict=True)
            }
            print(f"loss {best:.5f} damping {damping} {shown}", flush=True)
        if damping <= 0.1:
            break
        damping = min(1.0, 2 * damping)
    return Fit(at(x), scalars_of(data, logs))


def _moved(x: np.ndarray, i: int) -> np.ndarray:
    moved = x.copy()
    moved[i] += _STEP if x[i] + _STEP <= 1 else -_STEP
    return moved


def _centred(data: Sequence[Measured], values: np.ndarray, mean: bool) -> np.ndarray:
    """Without each stack's median (or mean): what its scalar takes away."""
    found = values.copy()
    for stack, at in _by_stack(data).items():
        if stack in REFERENCE:
            continue
        w = np.array([data[i].weight for i in at])
        if mean:
            found[at] -= np.average(values[at], axis=0, weights=w**2)
        else:
            found[at] -= _median(values[at], w)
    return found


def _loss(data: Sequence[Measured], logs: np.ndarray, weight: np.ndarray) -> float:
    e = np.abs(_centred(data, logs, mean=False))
    huber = np.where(e < _ROBUST, e * e / (2 * _ROBUST), e - _ROBUST / 2)
    return float((weight**2 * huber).sum() / (weight**2).sum())


def _solve(
    data: Sequence[Measured],
    logs: np.ndarray,
    jacobian: np.ndarray,
    weight: np.ndarray,
    x: np.ndarray,
    prior: np.ndarray,
) -> np.ndarray:
    """A bounded step: constants that would leave their range stop at its end."""
    e = _centred(data, logs, mean=False)
    w = weight / np.sqrt(np.maximum(1.0, np.abs(e) / _ROBUST))
    slopes = _centred(data, jacobian, mean=True)
    a = np.vstack([w[:, None] * slopes, _PRIOR * np.eye(len(x))])
    b = np.concatenate([-w * e, _PRIOR * (prior - x)])
    step = np.zeros_like(x)
    free = np.ones(len(x), bool)
    for _ in range(len(x)):
        left = b - a @ np.where(free, 0.0, step)
        step[free] = np.linalg.lstsq(a[:, free], left, rcond=None)[0]
        out = free & ((x + step < 0) | (x + step > 1))
        if not out.any():
            break
        step[out] = np.clip(x[out] + step[out], 0, 1) - x[out]
        free &= ~out
    bounded: np.ndarray = np.clip(step, -0.3, 0.3)
    return bounded
