"""Who trains with whom: decided by one leader, on the node that the others were told to come to.

Nodes arrive, are heard of, and leave; the leader forms rounds of those that live. No sockets and no
clock in here: ``launch/meeting.py`` has both.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Limits:
    """How many nodes a job needs and takes, and how long it waits for them, in seconds."""

    min_nodes: int = 1
    max_nodes: int = 1
    lost_s: float = 15.0
    """A node that is not heard of for so long is lost."""
    last_call_s: float = 10.0
    """At the start, how long a job that could begin waits for more nodes."""
    join_s: float = 600.0
    """How long a job waits for the nodes that it cannot do without."""


@dataclass(frozen=True)
class Member:
    """A node of a round: the slot in which it arrived, and the ranks that it starts."""

    slot: int
    first_rank: int
    num_workers: int


@dataclass(frozen=True)
class Plan:
    """What the leader says; all nodes read it.

    ``regroup``: "hard": the round is broken, stop at once and arrive anew; "soft": a node waits to
    be let in, save and arrive anew. ``exits``: somebody was asked to stop the job. ``ended``: exit
    code and last words of a job that is over. ``why``: what ended the round before; empty for the
    first.
    """

    round: int = 0
    members: tuple[Member, ...] = ()
    regroup: str = ""
    exits: bool = False
    ended: tuple[int, str] | None = None
    why: str = ""

    @property
    def world_size(self) -> int:
        return sum(member.num_workers for member in self.members)

    def index(self, slot: int | None) -> int | None:
        """The place of a slot among the nodes of the round; None: it is not one of them."""
        return next((i for i, m in enumerate(self.members) if m.slot == slot), None)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        values = json.loads(text)
        members = tuple(Member(**member) for member in values.pop("members"))
        ended = values.pop("ended")
        return cls(members=members, ended=(ended[0], ended[1]) if ended else None, **values)


@dataclass
class Node:
    """What the leader knows of one. ``name``: a node that starts anew has the same, and replaces
    what it was; ``order`` decides its ranks. ``why``: the failure after which it has arrived."""

    slot: int
    name: str
    order: int
    num_workers: int
    heard: float
    why: str = ""
    beat: str = ""
    stops: bool = False
    left: tuple[int, str] | None = None


@dataclass
class Leader:
    """Forms rounds. ``now`` is the same monotonic clock everywhere, in seconds."""

    limits: Limits
    plan: Plan = field(default_factory=Plan)
    _nodes: dict[str, Node] = field(default_factory=dict)
    _enough_since: float | None = None
    _short_since: float | None = None

    @property
    def slots(self) -> list[int]:
        """Of the nodes that may still say something."""
        return [node.slot for node in self._nodes.values() if node.left is None]

    def arrive(self, slot: int, told: dict[str, Any], now: float) -> None:
        node = Node(
            slot, told["name"], told["order"], told["num_workers"], now, told.get("why", "")
        )
        self._nodes[node.name] = node

    def hear(self, slot: int, beat: str, now: float) -> None:
        """The newest beat of a node; one that did not change says nothing."""
        for node in self._nodes.values():
            if node.slot == slot and node.beat != beat:
                values = json.loads(beat)
                node.beat, node.heard, node.stops = beat, now, values["stops"]
                node.left = tuple(values["left"]) if values["left"] else None

    def decide(self, now: float) -> Plan:
        """The plan as of now."""
        if self.plan.ended is None:
            self.plan = self._next(now)
        return self.plan

    @property
    def all_left(self) -> bool:
        return all(node.left is not None for node in self._nodes.values())

    def is_quiet(self, now: float, seconds: float) -> bool:
        """Whether nobody who has not left was heard of for so long."""
        return all(n.left or now - n.heard > seconds for n in self._nodes.values())

    def _next(self, now: float) -> Plan:
        plan, limits = self.plan, self.limits
        slots = {member.slot for member in plan.members}
        living = [n for n in self._nodes.values() if not n.left and now - n.heard < limits.lost_s]
        inside = [node for node in living if node.slot in slots]
        waiting = [node for node in living if node.slot not in slots]
        exits = plan.exits or any(node.stops for node in self._nodes.values())
        ended = self._ended(slots, inside, exits)
        regroup = ""
        if len(inside) < len(slots):
            regroup = "hard"
        elif plan.round and waiting and len(slots) < limits.max_nodes and not exits:
            regroup = "soft"
        if ended is None and not inside:
            if self._may_begin(len(waiting), now):
                return self._form(waiting, exits)
            ended = self._gave_up(len(waiting), now)
        return Plan(plan.round, plan.members, regroup, exits, ended, plan.why)

    def _ended(self, slots: set[int], inside: list[Node], exits: bool) -> tuple[int, str] | None:
        """Whether a node left with a failure, or all that trained have left."""
        lefts = [(n, n.left) for n in self._nodes.values() if n.left]
        for _, left in lefts:
            if left[0] not in (0, 75):
                return left
        codes = [left[0] for node, left in lefts if node.slot in slots]
        if codes and not inside:
            return max(codes), ""
        return (75, "") if exits and not self.plan.round else None

    def _may_begin(self, count: int, now: float) -> bool:
        if count < self.limits.min_nodes:
            self._enough_since = None
            return False
        if self._enough_since is None:
            self._enough_since = now
        full = count >= self.limits.max_nodes or self.plan.round > 0
        return full or now - self._enough_since >= self.limits.last_call_s

    def _gave_up(self, count: int, now: float) -> tuple[int, str] | None:
        least = self.limits.min_nodes
        if count >= least:
            return None
        if self._short_since is None:
            self._short_since = now
        if now - self._short_since < self.limits.join_s:
            return None
        return 1, f"{count} of at least {least} nodes came within {self.limits.join_s:g} s"

    def _form(self, waiting: list[Node], exits: bool) -> Plan:
        self._enough_since = self._short_since = None
        members, rank = [], 0
        for node in sorted(waiting, key=lambda n: (n.order, n.slot))[: self.limits.max_nodes]:
            members.append(Member(node.slot, rank, node.num_workers))
            rank += node.num_workers
        why = self._why(waiting, len(members) - len(self.plan.members))
        return Plan(self.plan.round + 1, tuple(members), exits=exits, why=why)

    def _why(self, nodes: list[Node], more: int) -> str:
        """What ended the round before, given how many nodes there are more than then."""
        if not self.plan.round:
            return ""
        if failure := next((node.why for node in nodes if node.why), ""):
            return failure
        if more == 0:
            return "the launcher of a node was started anew"
        what = "was lost" if more < 0 else "has joined"
        return f"a node {what}" if abs(more) == 1 else f"{abs(more)} nodes: each {what}"
