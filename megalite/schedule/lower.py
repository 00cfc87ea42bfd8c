"""From what each rank computes to what it does: adds every message, wait and reduction."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from megalite.schedule.action import Action, Op, Plan
from megalite.schedule.validate import ROOM, check_compute

FORWARD_QUEUE = 2  # outputs of a stage that may wait for the next one in a forward-only plan


class _Message(NamedTuple):
    """Made by an action of ``stage`` at position ``made`` of the sender's list of computations,
    taken at position ``taken`` of the receiver's by the neighbouring stage."""

    stage: int
    microbatch: int
    made: int
    taken: int


@dataclass(frozen=True, slots=True)
class _Channel:
    """Messages of one kind from one rank to another; first in, first out."""

    sender: int
    receiver: int
    gradient: bool


_Messages = dict[_Channel, list[_Message]]
_HEAD, _ITSELF, _TAIL = range(3)  # where something stands around an action of the plan


class _Added:
    """What is added to a rank's list: actions, and for each 3 x its position, + _HEAD or _TAIL.

    At one place they keep the order in which they came.
    """

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.actions: list[Action] = []

    def add(self, position: int, side: int, actions: Iterable[Action]) -> None:
        for a in actions:
            self.keys.append(3 * position + side)
            self.actions.append(a)

    def merged(self, plan: Sequence[Action]) -> list[Action]:
        keys = [*range(_ITSELF, 3 * len(plan), 3), *self.keys]
        actions = [*plan, *self.actions]
        return [actions[i] for i in sorted(range(len(keys)), key=keys.__getitem__)]


def lower(plan: Plan) -> Plan:
    """Adds messages and gradient reductions to a compute-only plan, or to a forward-only one.
    A plan that has any of them is left as it is, for ``validate`` to judge.

    - Stages on one rank hand over without a message.
    - A SEND follows the action that makes its message.
    - Receives of a channel are posted in the sender's order: the first at the head of the list,
      each next one before the action that takes the message before it, so that it can travel
      meanwhile. Two posted receives suffice where messages are taken in the sender's order;
      where they are not, a channel has as many as that order needs, and never more.
    - A WAIT stands where the send is complete by causality: after the first action that takes a
      message which the receiver made when, or after, it took ours. Sends without such a proof
      are waited for at the end of the list; in a forward-only plan, after the second next send
      (FORWARD_QUEUE) of the same stage. That cannot dead-lock for the plans of ``forward_only``:
      its order is one execution, in which the receiver has taken (stage, microbatch - 2), and so
      has posted it, before the sender runs (stage, microbatch). ``validate`` judges any other.
    - One REDUCE a stage follows its last B or W.

    Raises:
        ScheduleError: if an action is missing, doubled, on the wrong rank or before its inputs.
    """
    if plan.is_lowered:
        return plan
    check_compute(plan)
    messages = _find_messages(plan)
    added = [_Added() for _ in plan.actions]
    _add_sends(messages, added)
    _add_receives(messages, added)
    _add_waits(plan, messages, added)
    _add_reductions(plan, added)
    return plan.replace(x.merged(actions) for x, actions in zip(added, plan.actions, strict=True))


def as_written(plan: Plan) -> Plan:
    """The shortest plan of which ``lower`` makes this lowered one: mostly its computations."""
    short = plan.compute_only()
    return short if lower(short).actions == plan.actions else plan


def _find_messages(plan: Plan) -> _Messages:
    """Every channel's messages, in the sender's order."""
    forward, back = _positions(plan)
    messages: defaultdict[_Channel, list[_Message]] = defaultdict(list)
    for rank, actions in enumerate(plan.actions):
        of_stage: dict[tuple[bool, int], list[_Message] | None] = {}  # None: no message is needed
        for made, a in enumerate(actions):
            if a.op is Op.WEIGHT_GRAD:
                continue
            gradient = a.op is not Op.FORWARD
            takes = a.stage - 1 if gradient else a.stage + 1
            if (gradient, a.stage) not in of_stage:
                peer = plan.peer(a.stage, takes)
                channel = None if peer is None else messages[_Channel(rank, peer, gradient)]
                of_stage[gradient, a.stage] = channel
            if (channel := of_stage[gradient, a.stage]) is not None:
                where = back if gradient else forward
                taken = where[takes * plan.num_microbatches + a.microbatch]
                channel.append(_Message(a.stage, a.microbatch, made, taken))
    return messages


