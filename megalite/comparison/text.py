"""A comparison in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isinf

from megalite.comparison.compare import Comparison, Difference, Side
from megalite.comparison.record import PHASES, RECEIVED

MOST_PLACES, MOST_STEPS = 10, 8


def describe(found: Comparison) -> str:
    """All of it, a few lines to a screen."""
    lines = _agree(found) if found.first is None else _part(found, found.first)
    return "\n".join([*lines, *_alone(found)])


def place(d: Difference) -> str:
    """Which tensor."""
    words = {
        "forward": f"output of {d.name}",
        "backward": f"gradient at the output of {d.name}",
        "gradient": f"gradient of {d.name}",
        "weight": f"updated {d.name}",
    }
    return words[d.phase] + (", as received" if d.role == RECEIVED else "")


def _agree(found: Comparison) -> Iterator[str]:
    worst = found.before
    size = f"{worst.relative:.1e}" if worst else "0"
    where = f" ({place(worst)}, step {worst.step})" if worst and worst.relative else ""
    how = "to the bit" if found.exact else f"within {found.tolerance:.1e}"
    if found.drifts:
        start = max(found.by_step[found.steps[0]].values())
        yield (
            f"The runs drift apart as rounding makes them in training, from {start:.1e} in step "
            f"{found.steps[0]} to {size}{where}: over the tolerance of {found.tolerance:.1e}, but "
            "no place stands out. A finer dtype tells more"
        )
        yield from _steps(found)
        return
    yield (
        f"The runs agree {how} over {_count(len(found.steps), 'step')}, worst relative difference "
        f"{size}{where}"
    )
    yield _bits(found)


def _alone(found: Comparison) -> Iterator[str]:
    for run, steps in zip("AB", found.alone, strict=True):
        if steps:
            listed = ", ".join(map(str, steps[:MOST_STEPS])) + ", ..." * (len(steps) > MOST_STEPS)
            what = f"{_count(len(steps), 'step')} of {run} ({listed})"
            yield f"Not compared: {what}, which the other run has not recorded"


def _bits(found: Comparison) -> str:
    return f"{found.same_bits} of {found.num_tensors} tensors are equal to the bit"


def _part(found: Comparison, first: Difference) -> Iterator[str]:
    yield f"The runs part at step {first.step}, {first.phase}: {place(first)}"
    if first.phase == "backward" and first.role != RECEIVED:
        yield f"  computed by the backward pass of {first.computed_by}"
    if first.missing:
        yield f"  which has no record in {first.missing.upper()}"
    else:
        yield f"  by {_size(first.relative)} (tolerance {found.tolerance:.1e})" + _samples(first)
    for name, side in (("A", first.a), ("B", first.b)):
        if side is not None:
            yield f"  {name}: {_side(first, side)}"
    yield from _history(found)
    if found.after:
        yield f"What follows in step {first.step}:"
        yield from _table(found.after)
    yield from _steps(found)


def _samples(d: Difference) -> str:
    if d.sample < 0:
        return ""
    return f" in sample {d.sample} of the batch; {d.num_apart} of {d.num_samples} samples differ"


def _side(d: Difference, side: Side) -> str:
    microbatch = f", microbatch {side.microbatch}" if d.sample >= 0 else ""
    ranks = ", ".join(map(str, side.ranks))
    whose = f"rank {ranks}"
    if len(side.ranks) > 1:
        whose = f"ranks {ranks} ({'a part each' if side.copies == 1 else 'their copies differ'})"
    if side.alike:
        whose += f" (and {side.alike} with the same bits)"
    odd = "  <- other ranks' copies agree with the other run" if side.deviates else ""
    return f"stage {side.stage}{microbatch}, {whose}, norm {side.norm:.6g}{odd}"


def _history(found: Comparison) -> Iterator[str]:
    before = found.before
    if before is None:
        yield "  nothing is recorded before it"
        return
    yield (
        f"  before it the worst was {before.relative:.1e} ({place(before)}, step {before.step}); "
        + _bits(found)
    )


def _table(places: Sequence[Difference]) -> Iterator[str]:
    rows = [(d.phase, place(d), _size(d.relative), _stages(d)) for d in places[:MOST_PLACES]]
    wide = max(len(what) for _, what, _, _ in rows)
    for phase, what, size, stages in rows:
        yield f"  {phase:8s}  {what:{wide}s}  {size:>8s}  {stages}"
    if len(places) > MOST_PLACES:
        yield f"  and {_count(len(places) - MOST_PLACES, 'more place')}"


def _stages(d: Difference) -> str:
    sides = (("A", d.a), ("B", d.b))
    return ", ".join(f"stage {side.stage} of {name}" for name, side in sides if side)


def _steps(found: Comparison) -> Iterator[str]:
    yield "The worst of each step:"
    yield "  step " + " ".join(f"{phase:>10s}" for phase in PHASES)
    steps = list(found.by_step)
    start = max(0, steps.index(found.first.step) - 2) if found.first else 0
    shown = steps[start : start + MOST_STEPS]
    if steps[-1] not in shown:
        shown.append(steps[-1])
    for step in shown:
        worst = found.by_step[step]
        yield f"  {step:4d} " + " ".join(f"{_size(worst.get(p, 0.0)):>10s}" for p in PHASES)


def _size(relative: float) -> str:
    return "all of it" if isinf(relative) else f"{relative:.1e}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)
