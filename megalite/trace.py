"""What a rank did when: spans of its actions, waits and reductions, in a file that Perfetto opens.

A ``Trace`` that records nothing costs a test of one attribute where it is asked. One that records
appends a tuple a span; a device's marks are read steps later, so that no step waits for them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

ROWS = ("step", "compute", "message", "reduce")
_IN_FLIGHT = "reduction in flight"
FAILED = " (failed)"
"""What the name of a step ends with that an error has ended: not all of its spans are there."""
_LAG = 2  # steps after which the device is expected to have passed a step's marks


class Work(Protocol):
    """Something under way that can be waited for."""

    def wait(self) -> object: ...


class Clock(Protocol):
    """Marks points of a rank's work, and says later when they were, by the host's clock."""

    def mark(self) -> Any: ...
    def done(self, mark: Any) -> bool: ...
    def seconds(self, mark: Any) -> float: ...
    def drift(self) -> float: ...


class HostClock:
    """For work that is done when the host is: ``time.monotonic``, one clock for all processes of
    a host."""

    mark = staticmethod(time.monotonic)

    def done(self, mark: float) -> bool:
        return True

    def seconds(self, mark: float) -> float:
        return mark

    def drift(self) -> float:
        """How far marks have come to lie behind the host's clock since the start, seconds."""
        return 0.0


class Span(NamedTuple):
    """A piece of a step on one rank, in seconds.

    Attributes:
        row: of ``ROWS``, or "reduction in flight"; spans of a row do not overlap but for "step",
            where the whole step holds its parts.
        name: filled in when it is empty and ``op`` is not.
        op: the action's, as its text; a wait for a message has that of the action that waits.
        peer: the pipeline rank at the other end of a message; -1: none.
    """

    row: str
    name: str
    start: Any
    end: Any
    op: str = ""
    stage: int = -1
    microbatch: int = -1
    peer: int = -1


class Trace:
    """Collects the spans of one rank.

    Args:
        most: spans to keep at most; 0 records nothing. When they are reached every second step
            goes, and only every second of those to come is recorded; then every fourth, and so on.
            The step that is recorded last is kept whatever its size.
    """

    def __init__(self, clock: Clock | None = None, most: int = 0) -> None:
        self.clock: Clock = clock or HostClock()
        self.most, self.every = most, 1
        self.steps: dict[int, list[Span]] = {}
        self._pending: list[tuple[int, list[Span]]] = []
        self._spans: list[Span] | None = None
        self._waited: list[tuple[Any, Any, int]] = []

    @property
    def recording(self) -> bool:
        return self._spans is not None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record what happens inside as step ``number``, if it is one to keep."""
        if not self.most or number % self.every:
            yield
            return
        self._spans = spans = []
        start, name = self.clock.mark(), f"step {number}"
        try:
            yield
        except BaseException:
            name += FAILED
            raise
        finally:
            spans.append(Span("step", name, start, self.clock.mark()))
            self._spans = None
            self._pending.append((number, spans))
            self._read(_LAG)

    def span(self, name: str) -> AbstractContextManager[None]:
        """A part of the step outside the pipeline's actions."""
        return nullcontext() if self._spans is None else self._span(name)

    def add(self, span: Span) -> None:
        assert self._spans is not None
        self._spans.append(span)

    def message(self, peer: int, work: Work) -> Work:
        """A message from or to ``peer``, whose wait is noted for the action that waits."""
        return work if self._spans is None else _Message(self, work, peer)

    def reduction(self, name: str, work: Work) -> Work:
        """A reduction of gradients that has just been started."""
        return work if self._spans is None else _Reduction(self, work, name)

    def waits(self) -> list[tuple[Any, Any, int]]:
        """The waits for messages since the last call: start, end, peer."""
        found, self._waited = self._waited, []
        return found

    def newest(self) -> list[Span]:
        """The spans of the last step that has been read; none if there is none."""
        return next(reversed(self.steps.values())) if self.steps else []

    def finish(self) -> None:
        """Read what is left, waiting for the device."""
        self._read(0)

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        start = self.clock.mark()
        yield
        if self._spans is not None:
            self._spans.append(Span("step", name, start, self.clock.mark()))

    def _read(self, lag: int) -> None:
        while len(self._pending) > lag:
            number, spans = self._pending[0]
            if lag and len(self._pending) < 4 * lag and not self.clock.done(spans[-1].end):
                return
            del self._pending[0]
            if self.steps and number % self.every:
                continue
            at = self.clock.seconds
            self.steps[number] = [
                s._replace(name=s.name or _name(s), start=at(s.start), end=at(s.end)) for s in spans
            ]
            self._thin_out()

    def _thin_out(self) -> None:
        while len(self.steps) > 1 and sum(map(len, self.steps.values())) > self.most:
            self.every *= 2
            kept = {n: spans for n, spans in self.steps.items() if n % self.every == 0}
            last = max(self.steps)
            self.steps = kept or {last: self.steps[last]}


