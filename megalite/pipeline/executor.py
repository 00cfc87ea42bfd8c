"""Runs a rank's list of actions: the one interpreter for every schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, assert_never

import torch
from torch import Tensor

from megalite.mesh import Work
from megalite.pipeline.p2p import Channels, Kind
from megalite.pipeline.spans import traced
from megalite.pipeline.stage import Stage
from megalite.place import Place
from megalite.rows import Rows
from megalite.schedule.action import Action, Op, Plan
from megalite.trace import Trace


class Reducer(Protocol):
    """What the executor tells the data-parallel reduction."""

    def started(self, stage: int) -> None: ...


@dataclass
class Batch:
    """A rank's share of a step: (m, b, s) token ids and next tokens (-100 is ignored).

    Without targets the last stage gives logits; without ``samples``, the (m, b) int64 global
    numbers of the rows, nothing is dropped. ``step`` is the training step's number. ``places``
    are the (m, b, s) positions of tokens that are parts of texts.
    """

    tokens: Tensor
    targets: Tensor | None
    samples: Tensor | None = None
    step: int = 0
    places: Tensor | None = None

    def rows(self, m: int) -> Rows:
        """What all stages are told about microbatch m."""
        samples = None if self.samples is None else self.samples[m]
        places = None if self.places is None else self.places[m]
        return Rows(self.tokens[m], samples, self.step, places)


class Executor:
    """Interprets plans on this rank's stages.

    Receive buffers are kept from step to step, so that a steady state allocates none.
    """

    def __init__(
        self,
        rank: int,
        stages: dict[int, Stage],
        channels: Channels,
        trace: Trace | None = None,
        place: Place | None = None,
    ) -> None:
        self.rank, self.stages, self.channels = rank, stages, channels
        self.trace, self.place = trace or Trace(), place or Place()
        self._free: dict[tuple[int, ...], list[Tensor]] = {}

    def run(self, plan: Plan, batch: Batch, reducer: Reducer | None = None) -> Tensor | None:
        """Run one step's actions.

        Returns:
            on the rank of the last stage: its outputs (losses) summed over microbatches, on the
            device; else None.
        """
        step = _Step(self, plan, batch)
        do = traced(step.do, plan, self.trace) if self.trace.recording else step.do
        for action in plan[self.rank]:
            self.place.act(action)
            do(action, reducer)
        self.place.acted()
        step.finish()
        return step.loss

    def buffer(self, stage: Stage, batch_shape: torch.Size) -> Tensor:
        """A receive buffer for (m, b, s) batches; its contents are old."""
        shape = stage.module.hidden_shape(*batch_shape[1:])
        free = self._free.get(shape)
        return free.pop() if free else torch.empty(shape, dtype=stage.dtype, device=stage.device)

    def release(self, tensor: Tensor) -> None:
        """A received tensor is no longer needed."""
        self._free.setdefault(tuple(tensor.shape), []).append(tensor.detach())


Key = tuple[int, int]  # (stage, microbatch)


class _Step:
    """The state of one run: what is under way, what has arrived, what is kept until B or W."""

    def __init__(self, executor: Executor, plan: Plan, batch: Batch) -> None:
        self.owner, self.plan, self.batch = executor, plan, batch
        self.loss: Tensor | None = None
        self.posted: dict[tuple[Kind, Key], tuple[Tensor, Work]] = {}
        self.local: dict[tuple[Kind, Key], Tensor] = {}
        self.made: dict[tuple[Kind, Key], Tensor] = {}
        self.sending: dict[tuple[Kind, Key], tuple[Tensor, Work]] = {}
        self.kept: dict[Key, list[Tensor]] = {}

    def do(self, action: Action, reducer: Reducer | None) -> None:
        key = action.stage, action.microbatch
        stage = self.owner.stages[action.stage]
        match action.op:
            case Op.FORWARD:
                self.forward(stage, key)
            case Op.BACKWARD:
                self.hand_back(key, stage.backward(key[1], self.output_grad(stage, key)))
                self.release(key)
            case Op.INPUT_GRAD:
                self.hand_back(key, stage.input_grad(key[1], self.output_grad(stage, key)))
            case Op.WEIGHT_GRAD:
                stage.weight_grad(key[1])
                self.release(key)
            case Op.RECV_F:
                self.recv("F", stage, key, key[0] - 1)
            case Op.RECV_B:
                self.recv("B", stage, key, key[0] + 1)
            case Op.SEND_F:
                self.send("F", key, key[0] + 1)
            case Op.SEND_B:
                self.send("B", key, key[0] - 1)
            case Op.WAIT_F:
                self.sending.pop(("F", key))[1].wait()
            case Op.WAIT_B:
                self.sending.pop(("B", key))[1].wait()
            case Op.REDUCE:
                if reducer is not None:
                    reducer.started(key[0])
            case _:
                assert_never(action.op)

    def forward(self, stage: Stage, key: Key) -> None:
        index, m = key
        x = self.batch.tokens[m] if stage.first else self.take("F", key)
        targets = self.batch.targets[m] if stage.last and self.batch.targets is not None else None
        out = stage.forward(m, x, targets, self.batch.rows(m))
        if not stage.live(m):
            self.release(key)
        if not stage.last:
            self.hand_on("F", key, index + 1, out)
        else:
            self.loss = out if self.loss is None else self.loss + out

    def output_grad(self, stage: Stage, key: Key) -> Tensor | None:
        return None if stage.last else self.take("B", key)

    def hand_back(self, key: Key, grad: Tensor | None) -> None:
        if grad is not None:
            self.hand_on("B", key, key[0] - 1, grad)

    def hand_on(self, kind: Kind, key: Key, to: int, tensor: Tensor) -> None:
        """Give a result to stage ``to``: here, or by the SEND that follows in the plan."""
        if self.plan.rank_of[to] == self.owner.rank:
            self.local[kind, (to, key[1])] = tensor
        else:
            self.made[kind, key] = tensor

    def take(self, kind: Kind, key: Key) -> Tensor:
        """What F, B or I of ``key`` needs from the neighbouring stage."""
        if (kind, key) in self.local:
            return self.local.pop((kind, key))
        tensor, work = self.posted.pop((kind, key))
        self.owner.place.wait()
        work.wait()
        self.owner.place.go_on()
        self.kept.setdefault(key, []).append(tensor)
        return tensor

    def release(self, key: Key) -> None:
        for tensor in self.kept.pop(key, []):
            self.owner.release(tensor)

    def recv(self, kind: Kind, stage: Stage, key: Key, other: int) -> None:
        buffer = self.owner.buffer(stage, self.batch.tokens.shape)
        work = self.owner.channels.recv(kind, self.plan.rank_of[other], buffer)
        self.posted[kind, key] = buffer, work

    def send(self, kind: Kind, key: Key, other: int) -> None:
        tensor = self.made.pop((kind, key)).contiguous()
        work = self.owner.channels.send(kind, self.plan.rank_of[other], tensor)
        self.sending[kind, key] = tensor, work

    def finish(self) -> None:
        """Check that nothing is left."""
        left = [*self.posted, *self.local, *self.made, *self.sending, *self.kept]
        live = sum(s.live_microbatches for s in self.owner.stages.values())
        assert not left and not live, f"left at the end of the step: {left}, {live} live"
