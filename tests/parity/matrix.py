"""The layouts that must train the same model: some listed, the rest drawn to cover every pair.

``python -m tests.parity.matrix`` prints them, and which pairs of values they cover.
"""

from __future__ import annotations

import datetime
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import combinations, product
from random import Random
from typing import Any

from data.config import DataConfig
from launch.config import Config, RunConfig, TrainConfig, facts_of, num_microbatches
from megalite.parallel_config import ParallelConfig, problems
from megalite.schedule.action import Op
from megalite.schedule.generators import SCHEDULES, build_schedule
from model.config import GPTConfig
from tests.parity.harness import BLANK, GPT2, LLAMA, OPTIM

MOST_RANKS = 12
TURNS = 4
TURN = "MEGALITE_PARITY_TURN"
BATCHES = ("even", "ragged", "lone", "blank")


@dataclass(frozen=True)
class Case:
    """A model, a batch and a layout.

    ``batch``: 4 microbatches of a row ("even"); 3 of two rows, of which one is missing
    ("ragged"); one row in all, so that only one replica has tokens ("lone"); 3 microbatches of a
    row, every third row of the batch without targets ("blank").
    """

    family: str = "gpt2"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    virtual_stages: int = 1
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    zero1: bool = False
    recompute: str = "none"
    tied: bool = True
    dropout: float = 0.0
    batch: str = "ragged"
    kv_heads: int = 4
    vocab_size: int = 65
    documents: bool = False
    rank_order: str = "pp,dp,tp"
    partition: str | tuple[int, ...] = "uniform"

    def __str__(self) -> str:
        told = [f"{f.name}={v}" for f in fields(self) if (v := getattr(self, f.name)) != f.default]
        return " ".join(told) or "one process"

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def model(self) -> GPTConfig:
        layers = 4 if self.partition != "uniform" else max(4, self.pp * self.virtual_stages)
        return replace(
            GPT2 if self.family == "gpt2" else LLAMA,
            num_layers=layers,
            num_kv_heads=self.kv_heads,
            vocab_size=self.vocab_size,
            tied_embeddings=self.tied,
            dropout=self.dropout,
        )

    @property
    def parallel(self) -> ParallelConfig:
        given: dict[str, Any] = asdict(self)
        known = [f.name for f in fields(ParallelConfig) if f.name in given]
        return ParallelConfig(**{name: given[name] for name in known})

    def cfg(self, steps: int = 3, dtype: Any = "fp64") -> Config:
        rows, size = {
            "even": (4 * self.dp, 1),
            "ragged": (6 * self.dp - 1, 2),
            "lone": (1, 1),
            "blank": (3 * self.dp, 1),
        }[self.batch]
        return Config(
            model=self.model,
            parallel=self.parallel,
            data=DataConfig(reset_at_document=self.documents),
            optim=OPTIM,
            train=TrainConfig(
                global_batch_size=rows, micro_batch_size=size, dtype=dtype, steps=steps
            ),
            run=RunConfig(name=BLANK if self.batch == "blank" else ""),
        )


# --- what is legal -----------------------------------------------------------------------------

FIELDS: dict[str, tuple[Any, ...]] = {
    "family": ("gpt2", "llama"),
    "tp": (1, 2, 4),
    "pp": (1, 2, 3, 4),
    "dp": (1, 2, 3, 4),
    "virtual_stages": (1, 2),
    "schedule": tuple(SCHEDULES),
    "sequence_parallel": (False, True),
    "zero1": (False, True),
    "recompute": ("none", "selective", "full"),
    "tied": (False, True),
    "dropout": (0.0, 0.1),
    "batch": BATCHES,
    "kv_heads": (4, 2, 1),
    "vocab_size": (65, 257),
    "documents": (False, True),
    "rank_order": ("pp,dp,tp", "tp,dp,pp"),
}
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def why_not(**given: Any) -> str:
    """What forbids some values of fields, whatever the others are; empty if nothing."""
    schedule, v = given.get("schedule"), given.get("virtual_stages")
    if schedule is not None and v is not None and not SCHEDULES[schedule].allows(v):
        return "the schedule has another number of stages a rank"
    if math.prod(given.get(axis, 1) for axis in ("tp", "pp", "dp")) > MOST_RANKS:
        return f"more than {MOST_RANKS} ranks"
    if given.get("sequence_parallel") and given.get("tp") == 1:
        return "sequence parallelism is nothing at tp 1"
    if given.get("zero1") and given.get("dp") == 1:
        return "ZeRO-1 is nothing at dp 1"
    if given.get("batch") == "lone" and given.get("dp") == 1:
        return "with one replica a lone row leaves none without tokens"
    return ""