def _name(span: Span) -> str:
    action = f"{span.stage}{span.op}{'' if span.microbatch < 0 else span.microbatch}"
    waits = span.row == "message" and span.op in _ARRIVES
    return f"wait for {action}'s message" if waits else action


class _Message:
    def __init__(self, trace: Trace, work: Work, peer: int) -> None:
        self.trace, self.work, self.peer = trace, work, peer

    def wait(self) -> None:
        mark = self.trace.clock.mark
        start = mark()
        self.work.wait()
        self.trace._waited.append((start, mark(), self.peer))


class _Reduction:
    def __init__(self, trace: Trace, work: Work, name: str) -> None:
        self.trace, self.work, self.name = trace, work, name
        self.started = trace.clock.mark()

    def wait(self) -> None:
        mark, name = self.trace.clock.mark, self.name
        start = mark()
        self.work.wait()
        end = mark()
        self.trace.add(Span("reduce", name, start, end))
        self.trace.add(Span(_IN_FLIGHT, name, self.started, end))


@dataclass(frozen=True)
class Offset:
    """A rank's clock minus that of rank 0.

    Attributes:
        at: when it was measured, by the rank's own clock.
        uncertainty_s: the true value lies within so much on either side.
        shared: both read the same clock: nothing had to be measured.
    """

    at: float
    seconds: float = 0.0
    uncertainty_s: float = 0.0
    shared: bool = True


@dataclass(frozen=True)
class Origin:
    """Whose trace it is: all that is needed to make sense of its spans.

    ``plan`` holds the schedule's name, number of microbatches and the pipeline rank of each stage,
    ``actions`` the list of this rank as text. ``run`` is the same for the ranks of one start of a
    job, and larger for a later one.
    """

    rank: int
    world_size: int
    coordinates: Mapping[str, int]
    layout: str
    plan: Mapping[str, Any]
    actions: Sequence[str]
    run: int = 0


@dataclass(frozen=True)
class RankTrace:
    """A file read back: ``steps`` maps step numbers to spans in seconds on rank 0's clock."""

    origin: Origin
    clock: Mapping[str, Any]
    steps: Mapping[int, Sequence[Span]] = field(repr=False)


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.json"


def write_trace(
    folder: Path, trace: Trace, origin: Origin, first: Offset, last: Offset | None = None
) -> Path:
    """Write all spans of a rank, whole or not at all; returns the file.

    Args:
        first, last: the clock's offset at the start and now; without the latter (a job that
            failed) the former is taken for the whole run, and the file says so.
    """
    trace.finish()
    shift = _shift(first, last, trace.clock.drift())
    clock = {
        "unit": "microseconds of CLOCK_MONOTONIC on the host of rank 0",
        "same_host_as_rank_0": first.shared,
        "offset_s": first.seconds,
        "drift_s": last.seconds - first.seconds if last else None,
        "device_drift_s": trace.clock.drift(),
        "uncertainty_s": max(o.uncertainty_s for o in (first, last) if o),
    }
    events = _names(origin.rank, origin.coordinates)
    for step, spans in trace.steps.items():
        events += _events(step, spans, origin, shift)
    whole = {
        "displayTimeUnit": "ms",
        "otherData": {"origin": asdict(origin), "clock": clock, "every": trace.every},
        "traceEvents": events,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = file_of(folder, origin.rank)
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(whole, separators=(",", ":")), encoding="utf-8")
    aside.replace(path)
    return path


