"""What one layout costs: time and memory of a step, and where the time goes. No torch."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from megalite.errors import ConfigError
from megalite.mesh_shape import MeshShape
from megalite.parallel_config import ParallelConfig, mesh_shape
from megalite.planner.constants import MEGALITE, Constants, Framework, load_constants
from megalite.planner.cost import LayerCosts, Passes, Split
from megalite.planner.hardware import HardwareSpec
from megalite.planner.kernels import Kernels
from megalite.planner.memory import MemoryModel, RankMemory
from megalite.planner.pipeline import Pipelined, earliest, least_held, placed, run
from megalite.planner.shape import ModelShape
from megalite.schedule.costs import Costs
from megalite.schedule.placement import place_layers

Times = NDArray[np.float64]
_WHOLE_B = ("naive", "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs")


@dataclass(frozen=True)
class Machine:
    """Where a model runs, and by which software."""

    hw: HardwareSpec
    framework: Framework = MEGALITE
    constants: Constants = field(default_factory=load_constants)
    scalar: float = 1.0
    element_bytes: int = 2

    @cached_property
    def kernels(self) -> Kernels:
        constants = replace(self.constants, **dict(self.hw.constants))
        return Kernels(self.hw, constants, self.element_bytes)

    @cached_property
    def known_layers(self) -> dict[object, tuple[Passes, Passes, Passes]]:
        return {}


@dataclass(frozen=True)
class Job:
    """A model on so many devices with a layout: what is to be estimated."""

    shape: ModelShape
    parallel: ParallelConfig
    world_size: int
    global_batch: int
    micro_batch: int

    @cached_property
    def mesh(self) -> MeshShape:
        return mesh_shape(self.parallel, self.world_size)

    @cached_property
    def microbatches(self) -> int:
        return math.ceil(self.global_batch / (self.micro_batch * self.mesh.dp))

    @property
    def split(self) -> Split:
        p = self.parallel
        return Split(p.tp, p.sequence_parallel and p.tp > 1, p.recompute)

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        p = self.parallel
        return placed(p.schedule, p.pp, p.virtual_stages)


@dataclass(frozen=True)
class Estimate:
    """A step of a job.

    Attributes:
        step_s: the whole step, the stack's scalar included.
        pipeline_s, reduce_s, optimizer_s: its parts: forward and backward with the bubble;
            gradients that no computation hides; the update.
        bubble_fraction: of the pipeline, over all ranks.
        mfu: model FLOPs (nothing counted twice) over peak.
        memory: of each pipeline rank.
    """

    job: Job
    step_s: float
    pipeline_s: float
    reduce_s: float
    optimizer_s: float
    bubble_fraction: float
    mfu: float
    exact: bool
    machine: Machine = field(repr=False)

    @cached_property
    def memory(self) -> tuple[RankMemory, ...]:
        return Estimator(self.job, self.machine).memory()

    @property
    def peak_bytes(self) -> float:
        return max(m.total for m in self.memory)

    @property
    def worst_rank(self) -> int:
        return max(range(len(self.memory)), key=lambda r: self.memory[r].total)


class Estimator:
    """Estimates one job on one machine; the parts are public for ``search`` and ``explain``."""

    def __init__(self, job: Job, machine: Machine) -> None:
        self.job, self.machine = job, machine
        self.k = machine.kernels

    @cached_property
    def kinds(self) -> tuple[Passes, Passes, Passes]:
        """Embedding, layer and head."""
        job, machine = self.job, self.machine
        key = (job.shape, job.split, job.micro_batch)
        if key not in machine.known_layers:
            costs = LayerCosts(job.shape, job.split, job.micro_batch, self.k, machine.framework)
            machine.known_layers[key] = (costs.embedding(), costs.layer(), costs.head())
        return machine.known_layers[key]

    @cached_property
    def layers(self) -> tuple[range, ...]:
        """The layers of each stage."""
        p, job = self.job.parallel, self.job
        embedding, layer, head = (_seconds(x) for x in self.kinds)
        mode = "balanced" if p.partition == "profile" else p.partition
        ends = (0.0, 0.0)
        if mode == "balanced":
            ends = (_twentieths(embedding / layer), _twentieths(head / layer))
        return _cut(job.shape.layers, p.pp * p.virtual_stages, *ends, mode, job.rank_of)

    # --- messages and reductions -----------------------------------------------------------------

    @cached_property
    def message_s(self) -> float:
        """One activation, or its gradient, from stage to stage."""
        job, k, f = self.job, self.k, self.machine.framework
        p = job.parallel
        if p.pp == 1:
            return 0.0
        whole = float(job.micro_batch * job.shape.seq * job.shape.hidden * k.element_bytes)
        far = self._stride("pp") * p.pp > k.hw.node_size
        if job.split.sequence_parallel:
            return k.message(whole / p.tp, far)
        if f.scatter_p2p:
            return k.message(whole / p.tp, far) + k.all_gather(whole, p.tp)
        return k.message(whole, far)

    def _stride(self, axis: str) -> int:
        """How far apart the ranks of an axis lie."""
        order = self.job.mesh.order
        return math.prod(self.job.mesh.size(a) for a in order[order.index(axis) + 1 :])

    @cached_property
    def _elements(self) -> Times:
        """Parameters of every stage on a tp rank."""
        shape, tp, rank_of = self.job.shape, self.job.parallel.tp, self.job.rank_of
        found = self._counts * shape.layer_elements(tp)
        found[0] += shape.embedding_elements(tp)
        alone = not (shape.tied and rank_of[0] == rank_of[-1])
        found[-1] += shape.head_elements(tp) if alone else shape.norm_elements
        return found

    @cached_property
    def reductions(self) -> Times:
        """Of each stage's gradients over dp, all of it; scattered under ZeRO-1."""
        dp, f, stride = self.job.mesh.dp, self.machine.framework, self._stride("dp")
        ring = self.k.all_gather if self.job.parallel.zero1 else self.k.all_reduce
        start, more = ring(0.0, dp, stride), ring(1e9, dp, stride)  # it grows evenly with bytes
        whole = start + (more - start) / 1e9 * f.reduce_bytes * self._elements
        return np.where(self._elements > 0, whole, 0.0)

    @cached_property
    def exposed_reductions(self) -> Times:
        """What is left of them after a stage's last backward: buckets of earlier layers are
        reduced while later ones are computed, the last one is not; nor is what does not overlap."""
        whole = self.reductions
        if not self.machine.framework.overlap_dp:
            return whole
        _, input_grad, weight_grad = self._passes
        last = whole / (self._counts + 1)
        shown = np.maximum(last, whole * (1 - self.k.hw.overlap))
        return np.maximum(whole - input_grad - weight_grad, shown)

    @cached_property
    def tie_s(self) -> float:
        """The two copies of a tied matrix are summed over the first and the last rank."""
        job = self.job
        if not job.shape.tied or job.rank_of[0] == job.rank_of[-1]:
            return 0.0
        f, p = self.machine.framework, job.parallel
        whole = float(job.shape.rows(p.tp) * job.shape.hidden * f.reduce_bytes)
        return self.k.all_reduce(whole, 2, self._stride("pp") * (p.pp - 1))

    @cached_property
    def optimizer_s(self) -> float:
        """Norm and update of the rank with most parameters, and the gather after ZeRO-1."""
        most = float(self._by_rank(self._elements).max())
        return self._update_s(most, float(self._by_rank(self._passes[0]).min()))

    @property
    def least_optimizer_s(self) -> float:
        """Of a mean rank, the gather left out: no partition has less."""
        shape, p = self.job.shape, self.job.parallel
        elements = shape.layers * shape.layer_elements(p.tp) + shape.embedding_elements(p.tp)
        share = elements / p.pp / (self.job.mesh.dp if p.zero1 else 1)
        return self.k.stream(share * self.machine.framework.update_bytes, "update")

    def _update_s(self, elements: float, forward: float) -> float:
        """Of so many parameters on a rank; a forward pass may hide the gather."""
        job, p = self.job, self.job.parallel
        share = elements / job.mesh.dp if p.zero1 else elements
        found = self.k.stream(share * self.machine.framework.update_bytes, "update")
        if p.zero1:
            found += self._gather_s(elements, forward)
        ranks = job.mesh.world_size
        return found + 2 * self.k.all_reduce(8.0, ranks)

    def _gather_s(self, elements: float, forward: float) -> float:
        """Of updated weights; beside the next forward, all but the first layer's may be hidden."""
        whole = self.k.all_gather(
            elements * self.k.element_bytes, self.job.mesh.dp, self._stride("dp")
        )
        if not self.machine.framework.overlap_gather:
            return whole
        first = whole / max(1, self.job.shape.layers // self.job.parallel.pp)
        return max(first, whole - forward, whole * (1 - self.k.hw.overlap))

    # --- the step --------------------------------------------------------------------------------

    @cached_property
    def costs(self) -> Costs:
        """What the simulator takes: the device's time or the host's, whichever is longer."""
        forward, input_grad, weight_grad = self._passes
        reduce = tuple(self.exposed_reductions.tolist())
        comm = 0.0 if self._blocking else self.message_s - self._held_up
        return Costs(
            tuple(forward.tolist()),
            tuple(input_grad.tolist()),
            tuple(weight_grad.tolist()),
            comm,
            reduce,
        )

    @property
    def _blocking(self) -> bool:
        return self.machine.framework.blocking_p2p and self.job.parallel.pp > 1

    @property
    def _held_up(self) -> float:
        """For how long a rank computes nothing because of a message that it sends."""
        return self.message_s * (1.0 if self._blocking else 1 - self.k.hw.overlap)

    @cached_property
    def _counts(self) -> Times:
        return np.array([len(r) for r in self.layers], float)

    def _stages(self, name: str) -> Times:
        """A time of every stage: its layers, and what the first and the last have besides."""
        embedding, layer, head = (float(getattr(kind, name)) for kind in self.kinds)
        found = self._counts * layer
        found[0] += embedding
        found[-1] += head
        return found

    @cached_property
    def _passes(self) -> tuple[Times, Times, Times]:
        """F, I and W of every stage."""
        wait = self._held_up
        forward = np.maximum(self._stages("forward"), self._stages("host_forward"))
        input_grad, weight_grad = self._stages("input_grad"), self._stages("weight_grad")
        back = input_grad + weight_grad
        slow = np.maximum(1.0, self._stages("host_backward") / np.maximum(back, 1e-30))
        input_grad, weight_grad = input_grad * slow, weight_grad * slow + self._zero_s
        forward[:-1] += wait
        input_grad[1:] += wait
        return forward, input_grad, weight_grad

    @property
    def _zero_s(self) -> Times | float:
        """What ZeRO-1 adds to a microbatch, in frameworks that copy gradients for it."""
        each = self.machine.framework.zero_bytes
        if not (each and self.job.parallel.zero1):
            return 0.0
        return self._elements * each / (self.k.bytes_s * self.machine.constants.stream)

    def pipeline(self) -> Pipelined:
        p = self.job.parallel
        return run(p.schedule, p.pp, self.job.microbatches, p.virtual_stages, self.costs)

    def _by_rank(self, times: Times) -> Times:
        """Sums of the stages of each rank."""
        found = np.bincount(np.array(self.job.rank_of), times, self.job.parallel.pp)
        return np.asarray(found, float)

    @cached_property
    def bounds(self) -> tuple[float, float]:
        """Seconds that no order of the work can beat, where B may be cut in two and where not:
        for each rank its work, what must come before its first F, and, in the second case, what
        must follow its last B."""
        pp, comm = self.job.parallel.pp, self.costs.comm
        forward, input_grad, weight_grad = self._passes
        back = input_grad + weight_grad
        work = self.job.microbatches * self._by_rank(forward + back)
        first = np.argsort(np.array(self.job.rank_of), kind="stable")  # a rank's stages, in order
        ranks = np.array(self.job.rank_of)[first]
        first = first[np.searchsorted(ranks, np.arange(pp))]
        before = (np.cumsum(forward + comm) - forward - comm)[first]
        after = (np.cumsum(back + comm) - back - comm)[first] + self.costs.reduce[0]
        cut = float((before + work).max()) + self.fixed_s
        return cut, float((before + work + after).max()) + self.fixed_s

    @property
    def lower_bound(self) -> float:
        """Of this job's schedule, in seconds; without the stack's scalar."""
        return self.bounds[self.job.parallel.schedule in _WHOLE_B]

    @cached_property
    def earliest_s(self) -> float:
        """A step without what buffers may add: a higher bound, mostly the time itself."""
        p = self.job.parallel
        pipeline = earliest(p.schedule, p.pp, self.job.microbatches, p.virtual_stages, self.costs)
        return (pipeline + self.fixed_s) * self.machine.scalar

    def with_schedule(self, schedule: str) -> Estimator:
        """The same in another order of the work, on the same ranks; what is known is kept."""
        found = copy(self)
        for name in ("earliest_s", "peak_bytes"):
            vars(found).pop(name, None)
        parallel = replace(self.job.parallel, schedule=schedule)
        found.job = replace(self.job, parallel=parallel)
        return found

    @property
    def fixed_s(self) -> float:
        """What stands after the pipeline in any case."""
        return self.optimizer_s + self.tie_s

    @cached_property
    def memory_model(self) -> MemoryModel:
        job, machine = self.job, self.machine
        return MemoryModel(
            job.shape,
            job.split,
            machine.framework,
            job.micro_batch,
            machine.element_bytes,
            job.parallel.zero1,
            job.mesh.dp,
            machine.hw.reserve_bytes,
        )

    def memory(self) -> tuple[RankMemory, ...]:
        """Of each pipeline rank."""
        job, p = self.job, self.job.parallel
        return tuple(
            self.memory_model.ranks(
                p.schedule, p.pp, job.microbatches, p.virtual_stages, job.rank_of, self.layers
            )
        )

    @property
    def least_bytes(self) -> float:
        """What some rank needs at least, before a plan is made: whichever holds the microbatches
        that one must, it has the smallest stages there are."""
        p, model = self.job.parallel, self.memory_model
        layers = p.virtual_stages * float(self._counts.min())
        held = least_held(p.schedule, p.pp, self.job.microbatches) * layers * model.kept()
        return sum(model.state(layers * self.job.shape.layer_elements(p.tp))) + held

    @cached_property
    def peak_bytes(self) -> float:
        """Of the fullest rank."""
        return max(m.total for m in self.memory())

    def estimate(self) -> Estimate:
        pipelined = self.pipeline()
        without = max(pipelined.busy) if self.job.parallel.pp == 1 else pipelined.makespan
        whole = (pipelined.makespan + self.fixed_s) * self.machine.scalar
        job = self.job
        flops = job.shape.model_flops(job.global_batch)
        peak = self.k.hw.peak_flops * job.world_size
        return Estimate(
            job,
            whole,
            without * self.machine.scalar,
            (pipelined.makespan - without + self.tie_s) * self.machine.scalar,
            self.optimizer_s * self.machine.scalar,
            pipelined.bubble_fraction,
            flops / (whole * peak),
            pipelined.exact,
            self.machine,
        )


@lru_cache(maxsize=4096)
def _cut(
    layers: int,
    stages: int,
    first: float,
    last: float,
    mode: str | tuple[int, ...],
    rank_of: tuple[int, ...],
) -> tuple[range, ...]:
    """As the runtime cuts, the ends in units of a layer."""
    ones = [1.0] * layers
    return place_layers(
        ones, stages, first_extra=first, last_extra=last, mode=mode, rank_of=rank_of
    )


def _twentieths(share: float) -> float:
    """Rounded: finer differences move no layer, and equal cuts are made once."""
    return round(share * 20) / 20


def _seconds(p: Passes) -> float:
    return max(p.forward, p.host_forward) + max(p.input_grad + p.weight_grad, p.host_backward)


def check_fits(job: Job) -> None:
    """Raises the first rule about layouts that a job breaks."""
    from megalite.parallel_config import problems

    found = problems(
        job.parallel, job.shape.facts(), job.world_size, job.global_batch, job.micro_batch
    )
    if found:
        raise found[0]
    if job.global_batch < job.mesh.dp:
        raise ConfigError(
            "--global-batch",
            f"{job.global_batch} sequences are fewer than the {job.mesh.dp} replicas",
            f"Use {job.mesh.dp} or more, or more tp or pp",
        )
