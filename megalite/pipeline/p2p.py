"""Messages between pipeline ranks: one group for each (sender, receiver, kind).

Within a channel messages go first in, first out and have one shape, so nothing but their order
says which is which: that order is proven by ``schedule.validate``.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megalite.mesh import Group, Mesh, Work
from megalite.schedule.action import Op, Plan
from megalite.trace import Trace

Kind = Literal["F", "B"]


def channels_of(plan: Plan) -> list[tuple[int, int, Kind]]:
    """Every (sender, receiver, kind) that the plan sends on, by pipeline rank, sorted."""
    found: set[tuple[int, int, Kind]] = set()
    for sender, actions in enumerate(plan.actions):
        for action in actions:
            if action.op is Op.SEND_F:
                found.add((sender, plan.rank_of[action.stage + 1], "F"))
            elif action.op is Op.SEND_B:
                found.add((sender, plan.rank_of[action.stage - 1], "B"))
    return sorted(found)


class Channels:
    """This rank's ends of every channel of a plan. Creation is collective."""

    def __init__(self, mesh: Mesh, plan: Plan, trace: Trace | None = None) -> None:
        self.mesh, self.trace = mesh, trace or Trace()
        self._groups: dict[tuple[int, int, Kind], Group] = {}
        wanted = channels_of(plan)
        if not wanted:
            return
        columns = mesh.shape.groups("pp")
        pairs = [(c, ch) for c in columns for ch in wanted]
        made = mesh.new_group([(c[ch[0]], c[ch[1]]) for c, ch in pairs])
        for (_, channel), group in zip(pairs, made, strict=True):
            if group is not None:
                self._groups[channel] = group
        self._warm_up()

    def _warm_up(self) -> None:
        """One message a channel, in a fixed order: NCCL joins a communicator at its first use,
        and two that join in different orders on two ranks would wait for each other."""
        token = torch.zeros(1, device=self.mesh.device)
        me = self.mesh.pp.index
        for (sender, _, _), group in sorted(self._groups.items()):
            work = group.send(token, 1) if sender == me else group.recv(token, 0)
            work.wait()

    def send(self, kind: Kind, receiver: int, tensor: Tensor) -> Work:
        """Post a send to a pipeline rank; the tensor must not change before ``wait``."""
        work = self._groups[self.mesh.pp.index, receiver, kind].send(tensor, 1)
        return self.trace.message(receiver, work)

    def recv(self, kind: Kind, sender: int, tensor: Tensor) -> Work:
        """Post a receive from a pipeline rank into ``tensor``."""
        work = self._groups[sender, self.mesh.pp.index, kind].recv(tensor, 0)
        return self.trace.message(sender, work)
