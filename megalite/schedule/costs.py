"""What a schedule is planned for: times of the stages and memory of the ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import frexp, inf

LEAST, MOST = 1e-100, 1e100  # of a time above 0: sums and quotients of such are numbers


@dataclass(frozen=True)
class Costs:
    """Seconds, or any unit, of what the stages do; a tuple has one entry a stage.

    Attributes:
        forward, input_grad, weight_grad: time of F, I and W; B takes I + W.
        comm: time of one message between ranks.
        reduce: time of the data-parallel reduction of a stage's gradients.
        reduce_overlaps: whether a rank computes while it reduces.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    comm: float = 0.0
    reduce: tuple[float, ...] = ()
    reduce_overlaps: bool = True

    def __post_init__(self) -> None:
        stages = self.num_stages
        if not len(self.input_grad) == len(self.weight_grad) == stages:
            raise ValueError(f"times must be given for each of the {stages} stages")
        if self.reduce and len(self.reduce) != stages:
            raise ValueError(f"reductions must be given for each of the {stages} stages")
        times = (*self.forward, *self.input_grad, *self.weight_grad, self.comm, *self.reduce)
        for t in times:
            if not (t == 0 or LEAST <= t <= MOST):
                raise ValueError(f"a time of {t:g} is not 0 or within {LEAST:g} to {MOST:g}")

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    def near_one(self) -> Costs:
        """The same in a unit that is near the longest time, exactly: a power of two."""
        longest = max(*self.forward, *self.input_grad, *self.weight_grad, self.comm)
        unit = 2.0 ** frexp(longest)[1]

        def scaled(times: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(t / unit for t in times)

        return replace(
            self,
            forward=scaled(self.forward),
            input_grad=scaled(self.input_grad),
            weight_grad=scaled(self.weight_grad),
            comm=self.comm / unit,
            reduce=scaled(self.reduce),
        )

    @classmethod
    def equal(
        cls,
        pp: int,
        virtual_stages: int = 1,
        forward: float = 1.0,
        input_grad: float = 1.0,
        weight_grad: float = 1.0,
        comm: float = 0.0,
    ) -> Costs:
        """The same for every stage; F, I and W are a rank's whole share of a microbatch, of which
        a stage takes 1 / virtual_stages."""
        stages, part = pp * virtual_stages, 1 / max(1, virtual_stages)
        return cls(
            (forward * part,) * stages,
            (input_grad * part,) * stages,
            (weight_grad * part,) * stages,
            comm,
        )


@dataclass(frozen=True)
class MemoryLimit:
    """What a rank may hold of activations.

    Attributes:
        units: the most at any time, in microbatches of the rank's whole share: a stage's
            activation is 1 / (stages of the rank).
        open_w: what stays of an activation between I and W, 0 to 1. The inputs and output
            gradients of the linear layers must stay; what only I needs may go
            (Qi et al. 2023, arXiv:2401.10241, table 1: 32 of 34 + 5 a s / h).
    """

    units: float = inf
    open_w: float = 1.0

    def __post_init__(self) -> None:
        if not self.units >= 0:
            raise ValueError(f"{self.units} microbatches are no limit of memory")
        if not 0 <= self.open_w <= 1:
            raise ValueError(f"open_w={self.open_w} is no share of an activation")
