"""Every legal layout, the fastest first: bounds order them, simulation decides. No torch.

A group (tp, pp, micro-batch, recompute, sequence parallel, zero1) has a bound that no schedule and
no partition can beat: a rank's mean share of the work, and what stands after it. Groups are opened
in the order of that bound, and each layout gets its own, higher one: in closed form first, then,
when its turn comes, that of its computations and messages (``earliest``). Layouts are simulated in
the order of their bounds until the next bound is above the k-th best simulated time.
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations, count

from megalite.errors import ConfigError
from megalite.planner.candidates import Candidates, Group, Refused, Request, label_of
from megalite.planner.cost import Passes
from megalite.planner.estimate import Estimate, Estimator, Job

WORTH = 0.02
"""A gain of less is not worth a word."""
_NEAREST = 12
_MOST_BOUNDED = 60  # layouts on the chart that were not simulated and whose memory is looked at


@dataclass(frozen=True)
class Point:
    """A layout on the chart: seconds (a bound, if it was not simulated) and bytes; ``timed``: the
    bound is that of its computations and messages."""

    step_s: float
    peak_bytes: float
    label: str
    simulated: bool
    fits: bool
    timed: bool = False


@dataclass(frozen=True)
class Ranking:
    """What was found.

    Attributes:
        best: simulated layouts that fit, the fastest first.
        refused: by reason.
        points: every layout that was looked at closely.
        too_big: the smallest of the fastest layouts that do not fit, if one is worth it; simulated.
        num_layouts, num_simulated: opened or bounded, and simulated.
    """

    request: Request
    best: tuple[Estimate, ...]
    refused: tuple[Refused, ...]
    points: tuple[Point, ...]
    too_big: tuple[Estimate, ...]
    num_layouts: int
    num_simulated: int


_Heap = list[tuple[float, int, Group | Estimator]]


def rank(request: Request, exhaustive: bool = False) -> Ranking:
    """The ``request.best`` fastest layouts that fit the memory; ``exhaustive`` simulates all.

    Raises:
        ConfigError: if no layout is legal, or none fits, with what would.
    """
    search = _Search(request, exhaustive)
    with _uncollected():
        search.run()
        if not search.best:
            raise search.nothing()
        return search.ranking()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector: plans are millions of small objects and no circles, and a
    quarter of a search goes to visiting them again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class _Search:
    def __init__(self, request: Request, exhaustive: bool = False) -> None:
        self.r, self.exhaustive = request, exhaustive
        self.machine, self.cap = request.machine, request.cap
        self.best: list[Estimate] = []
        self.too_big: list[Estimator] = []
        self.candidates = Candidates(request)
        self.points: list[Point] = []
        self.num_layouts = self.num_simulated = 0
        self.seen: set[tuple[object, ...]] = set()
        self.least_bytes = float("inf")
        self.least: Job | None = None

    # --- bounds ----------------------------------------------------------------------------------

    def group_bound(self, g: Group) -> float:
        """The longest of a mean rank's work, that of one that has as many layers as some rank
        must, and the way of one microbatch; with the least that stands after the pipeline."""
        e = self._flat(g)
        layers, m = self.r.shape.layers, e.job.microbatches
        embedding, layer, head = e.kinds
        whole = embedding + layer.times(layers) + head
        most = _least(layer) * -(-layers // g.pp)
        way = max(whole.forward, whole.host_forward) + whole.input_grad
        way += 2 * (g.pp - 1) * e.message_s
        work = m * max(_least(whole) / g.pp, most)
        return (max(work, way) + e.least_optimizer_s) * self.machine.scalar

    def _flat(self, g: Group) -> Estimator:
        parallel = g.parallel("1f1b", 1, "uniform")
        return Estimator(
            Job(self.r.shape, parallel, self.r.gpus, self.r.global_batch, g.micro_batch),
            self.machine,
        )

    def too_small(self, g: Group) -> bool:
        """Whether not even the state and one microbatch of a mean rank fit."""
        e = self._flat(g)
        model = e.memory_model
        elements = self.r.shape.layers * self.r.shape.layer_elements(g.tp) / g.pp
        held = model.kept() * self.r.shape.layers / g.pp / (1 if g.pp == 1 else g.pp)
        return sum(model.state(elements)) + held > self.cap

    # --- the search ------------------------------------------------------------------------------

    def run(self) -> None:
        order = count()
        heap: _Heap = []
        for g in self.candidates.groups():
            if self.too_small(g):
                self._no_room(g)
                continue
            heap.append((self.group_bound(g), next(order), g))
        heapq.heapify(heap)
        while heap:
            bound, _, item = heapq.heappop(heap)
            if not self.exhaustive and bound >= self._worst:
                heap.append((bound, next(order), item))
                break
            if isinstance(item, Group):
                self._open(item, heap, order)
            elif "earliest_s" in vars(item):
                self._simulate(item)
            elif self._fits(item):
                heapq.heappush(heap, (max(bound, item.earliest_s), next(order), item))
        self._rest(heap)

    def _open(self, g: Group, heap: _Heap, order: count[int]) -> None:
        seen = set()
        known: dict[object, Estimator] = {}
        for job in self.candidates.layouts(g):
            p = job.parallel
            at = (p.virtual_stages, p.partition, job.rank_of)
            if at in known:
                e = known[at].with_schedule(p.schedule)
            else:
                e = known[at] = Estimator(job, self.machine)
            key = (p.schedule, p.virtual_stages, e.layers)
            if key in seen:  # balanced that is uniform
                continue
            seen.add(key)
            self.num_layouts += 1
            bound = e.lower_bound * self.machine.scalar
            heapq.heappush(heap, (bound, next(order), e))

    @property
    def _worst(self) -> float:
        return self.best[-1].step_s if len(self.best) >= self.r.best else float("inf")

    def _fits(self, e: Estimator) -> bool:
        """Whether it fits the memory; one that does not is noted."""
        need = e.least_bytes
        if need <= self.cap:
            need = e.peak_bytes
            if need <= self.cap:
                return True
        label = label_of(e.job.parallel, e.job.micro_batch)
        self._note_need(e.job, need)
        self.candidates.refuse("does not fit the memory", f"{label}: {need / 1e9:.1f} GB or more")
        self.points.append(Point(e.lower_bound * self.machine.scalar, need, label, False, False))
        if len(self.too_big) < 200:
            self.too_big.append(e)
        return False

    def _simulate(self, e: Estimator) -> None:
        found = e.estimate()
        self.num_simulated += 1
        alike = replace(e.job, parallel=replace(e.job.parallel, schedule="1f1b", virtual_stages=1))
        key = (alike, f"{found.step_s:.9g}", round(e.peak_bytes))
        if key in self.seen:  # few microbatches, and two schedules are one
            return
        self.seen.add(key)
        label = label_of(e.job.parallel, e.job.micro_batch)
        self.points.append(Point(found.step_s, e.peak_bytes, label, True, True))
        self.best.append(found)
        self.best.sort(key=lambda x: x.step_s)
        if not self.exhaustive:
            del self.best[self.r.best :]

    def _no_room(self, g: Group) -> None:
        words = f"tp={g.tp} pp={g.pp} micro-batch {g.micro_batch}"
        self.candidates.refuse("does not fit the memory", words)
        e = self._flat(g)
        model = e.memory_model
        elements = self.r.shape.layers * self.r.shape.layer_elements(g.tp) / g.pp
        self._note_need(e.job, sum(model.state(elements)) + model.kept())

    def _note_need(self, job: Job, peak: float) -> None:
        if peak < self.least_bytes:
            self.least_bytes, self.least = peak, job

    def _rest(self, heap: _Heap) -> None:
        """What was never simulated, for the count and the chart: the best of it."""
        for bound, _, item in heapq.nsmallest(_MOST_BOUNDED, heap, key=lambda x: x[0]):
            if isinstance(item, Estimator):
                label, peak = label_of(item.job.parallel, item.job.micro_batch), item.peak_bytes
                timed, fits = "earliest_s" in vars(item), peak <= self.cap
                self.points.append(Point(bound, peak, label, False, fits, timed and fits))
        self.num_layouts += sum(isinstance(item, Group) for *_, item in heap)

    def ranking(self) -> Ranking:
        return Ranking(
            self.r,
            tuple(self.best),
            tuple(sorted(self.candidates.refused.values(), key=lambda x: -x.count)),
            tuple(self.points),
            self._worth_more_memory(),
            self.num_layouts,
            self.num_simulated,
        )

    def _worth_more_memory(self) -> tuple[Estimate, ...]:
        """Of the fastest that do not fit and would be faster by WORTH, the smallest."""
        limit = (1 - WORTH) * self.best[0].step_s
        nearest = sorted(self.too_big, key=lambda e: e.lower_bound)[:_NEAREST]
        for e in sorted(nearest, key=lambda e: e.peak_bytes):
            if e.lower_bound * self.machine.scalar < limit and e.earliest_s < limit:
                found = e.estimate()
                if found.step_s < limit:
                    return (found,)
        return ()

    # --- nothing fits ----------------------------------------------------------------------------

    def nothing(self) -> ConfigError:
        r, gb = self.r, 1e9
        refused = self.candidates.refused
        reasons = "; ".join(f"{x.reason} ({x.example})" for x in list(refused.values())[:3])
        if self.least is None:
            few = refused.get("more replicas than sequences in a batch")
            least = self._fewest_replicas() if few else 0
            if few and least > r.global_batch:
                return ConfigError(
                    "--global-batch",
                    f"{r.global_batch} sequences are fewer than the replicas of every layout of "
                    f"{r.gpus} GPUs ({few.example})",
                    f"Use {least} or more, or fewer GPUs",
                )
            return ConfigError(
                "--gpus", f"no layout of {r.gpus} GPUs is legal: {reasons}", self._way_out()
            )
        more = self._enough()
        fix = f"Use {more} GPUs or more, " if more else "Use far more GPUs, "
        return ConfigError(
            "--gpus",
            f"{r.shape.num_parameters() / gb:.1f}B parameters do not fit {r.gpus} x "
            f"{r.memory / gb:.0f} GB: the smallest layout needs {self.least_bytes / gb:.0f} GB "
            f"or more on a GPU, and {r.headroom:.0%} stays free (--headroom)",
            f"{fix}a GPU with more memory, or a smaller model",
        )

    def _fewest_replicas(self) -> int:
        """Of any layout that is asked for, were the batch large enough; 0: none is legal."""
        batch = max(self.r.global_batch, self.r.gpus)
        found = Candidates(replace(self.r, global_batch=batch))
        return min((g.dp for g in found.groups() if any(found.layouts(g))), default=0)

    def _way_out(self) -> str:
        """What is given besides model, GPUs and batch, and stands in the way."""
        given = self.r.fixed
        for number in range(1, len(given) + 1):
            if ways := [
                names for names in combinations(given, number) if self._legal_without(names)
            ]:
                flags = (" and ".join(f"--{n.replace('_', '-')}" for n in way) for way in ways)
                return f"Leave out {', or '.join(flags)}"
        return f"Use {self._fewest_replicas() or 'more'} sequences or more"

    def _legal_without(self, names: Sequence[str]) -> bool:
        rest = {name: value for name, value in self.r.fixed.items() if name not in names}
        found = Candidates(replace(self.r, fixed=rest))
        return any(any(found.layouts(g)) for g in found.groups())

    def _enough(self) -> int:
        """The first doubling of the GPUs that holds the model; 0: none of ten."""
        gpus = self.r.gpus
        for _ in range(10):
            gpus *= 2
            batch = max(self.r.global_batch, 1)
            search = _Search(
                replace(self.r, gpus=gpus, global_batch=batch, schedules=("1f1b",), best=1)
            )
            if search.any_fits():
                return gpus
        return 0

    def any_fits(self) -> bool:
        """Whether some layout of full recomputation fits."""
        for g in self.candidates.groups():
            if g.recompute != "full" or g.micro_batch > 1 or self.too_small(g):
                continue
            for job in self.candidates.layouts(g):
                if max(m.total for m in Estimator(job, self.machine).memory()) <= self.cap:
                    return True
        return False


def _least(p: Passes) -> float:
    """Of layers together on device and host, what the simulator will count at least."""
    forward = max(p.forward, p.host_forward)
    return forward + max(p.input_grad + p.weight_grad, p.host_backward)
