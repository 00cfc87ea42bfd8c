"""A pipeline schedule as data: what each pipeline rank does, in order; no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum


class Op(Enum):
    """What an action does; the value is its text.

    A message is named after the stage on *this* rank that makes or takes it: stage s hands its
    output to stage s + 1 by ``SEND_F`` of s and ``RECV_F`` of s + 1, and gets the gradient of
    that output back by ``SEND_B`` of s + 1 and ``RECV_B`` of s. A RECV posts the receive; the
    F, B or I that needs the message waits for it. A SEND posts the send; ``WAIT_F`` and ``WAIT_B``
    wait until it is complete, after which its buffer is free.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    WAIT_F = "WAIT_F"
    WAIT_B = "WAIT_B"
    REDUCE = "REDUCE"

    __hash__ = object.__hash__  # Enum's own hashes the name, in Python: a quarter of lowering


BACKWARD = frozenset({Op.BACKWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD})
COMPUTE = BACKWARD | {Op.FORWARD}

_TEXT = re.compile(
    r"([0-9]{1,9})(SEND_F|RECV_F|SEND_B|RECV_B|WAIT_F|WAIT_B|REDUCE|F|B|I|W)([0-9]{0,9})"
)


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank; ``stage`` is global, 0 .. num_stages - 1. Printed as ``2F0``.

    ``REDUCE`` (the start of a stage's data-parallel gradient reduction) has microbatch -1 and is
    printed without one.
    """

    op: Op
    stage: int
    microbatch: int = -1

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{'' if self.op is Op.REDUCE else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of ``str``.

        Raises:
            ValueError: for anything else.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None or (match[2] == "REDUCE") != (match[3] == ""):
            shown = text if len(text) <= 40 else f"{text[:40]}..."
            raise ValueError(f"not an action: {shown!r} (an action looks like 2F0 or 1RECV_B3)")
        return cls(Op(match[2]), int(match[1]), int(match[3] or -1))


@dataclass(frozen=True)
class Plan:
    """The actions of every pipeline rank, and which rank has which stage.

    ``rank_of[stage]`` is the pipeline rank that holds the stage; ``stages_of`` is its inverse.
    A plan that was cut from a longer file says in ``file_microbatches`` how many that has.
    """

    name: str
    num_microbatches: int
    rank_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    file_microbatches: int = 0

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)

    @property
    def pp(self) -> int:
        return len(self.actions)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank, in order; a stage's position there is its chunk."""
        return tuple(s for s, r in enumerate(self.rank_of) if r == rank)

    def peer(self, stage: int, neighbour: int) -> int | None:
        """The rank of ``neighbour`` if it exists and a message to or from ``stage`` is needed."""
        if not 0 <= neighbour < len(self.rank_of):
            return None
        found = self.rank_of[neighbour]
        return None if found == self.rank_of[stage] else found

    @property
    def forward_only(self) -> bool:
        return all(a.op not in BACKWARD for actions in self.actions for a in actions)

    @property
    def is_lowered(self) -> bool:
        """Whether any message or reduction is in it."""
        return any(a.op not in COMPUTE for actions in self.actions for a in actions)

    @property
    def microbatches(self) -> str:
        """How many, and which of a longer file, for a heading."""
        text = f"{self.num_microbatches} microbatches"
        if self.file_microbatches <= self.num_microbatches:
            return text
        return f"{text} (0 to {self.num_microbatches - 1} of the file's {self.file_microbatches})"

    def compute_only(self) -> Plan:
        return self.replace((a for a in actions if a.op in COMPUTE) for actions in self.actions)

    def __getitem__(self, rank: int) -> tuple[Action, ...]:
        return self.actions[rank]

    def replace(self, actions: Iterable[Iterable[Action]]) -> Plan:
        return replace(self, actions=tuple(tuple(a) for a in actions))
