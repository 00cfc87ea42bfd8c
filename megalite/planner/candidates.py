"""Which layouts there are: every legal one in groups, and why the others are refused. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

from megalite.errors import ConfigError
from megalite.parallel_config import ParallelConfig, divisors, problems, tp_fits
from megalite.planner.estimate import Job, Machine
from megalite.planner.shape import ModelShape
from megalite.schedule.generators import SCHEDULES, check_request

Recompute = Literal["none", "selective", "full"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
"""A fused attention keeps no scores: there, selective takes time and saves nothing."""
SEARCHED = tuple(name for name in SCHEDULES if name not in ("auto", "naive"))
"""auto is a search of its own, and naive never better than gpipe."""
MOST_TP = 64
HEADROOM = 0.06
"""Of a device's memory, what a layout must leave free: the allocator's blocks that are in use only
in part, and what a step needs beside the plan. An assumption: context and NCCL's buffers are in
the hardware's reserve, and what remains differs from run to run by some percent."""


@dataclass(frozen=True)
class Request:
    """What is searched; ``memory_bytes`` 0: the device's own.

    Attributes:
        headroom: of the memory, what must stay free.
        fixed: fields of ParallelConfig, and micro_batch, that are given.
        best: how many layouts are to be ranked for certain.
    """

    shape: ModelShape
    machine: Machine
    gpus: int
    global_batch: int
    memory_bytes: float = 0.0
    headroom: float = HEADROOM
    best: int = 5
    schedules: tuple[str, ...] = SEARCHED
    fixed: dict[str, object] = field(default_factory=dict)

    @property
    def memory(self) -> float:
        """Bytes of a device."""
        return self.memory_bytes or self.machine.hw.memory_bytes

    @property
    def cap(self) -> float:
        """What a layout may take of it."""
        return self.memory * (1 - self.headroom)


@dataclass
class Refused:
    """How many layouts have been refused for one reason, and one of them."""

    reason: str
    example: str
    count: int = 1


@dataclass(frozen=True)
class Group:
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


class Candidates:
    """Groups and layouts of a request; ``refused`` fills while they are listed."""

    def __init__(self, request: Request) -> None:
        self.r = request
        self.refused: dict[str, Refused] = {}
        self.rules: dict[object, ConfigError | None] = {}

    def groups(self) -> Iterator[Group]:
        r, fixed = self.r, self.r.fixed
        facts = r.shape.facts()
        for tp in self._given("tp", divisors(r.gpus)):
            if tp > MOST_TP or not tp_fits(tp, facts) or r.gpus % tp:
                self._illegal(ParallelConfig(tp=tp))
                continue
            for pp in self._given("pp", divisors(r.gpus // tp)):
                if pp > facts.num_layers + 2 or r.gpus % (tp * pp):
                    self._illegal(ParallelConfig(tp=tp, pp=pp))
                    continue
                dp = r.gpus // (tp * pp)
                if dp > r.global_batch:
                    self.refuse(
                        "more replicas than sequences in a batch", f"tp={tp} pp={pp} dp={dp}"
                    )
                    continue
                for mbs in self._given("micro_batch", divisors(-(-r.global_batch // dp))):
                    yield from self._options(tp, pp, dp, mbs, fixed)

    def _options(
        self, tp: int, pp: int, dp: int, mbs: int, fixed: dict[str, object]
    ) -> Iterator[Group]:
        facts = self.r.shape.facts()
        sp = self._flags("sequence_parallel", tp > 1 and tp_fits(tp, facts, True))
        zero = self._flags("zero1", dp > 1)
        given = fixed.get("recompute")
        modes = [m for m in RECOMPUTES if given in (None, m)]
        if given is None and self.r.shape.fused_attention:
            modes.remove("selective")
        for mode, s, z in product(modes, sp, zero):
            yield Group(tp, pp, dp, mbs, mode, s, z)

    def _given(self, name: str, otherwise: list[int]) -> list[int]:
        value = self.r.fixed.get(name)
        return [int(str(value))] if value is not None else otherwise

    def _flags(self, name: str, possible: bool) -> list[bool]:
        value = self.r.fixed.get(name)
        if value is not None:
            return [bool(value) and possible]
        return [False, True] if possible else [False]

    def layouts(self, g: Group) -> Iterator[Job]:
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
            if not ways:
                self._no_way(g.pp, names, depths)
        given = r.fixed.get("partition")
        for schedule, v in ways:
            for partition in ("uniform", "balanced") if given is None else (str(given),):
                if partition == "balanced" and g.pp == 1:
                    continue
                parallel = g.parallel(schedule, v, partition)
                if (error := self._broken(parallel)) is not None:
                    self.refuse(_reason(error), label_of(parallel, g.micro_batch))
                    continue
                yield Job(r.shape, parallel, r.gpus, r.global_batch, g.micro_batch)

    def _no_way(self, pp: int, names: list[str], depths: list[int]) -> None:
        """Says why none of these schedules has so many stages a rank."""
        for name, v in product(names, depths):
            try:
                check_request(name, pp, 1, v)
            except ConfigError as error:
                self.refuse("the schedule does not have so many stages a rank", str(error))

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
            self.refuse(_reason(found[0]), str(found[0]))
        else:
            self.refuse(f"tp over {MOST_TP}", f"tp={parallel.tp}")

    def refuse(self, reason: str, example: str) -> None:
        if reason in self.refused:
            self.refused[reason].count += 1
        else:
            self.refused[reason] = Refused(reason, example)


def _reason(error: ConfigError) -> str:
    if error.problem.startswith("world size"):
        return "the GPUs cannot be shared out by tp x pp"
    return {
        "parallel.tp": "the model cannot be cut into tp parts",
        "parallel.pp": "more stages than layers",
        "parallel.virtual_stages": "more stages than layers",
        "parallel.sequence_parallel": "the sequence cannot be cut into tp parts",
    }.get(error.field, error.field)


def label_of(p: ParallelConfig, micro_batch: int) -> str:
    words = [f"tp={p.tp} pp={p.pp}"]
    if p.virtual_stages > 1:
        words.append(f"v={p.virtual_stages}")
    words += [p.schedule, f"micro-batch {micro_batch}"]
    if p.recompute != "none":
        words.append(f"recompute {p.recompute}")
    words += ["sp"] * p.sequence_parallel + ["zero1"] * p.zero1
    words += ["balanced"] * (p.partition == "balanced")
    return " ".join(words)