def legal(case: Case) -> bool:
    """Whether a layout can be run and none of its settings is without effect."""
    cfg = case.cfg()
    batch = cfg.train.global_batch_size, cfg.train.micro_batch_size
    return not why_not(**asdict(case)) and not problems(
        cfg.parallel, facts_of(cfg.model), case.ranks, *batch
    )


def pairs(case: Case) -> set[Pair]:
    """Every two fields with their values."""
    return set(combinations(((name, getattr(case, name)) for name in FIELDS), 2))


def all_pairs() -> Iterator[Pair]:
    for a, b in combinations(FIELDS, 2):
        for x, y in product(FIELDS[a], FIELDS[b]):
            yield (a, x), (b, y)


_SHAPE = ("tp", "pp", "dp", "virtual_stages", "schedule", "sequence_parallel", "zero1")


@cache
def shapes() -> tuple[dict[str, Any], ...]:
    """The legal combinations of what is bound by rules."""
    every = (dict(zip(_SHAPE, v, strict=True)) for v in product(*(FIELDS[n] for n in _SHAPE)))
    return tuple(s for s in every if not why_not(**s))


# --- what makes a layout hard ------------------------------------------------------------------


@cache
def splits(schedule: str, pp: int, microbatches: int, virtual_stages: int) -> bool:
    """Whether a schedule computes gradients of inputs and of weights apart."""
    plan = build_schedule(schedule, pp, microbatches, virtual_stages)
    return any(a.op is Op.INPUT_GRAD for rank in plan.actions for a in rank)


def traits(case: Case) -> set[str]:
    """Which of the things that go wrong together a layout combines."""
    m = num_microbatches(case.cfg(), case.dp)
    found = {
        "dp 3": case.dp == 3,
        "shared kv heads": case.tp > case.kv_heads,
        "padded vocabulary": case.vocab_size % case.tp > 0,
        "no tokens": case.batch in ("lone", "blank"),
        "dropout": case.dropout > 0,
        "ZeRO-1": case.zero1,
        "recompute": case.recompute != "none",
        "split backward": splits(case.schedule, case.pp, m, case.virtual_stages),
    }
    return {name for name, holds in found.items() if holds}


# --- the list ----------------------------------------------------------------------------------

_SP: dict[str, Any] = {"sequence_parallel": True}
_V2: dict[str, Any] = {"schedule": "interleaved_1f1b", "virtual_stages": 2}
_ZB_V: dict[str, Any] = {"schedule": "zb_v", "virtual_stages": 2}
_LLAMA: dict[str, Any] = {"family": "llama", "tied": False, "kv_heads": 2}

# Each kind of cut alone, so that a fault is first seen where little else is; and partitions, which
# are no field of the draw.
LISTED: tuple[Case, ...] = (
    Case(dp=2),
    Case(dp=3, **_LLAMA),
    Case(dp=2, zero1=True),
    Case(dp=3, zero1=True, **_LLAMA),
    Case(tp=2),
    Case(tp=2, **_SP),
    Case(tp=4, **_LLAMA),
    Case(tp=4, **_SP, **_LLAMA),
    Case(tp=4, **_SP, vocab_size=257),
    Case(tp=4, **_SP, kv_heads=2),
    Case(pp=2),
    Case(pp=4, schedule="gpipe", **_LLAMA),
    Case(pp=2, **_V2),
    Case(pp=2, schedule="zb_h1", **_LLAMA),
    Case(pp=2, **_ZB_V),
    Case(tp=2, **_SP, documents=True),
    Case(tp=2, dropout=0.1, **_LLAMA),
    Case(pp=2, recompute="full"),
    Case(tp=2, pp=2, dp=2, **_SP, **_V2),
    Case(tp=2, pp=2, dp=2, **_SP, **_ZB_V, zero1=True, **_LLAMA),
    Case(pp=2, partition=(3, 1)),
    Case(pp=2, partition=(0, 4)),
    Case(pp=2, partition=(4, 0), **_LLAMA),
    Case(pp=3, partition=(2, 0, 2), dp=2, zero1=True),
    Case(pp=3, partition=(0, 4, 0), **_LLAMA),
    Case(pp=4, partition=(1, 0, 0, 3), schedule="gpipe", **_LLAMA),
    Case(pp=2, partition=(0, 1, 0, 3), **_V2),
    Case(pp=2, partition=(2, 0, 2, 0), **_V2, **_LLAMA),
    Case(pp=2, dp=2, partition=(2, 0, 0, 2), **_V2),
    Case(tp=2, pp=2, partition=(4, 0), **_SP, **_LLAMA),
    Case(tp=2, pp=4, partition=(0, 2, 0, 2), **_SP),
    Case(pp=4, partition="balanced"),
)
DRAWN = 104