def _positions(plan: Plan) -> tuple[list[int], list[int]]:
    """Where F, and where B or I, of (stage, microbatch) stands in the list of its rank."""
    forward = [0] * (plan.num_stages * plan.num_microbatches)
    back = list(forward)
    for actions in plan.actions:
        for position, a in enumerate(actions):
            if a.op is not Op.WEIGHT_GRAD:
                where = forward if a.op is Op.FORWARD else back
                where[a.stage * plan.num_microbatches + a.microbatch] = position
    return forward, back


def _add_sends(messages: _Messages, added: Sequence[_Added]) -> None:
    for channel, found in messages.items():
        op, rank = Op.SEND_B if channel.gradient else Op.SEND_F, added[channel.sender]
        rank.keys += [3 * x.made + _TAIL for x in found]
        rank.actions += [Action(op, x.stage, x.microbatch) for x in found]


def _add_receives(messages: _Messages, added: Sequence[_Added]) -> None:
    for channel, sent in messages.items():
        rank = added[channel.receiver]
        op, step = (Op.RECV_B, -1) if channel.gradient else (Op.RECV_F, 1)
        posts = [Action(op, x.stage + step, x.microbatch) for x in sent]
        place = {x.taken: i for i, x in enumerate(sent)}
        taken = sorted(place)
        # How many receives must be posted by the time that the n-th message taken is needed.
        needed = list(accumulate((place[t] + 1 for t in taken), max))
        room = max(ROOM, *(count - n for n, count in enumerate(needed)))
        rank.add(0, _HEAD, posts[: needed[0]])
        posted = needed[0]
        for n, (position, target) in enumerate(zip(taken, needed[1:], strict=False)):
            early = max(posted, min(target, n + room))
            rank.add(position, _HEAD, posts[posted:early])
            rank.add(position, _TAIL, posts[early:target])
            posted = max(early, target)


def _add_waits(plan: Plan, messages: _Messages, added: Sequence[_Added]) -> None:
    proofs = _proofs(messages)
    forward_only = plan.forward_only
    for channel, sent in messages.items():
        op, rank = Op.WAIT_B if channel.gradient else Op.WAIT_F, added[channel.sender]
        known_from, known = proofs.get((channel.sender, channel.receiver), ([], []))
        end = len(plan[channel.sender])
        bound = _bounds(sent, end) if forward_only else [end] * len(sent)
        for x, latest in zip(sent, bound, strict=True):
            i = bisect_left(known, x.taken)
            proven = max(known_from[i], x.made) if i < len(known) else end
            rank.keys.append(3 * min(proven, latest) + _TAIL)
            rank.actions.append(Action(op, x.stage, x.microbatch))


def _proofs(messages: _Messages) -> dict[tuple[int, int], tuple[Sequence[int], Sequence[int]]]:
    """What a rank knows of a peer: from position a[i] of its own list on, that the peer has
    started the action at position b[i] of its list. Both rise."""
    heard: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for channel, sent in messages.items():
        heard[channel.receiver, channel.sender] += ((x.taken, x.made) for x in sent)
    proofs: dict[tuple[int, int], tuple[Sequence[int], Sequence[int]]] = {}
    for pair, found in heard.items():
        found.sort()
        made = list(accumulate((made for _, made in found), max))
        proofs[pair] = ([taken for taken, _ in found], made)
    return proofs


def _bounds(sent: Sequence[_Message], end: int) -> list[int]:
    """For each send, where the ``FORWARD_QUEUE``-th next one of the same stage is made."""
    of_stage: defaultdict[int, list[int]] = defaultdict(list)
    for x in sent:
        of_stage[x.stage].append(x.made)
    later = {
        made: following
        for all_made in of_stage.values()
        for made, following in zip(
            all_made, [*all_made[FORWARD_QUEUE:], *[end] * FORWARD_QUEUE], strict=False
        )
    }
    return [later[x.made] for x in sent]


def _add_reductions(plan: Plan, added: Sequence[_Added]) -> None:
    for actions, rank in zip(plan.actions, added, strict=True):
        last = {a.stage: i for i, a in enumerate(actions) if a.op in (Op.BACKWARD, Op.WEIGHT_GRAD)}
        for stage, position in last.items():
            rank.add(position, _TAIL, [Action(Op.REDUCE, stage)])