def read_trace(path: Path, step: int | None = None, row: str = "") -> RankTrace:
    """The inverse of ``write_trace``, to the microsecond's thousandth.

    Args:
        step, row: read only those spans.
    Raises:
        ValueError, KeyError, TypeError: if the file is not such a trace.
    """
    whole = json.loads(path.read_text(encoding="utf-8"))
    steps: dict[int, list[Span]] = {}
    for event in whole["traceEvents"]:
        if event["ph"] == "X":
            args, start = event["args"], event["ts"] / 1e6
            number = args.pop("step")
            if step in (None, number) and row in ("", event["cat"]):
                end = (event["ts"] + event["dur"]) / 1e6
                span = Span(event["cat"], event["name"], start, end, **args)
                steps.setdefault(number, []).append(span)
    return RankTrace(Origin(**whole["otherData"]["origin"]), whole["otherData"]["clock"], steps)


def _shift(first: Offset, last: Offset | None, drift: float) -> Callable[[float], float]:
    """From a rank's marks to rank 0's clock; both corrections grow evenly from start to end."""
    if last is None or last.at <= first.at:
        return lambda t: t - first.seconds
    length = last.at - first.at
    change = last.seconds - first.seconds - drift

    def shift(t: float) -> float:
        return t - first.seconds - change * (t - first.at) / length

    return shift


def _names(rank: int, coordinates: Mapping[str, int]) -> list[dict[str, Any]]:
    where = ", ".join(f"{axis} {index}" for axis, index in coordinates.items())
    found: list[dict[str, Any]] = [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}: {where}"}},
        {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}},
    ]
    for tid, row in enumerate(ROWS):
        common = {"ph": "M", "pid": rank, "tid": tid}
        found.append({**common, "name": "thread_name", "args": {"name": row}})
        found.append({**common, "name": "thread_sort_index", "args": {"sort_index": tid}})
    return found


def _events(
    step: int, spans: Sequence[Span], origin: Origin, shift: Callable[[float], float]
) -> Iterator[dict[str, Any]]:
    """By start; messages also as arrows from SEND to the computation that takes them."""
    column = ".".join(f"{a}{i}" for a, i in origin.coordinates.items() if a != "pp")
    for number, span in enumerate(sorted(spans, key=lambda s: (s.start, -s.end))):
        start = round(shift(span.start) * 1e6, 3)
        duration = max(0.0, round(round(shift(span.end) * 1e6, 3) - start, 3))
        common = {"pid": origin.rank, "ts": start}
        if span.row == _IN_FLIGHT:
            flight = {**common, "cat": _IN_FLIGHT, "name": span.name, "id": f"{step}.{number}"}
            yield {**flight, "ph": "b", "args": {"step": step}}
            yield {**flight, "ph": "e", "ts": start + duration}
            continue
        args = {k: v for k, v in span._asdict().items() if k in _ARGS and v not in (-1, "")}
        common["tid"] = ROWS.index(span.row)
        yield {
            **common,
            "ph": "X",
            "cat": span.row,
            "name": span.name,
            "dur": duration,
            "args": {"step": step, **args},
        }
        yield from _arrow(span, common, f"{step}.{column}")


_ARGS = ("op", "stage", "microbatch", "peer")
_LEAVES = {"SEND_F": ("F", 1), "SEND_B": ("B", -1)}
_ARRIVES = {"F": "F", "B": "B", "I": "B"}


def _arrow(span: Span, common: Mapping[str, Any], scope: str) -> Iterator[dict[str, Any]]:
    """The end of a message that this span is, named after the stage that takes it."""
    if span.row != "message" or span.peer < 0:
        return
    if span.op in _LEAVES:
        kind, towards = _LEAVES[span.op]
        phase, to = {"ph": "s"}, span.stage + towards
    elif span.op in _ARRIVES:
        kind, to = _ARRIVES[span.op], span.stage
        phase = {"ph": "f", "bp": "e"}
    else:
        return
    name = f"{scope}.{kind}{to}.{span.microbatch}"
    yield {**common, **phase, "cat": "message", "name": "message", "id": name}