def _random(random: Random, must: dict[str, Any]) -> Case:
    """A legal layout with these values."""
    fitting = [s for s in shapes() if all(s.get(k, v) == v for k, v in must.items())]
    while True:
        given = {name: random.choice(values) for name, values in FIELDS.items()}
        case = Case(**{**given, **random.choice(fitting), **must})
        if legal(case):
            return case


@cache
def drawn() -> tuple[Case, ...]:
    """Layouts, always the same, each the best of some for how rarely its pairs are covered so
    far, how much it combines and how few ranks it needs."""
    random, count = Random(20), Counter[Pair]()
    left = [p for p in all_pairs() if not why_not(**dict(p))]
    found: list[Case] = []

    def worth(case: Case) -> float:
        new = sum(0.25 ** count[p] for p in pairs(case))
        return 2 * new + len(traits(case)) - 0.5 * case.ranks - 2 * max(0, case.ranks - 8)

    while left or len(found) < DRAWN:
        musts = [dict(random.choice(left)) if left else {} for _ in range(24)]
        found.append(max((_random(random, must) for must in musts), key=worth))
        count.update(pairs(found[-1]))
        left = [p for p in left if not count[p]]
    return tuple(found)


@cache
def matrix() -> tuple[Case, ...]:
    """All layouts, without repetition."""
    return tuple(dict.fromkeys((*LISTED, *drawn())))


def todays_turn() -> int:
    """Which part of the matrix is the day's: set TURN in the environment to choose."""
    told = os.environ.get(TURN)
    day = datetime.date.today().toordinal()
    return (int(told) if told is not None else day) % TURNS


def part(turn: int) -> tuple[Case, ...]:
    return matrix()[turn::TURNS]


def grouped(cases: tuple[Case, ...], most: int = 6) -> list[tuple[Case, ...]]:
    """Layouts of equally many ranks together: to start ranks costs more than to train a step."""
    found: list[tuple[Case, ...]] = []
    for ranks in sorted({c.ranks for c in cases}):
        same = tuple(c for c in cases if c.ranks == ranks)
        found += [same[i : i + most] for i in range(0, len(same), most)]
    return found


# --- the table ---------------------------------------------------------------------------------


def table() -> str:
    """How often each pair of fields' values is covered, and what is impossible, in words."""
    count = Counter(pair for case in matrix() for pair in pairs(case))
    every = list(all_pairs())
    barred = Counter(why for p in every if (why := why_not(**dict(p))))
    could = [p for p in every if not why_not(**dict(p))]
    hard = [case for case in matrix() if len(traits(case)) >= 3]
    lines = [
        f"{len(matrix())} layouts ({len(LISTED)} listed), {len(hard)} combine three or more of "
        + ", ".join(sorted({t for c in matrix() for t in traits(c)})),
        f"ranks: {dict(sorted(Counter(c.ranks for c in matrix()).items()))}",
        f"{sum(p in count for p in could)} of {len(could)} possible pairs of values are covered; "
        "least and most often, by fields:",
    ]
    for a, b in combinations(FIELDS, 2):
        of = [p for p in could if (p[0][0], p[1][0]) == (a, b)]
        seen = [count[p] for p in of]
        total = len(FIELDS[a]) * len(FIELDS[b])
        no = f", {total - len(of)} impossible" if total > len(of) else ""
        lines.append(f"  {a:18}{b:18}{len(of):4} pairs, {min(seen):3} to {max(seen):3} times{no}")
    lines.append("impossible:")
    lines += [f"  {n:3} pairs: {why}" for why, n in sorted(barred.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    for number, case in enumerate(matrix()):
        print(f"turn {number % TURNS}, {case.ranks:2} ranks: {case}")
    print(table())
