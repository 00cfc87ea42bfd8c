"""Every legal layout, the fastest first: bounds order them, simulation decides. No torch.

A group (tp, pp, micro-batch, recompute, sequence parallel, zero1) has a bound that no schedule and
no partition can beat: a rank's mean share of the work, and what stands after it. Groups are opened
in the order of that bound, and each layout gets its own, higher one. Layouts are simulated in the
order of their bounds until the next bound is above the k-th best simulated time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count, product
from typing import Literal

from megalite.errors import ConfigError
from megalite.parallel_config import ParallelConfig, divisors, problems, tp_fits
from megalite.planner.cost import Passes
from megalite.planner.estimate import Estimate, Estimator, Job, Machine
from megalite.planner.shape import ModelShape
from megalite.schedule.generators import SCHEDULES

Recompute = Literal["none", "selective", "full"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
"""A fused attention keeps no scores: there, selective takes time and saves nothing."""
SEARCHED = tuple(name for name in SCHEDULES if name not in ("auto", "naive"))
"""auto is a search of its own, and naive never better than gpipe."""
_MOST_TP = 64
_LARGE = 2**40


@dataclass(frozen=True)
class Request:
    """What is searched; ``memory_bytes`` 0: the device's own.

    Attributes:
        fixed: fields of ParallelConfig, and micro_batch, that are given.
        best: how many layouts are to be ranked for certain.
    """

    shape: ModelShape
    machine: Machine
    gpus: int
    global_batch: int
    memory_bytes: float = 0.0
    best: int = 5
    schedules: tuple[str, ...] = SEARCHED
    fixed: dict[str, object] = field(default_factory=dict)

    @property
    def cap(self) -> float:
        return self.memory_bytes or self.machine.hw.memory_bytes


@dataclass
class Refused:
    """How many layouts have been refused for one reason, and one of them."""

    reason: str
    example: str
    count: int = 1


@dataclass(frozen=True)
class Point:
    """A layout on the chart: seconds (a bound, if it was not simulated) and bytes."""

    step_s: float
    peak_bytes: float
    label: str
    simulated: bool
    fits: bool


@dataclass(frozen=True)
class Ranking:
    """What was found.

    Attributes:
        best: simulated layouts that fit, the fastest first.
        refused: by reason.
        points: every layout that was looked at closely.
        too_big: the fastest layouts that do not fit, simulated.
        num_layouts, num_simulated: opened or bounded, and simulated.
    """

    request: Request
    best: tuple[Estimate, ...]
    refused: tuple[Refused, ...]
    points: tuple[Point, ...]
    too_big: tuple[Estimate, ...]
    num_layouts: int
    num_simulated: int


@dataclass(frozen=True)
class _Group:
    """Layouts that differ in schedule, virtual stages and partition alone."""

    tp: int
    pp: int
    dp: int
    micro_batch: int
    recompute: Recompute
    sequence_parallel: bool
    zero1: bool

    def parallel(self, schedule: str, virtual_stages: int, partition: str) -> ParallelConfig:
        return ParallelConfig(
            tp=self.tp,
            pp=self.pp,
            virtual_stages=virtual_stages,
            schedule=schedule,
            sequence_parallel=self.sequence_parallel,
            zero1=self.zero1,
            recompute=self.recompute,
            partition="balanced" if partition == "balanced" else "uniform",
        )


def rank(request: Request, exhaustive: bool = False) -> Ranking:
    """The ``request.best`` fastest layouts that fit the memory; ``exhaustive`` simulates all.

    Raises:
        ConfigError: if no layout is legal, or none fits, with what would.
    """
    search = _Search(request, exhaustive)
    search.run()
    if not search.best:
        raise search.nothing()
    return search.ranking()


class _Search:
    def __init__(self, request: Request, exhaustive: bool = False) -> None:
        self.r, self.exhaustive = request, exhaustive
        self.machine, self.cap = request.machine, request.cap
        self.best: list[Estimate] = []
        self.too_big: list[Estimator] = []
        self.refused: dict[str, Refused] = {}
        self.points: list[Point] = []
        self.num_layouts = self.num_simulated = 0
        self.rules: dict[object, ConfigError | None] = {}
        self.least_bytes = float("inf")
        self.least: Job | None = None

    # --- what there is ---------------------------------------------------------------------------

    def groups(self) -> Iterator[_Group]:
        r, fixed = self.r, self.r.fixed
        facts = r.shape.facts()
        for tp in self._given("tp", divisors(r.gpus)):
            if tp > _MOST_TP or not tp_fits(tp, facts) or r.gpus % tp:
                self._illegal(ParallelConfig(tp=tp))
                continue
            for pp in self._given("pp", divisors(r.gpus // tp)):
                if pp > facts.num_layers + 2 or r.gpus % (tp * pp):
                    self._illegal(ParallelConfig(tp=tp, pp=pp))
                    continue
                dp = r.gpus // (tp * pp)
                if dp > r.global_batch:
                    self._refuse(
                        "more replicas than sequences in a batch", f"tp={tp} pp={pp} dp={dp}"
                    )
                    continue
                for mbs in self._given("micro_batch", divisors(-(-r.global_batch // dp))):
                    yield from self._options(tp, pp, dp, mbs, fixed)

    def _options(
        self, tp: int, pp: int, dp: int, mbs: int, fixed: dict[str, object]
    ) -> Iterator[_Group]:
        facts = self.r.shape.facts()
        sp = self._flags("sequence_parallel", tp > 1 and tp_fits(tp, facts, True))
        zero = self._flags("zero1", dp > 1)
        given = fixed.get("recompute")
        modes = [m for m in RECOMPUTES if given in (None, m)]
        if given is None and self.r.shape.fused_attention:
            modes.remove("selective")
        for mode, s, z in product(modes, sp, zero):
            yield _Group(tp, pp, dp, mbs, mode, s, z)

    def _given(self, name: str, otherwise: list[int]) -> list[int]:
        value = self.r.fixed.get(name)
        return [int(str(value))] if value is not None else otherwise

    def _flags(self, name: str, possible: bool) -> list[bool]:
        value = self.r.fixed.get(name)
        if value is not None:
            return [bool(value) and possible]
        return [False, True] if possible else [False]

    def layouts(self, g: _Group) -> Iterator[Job]:
        """Every schedule, number of virtual stages and partition of a group."""
        r = self.r
        if g.pp == 1:
            ways = [("1f1b", 1)]
        else:
            depths = divisors(max(1, r.shape.layers // g.pp))
            depths = self._given("virtual_stages", sorted({*depths, 2}))
            names = [n for n in r.schedules if r.fixed.get("schedule") in (None, n)]
            ways = [
                (n, v)
                for v in depths
                for n in names
                if SCHEDULES[n].allows(v) and not (v == 1 and SCHEDULES[n].chunks == "any")
            ]
        given = r.fixed.get("partition")
        for schedule, v in ways:
            for partition in ("uniform", "balanced") if given is None else (str(given),):
                if partition == "balanced" and g.pp == 1:
                    continue
                parallel = g.parallel(schedule, v, partition)
                if (error := self._broken(parallel)) is not None:
                    self._refuse(_reason(error), _label(parallel, g.micro_batch))
                    continue
                yield Job(r.shape, parallel, r.gpus, r.global_batch, g.micro_batch)

    def _broken(self, p: ParallelConfig) -> ConfigError | None:
        """The first rule that a layout breaks; neither batch nor an allowed schedule matters."""
        key = (p.tp, p.pp, p.virtual_stages, p.partition, p.sequence_parallel)
        if key not in self.rules:
            found = problems(p, self.r.shape.facts(), self.r.gpus, self.r.global_batch, 1)
            self.rules[key] = found[0] if found else None
        return self.rules[key]

    def _illegal(self, parallel: ParallelConfig) -> None:
        found = problems(parallel, self.r.shape.facts(), self.r.gpus, self.r.global_batch, 1)
        if found:
            self._refuse(_reason(found[0]), str(found[0]))
        else:
            self._refuse(f"tp over {_MOST_TP}", f"tp={parallel.tp}")

    def _refuse(self, reason: str, example: str) -> None:
        if reason in self.refused:
            self.refused[reason].count += 1
        else:
            self.refused[reason] = Refused(reason, example)

    # --- bounds ----------------------------------------------------------------------------------

    def group_bound(self, g: _Group) -> float:
        """A mean rank's work, and the least that stands after the pipeline."""
        e = self._flat(g)
        embedding, layer, head = e.kinds
        each = [_least(embedding), _least(layer) * self.r.shape.layers, _least(head)]
        return e.job.microbatches * sum(each) / g.pp * self.machine.scalar

    def _flat(self, g: _Group) -> Estimator:
        parallel = g.parallel("1f1b", 1, "uniform")
        return Estimator(
            Job(self.r.shape, parallel, self.r.gpus, self.r.global_batch, g.micro_batch),
            self.machine,
        )

    def too_small(self, g: _Group) -> bool:
        """Whether not even the state and one microbatch of a mean rank fit."""
        e = self._flat(g)
        model = e.memory_model
        elements = self.r.shape.layers * self.r.shape.layer_elements(g.tp) / g.pp
        held = model.kept() * self.r.shape.layers / g.pp / (1 if g.pp == 1 else g.pp)
        return sum(model.state(elements)) + held > self.cap

    # --- the search ------------------------------------------------------------------------------

    def run(self) -> None:
        order = count()
        heap: list[tuple[float, int, _Group | Estimator]] = []
        for g in self.groups():
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
            if isinstance(item, _Group):
                self._open(item, heap, order)
            else:
                self._simulate(item)
        self._rest(heap)

    def _open(
        self, g: _Group, heap: list[tuple[float, int, _Group | Estimator]], order: count[int]
    ) -> None:
        seen = set()
        known: dict[object, Estimator] = {}
        for job in self.layouts(g):
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

    def _simulate(self, e: Estimator) -> None:
        peak = max(m.total for m in e.memory())
        label = _label(e.job.parallel, e.job.micro_batch)
        if peak > self.cap:
            self._note_need(e.job, peak)
            self._refuse("does not fit the memory", f"{label}: {peak / 1e9:.1f} GB")
            self.points.append(
                Point(e.lower_bound * self.machine.scalar, peak, label, False, False)
            )
            if len(self.too_big) < 200:
                self.too_big.append(e)
            return
        found = e.estimate()
        self.num_simulated += 1
        self.points.append(Point(found.step_s, peak, label, True, True))
        self.best.append(found)
        self.best.sort(key=lambda x: x.step_s)
        if not self.exhaustive:
            del self.best[self.r.best :]

    def _no_room(self, g: _Group) -> None:
        self._refuse("does not fit the memory", f"tp={g.tp} pp={g.pp} micro-batch {g.micro_batch}")
        e = self._flat(g)
        model = e.memory_model
        elements = self.r.shape.layers * self.r.shape.layer_elements(g.tp) / g.pp
        self._note_need(e.job, sum(model.state(elements)) + model.kept())

    def _note_need(self, job: Job, peak: float) -> None:
        if peak < self.least_bytes:
            self.least_bytes, self.least = peak, job

    def _rest(self, heap: list[tuple[float, int, _Group | Estimator]]) -> None:
        """What was never simulated, for the count and the chart: the best of it."""
        for bound, _, item in heapq.nsmallest(120, heap, key=lambda x: x[0]):
            if isinstance(item, Estimator):
                peak = max(m.total for m in item.memory())
                label = _label(item.job.parallel, item.job.micro_batch)
                self.points.append(Point(bound, peak, label, False, peak <= self.cap))
        self.num_layouts += sum(isinstance(item, _Group) for *_, item in heap)

    def ranking(self) -> Ranking:
        nearest = sorted(self.too_big, key=lambda e: e.lower_bound)[:12]
        limit = self.best[0].step_s
        faster = [e for e in nearest if e.lower_bound * self.machine.scalar < limit][:6]
        return Ranking(
            self.r,
            tuple(self.best),
            tuple(sorted(self.refused.values(), key=lambda x: -x.count)),
            tuple(self.points),
            tuple(e.estimate() for e in faster),
            self.num_layouts,
            self.num_simulated,
        )

    # --- nothing fits ----------------------------------------------------------------------------

    def nothing(self) -> ConfigError:
        r, gb = self.r, 1e9
        reasons = "; ".join(f"{x.reason} ({x.example})" for x in list(self.refused.values())[:3])
        if self.least is None:
            few = self.refused.get("more replicas than sequences in a batch")
            if few is not None:
                return ConfigError(
                    "--global-batch",
                    f"{r.global_batch} sequences are fewer than the replicas of every layout of "
                    f"{r.gpus} GPUs ({few.example})",
                    f"Use {self._replicas()} or more, or fewer GPUs",
                )
            return ConfigError(
                "--gpus", f"no layout of {r.gpus} GPUs is legal: {reasons}", "Use other numbers"
            )
        more = self._enough()
        fix = f"Use {more} GPUs or more, " if more else "Use far more GPUs, "
        return ConfigError(
            "--gpus",
            f"{r.shape.num_parameters() / gb:.1f}B parameters do not fit {r.gpus} x "
            f"{r.cap / gb:.0f} GB: the smallest layout needs {self.least_bytes / gb:.0f} GB "
            "or more on a GPU",
            f"{fix}a GPU with more memory, or a smaller model",
        )

    def _replicas(self) -> int:
        """The fewest replicas of any layout."""
        found = [
            self.r.gpus // (tp * pp)
            for tp in divisors(self.r.gpus)
            if tp <= _MOST_TP and tp_fits(tp, self.r.shape.facts())
            for pp in divisors(self.r.gpus // tp)
            if pp <= self.r.shape.layers
        ]
        return min(found, default=1)

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
        for g in self.groups():
            if g.recompute != "full" or g.micro_batch > 1 or self.too_small(g):
                continue
            for job in self.layouts(g):
                if max(m.total for m in Estimator(job, self.machine).memory()) <= self.cap:
                    return True
        return False


def _least(p: Passes) -> float:
    """Of a layer's pass on the device and the host, what the simulator will count at least."""
    forward = max(p.forward, p.host_forward)
    return forward + max(p.input_grad + p.weight_grad, p.host_backward)


def _reason(error: ConfigError) -> str:
    if error.problem.startswith("world size"):
        return "the GPUs cannot be shared out by tp x pp"
    return {
        "parallel.tp": "the model cannot be cut into tp parts",
        "parallel.pp": "more stages than layers",
        "parallel.virtual_stages": "more stages than layers",
        "parallel.sequence_parallel": "the sequence cannot be cut into tp parts",
    }.get(error.field, error.field)


def _label(p: ParallelConfig, micro_batch: int) -> str:
    words = [f"tp={p.tp} pp={p.pp}"]
    if p.virtual_stages > 1:
        words.append(f"v={p.virtual_stages}")
    words += [p.schedule, f"micro-batch {micro_batch}"]
    if p.recompute != "none":
        words.append(f"recompute {p.recompute}")
    words += ["sp"] * p.sequence_parallel + ["zero1"] * p.zero1
    words += ["balanced"] * (p.partition == "balanced")
    return " ".join(words)
