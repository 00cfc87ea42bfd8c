"""Process groups: the only place where ranks are joined and where a backend is named.

A ``Group`` is what the engine asks of a set of ranks, a ``Transport`` makes groups. Everything is
asynchronous: a call returns a ``Work``, and after ``wait()`` the *device* may use the result; on
CUDA that does not block the host. Messages of one group go first in, first out; there are no tags.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.mesh_shape import AXES, MeshShape


class Work(Protocol):
    def wait(self) -> object: ...


class Group(Protocol):
    """Collectives and messages among a fixed list of ranks, addressed by index in that list."""

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Work: ...
    def all_gather(self, output: Tensor, tensor: Tensor) -> Work: ...
    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work: ...
    def broadcast(self, tensor: Tensor, src: int) -> Work: ...
    def send(self, tensor: Tensor, dst: int) -> Work: ...
    def recv(self, tensor: Tensor, src: int) -> Work: ...


class Transport(Protocol):
    """Makes groups. ``new_group`` is collective: every rank calls it with the same ranks."""

    rank: int
    world_size: int
    device: torch.device

    def new_group(self, ranks: Sequence[int]) -> Group | None: ...
    def close_group(self, group: Group) -> None: ...


def local_device(local_rank: int) -> torch.device:
    """The device of this process: its own GPU where there is one, else the CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def make_deterministic() -> None:
    """Have this process use only algorithms that give the same bits again; before its device is
    used, for cuBLAS reads its workspace's size once."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)


def backend_of(device: torch.device) -> str:
    """The backend of ``torch.distributed`` for a device."""
    return "nccl" if device.type == "cuda" else "gloo"


class _Done:
    """The work of an operation that had nothing to do."""

    def wait(self) -> None:
        return None


DONE = _Done()
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class _Summed:
    """A reduce-scatter over gloo, whose own sums a copy of the whole on every rank: here each rank
    is sent the parts that it has to add, and adds them in the order of ranks."""

    def __init__(self, output: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> None:
        self.output, self.parts = output, torch.empty_like(tensor)
        self.work: Work | None = _work(
            dist.all_to_all_single(self.parts, tensor, group=group, async_op=True)
        )

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            torch.sum(self.parts.view(-1, *self.output.shape), dim=0, out=self.output)
            self.work = None
            del self.parts


class TorchGroup:
    """A group of ``torch.distributed`` (gloo or NCCL)."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self.group, self.ranks = group, tuple(ranks)
        self.copies = dist.get_backend(group) == "gloo"

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Work:
        return _work(dist.all_reduce(tensor, _OPS[op], group=self.group, async_op=True))

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        return _work(dist.all_gather_single(output, tensor, group=self.group, async_op=True))

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        if self.copies:
            return _Summed(output, tensor, self.group)
        return _work(dist.reduce_scatter_single(output, tensor, group=self.group, async_op=True))

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        return _work(dist.broadcast(tensor, self.ranks[src], group=self.group, async_op=True))

    def send(self, tensor: Tensor, dst: int) -> Work:
        return _work(dist.isend(tensor, self.ranks[dst], group=self.group))

    def recv(self, tensor: Tensor, src: int) -> Work:
        return _work(dist.irecv(tensor, self.ranks[src], group=self.group))


def _work(work: Work | None) -> Work:
    if work is None:
        raise RuntimeError("this rank does not belong to the group that it used")
    return work


class TorchTransport:
    """The default process group of ``torch.distributed``, which the caller has initialised."""

    def __init__(self, device: torch.device, timeout_s: float = 600.0) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device, self.timeout = device, timedelta(seconds=timeout_s)
        self._groups: list[TorchGroup] = []

    def new_group(self, ranks: Sequence[int]) -> Group | None:
        made = dist.new_group(list(ranks), timeout=self.timeout)
        if self.rank not in ranks:
            return None
        self._groups.append(TorchGroup(made, ranks))
        return self._groups[-1]

    def close_group(self, group: Group) -> None:
        assert isinstance(group, TorchGroup)
        self._groups.remove(group)
        dist.destroy_process_group(group.group)

    def close(self) -> None:
        """Destroy every group that is left."""
        for group in reversed(list(self._groups)):
            self.close_group(group)


@dataclass(frozen=True)
class Axis:
    """This rank's place on one axis: its index among ``size`` ranks, and their group.

    On an axis of size 1 every operation is the identity and sends nothing.
    """

    name: str
    index: int = 0
    size: int = 1
    ranks: tuple[int, ...] = (0,)
    group: Group | None = field(default=None, repr=False)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Work:
        """Sum (or max) in place."""
        return self.group.all_reduce(tensor, op) if self.group else DONE

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        """``output`` (size * n, ...) from every rank's ``tensor`` (n, ...), which may be this
        rank's part of ``output``."""
        if self.group:
            return self.group.all_gather(output, tensor)
        output.copy_(tensor)
        return DONE

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        """``output`` (n, ...), the sum over ranks of this rank's part of ``tensor``.

        It may be that very part; what the others of ``tensor`` then hold is not defined."""
        if self.group:
            return self.group.reduce_scatter(output, tensor)
        output.copy_(tensor)
        return DONE

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """In place, from the rank with index ``src``."""
        return self.group.broadcast(tensor, src) if self.group else DONE


class Mesh:
    """The axes of one ``MeshShape`` as seen by one rank.

    ``world`` joins all ranks of the shape, ``tie`` the first and the last pipeline rank of this
    rank's (dp, tp), for tied embeddings; elsewhere in the pipeline it has size 1.
    ``first_rank`` shifts the shape inside a larger job, so that two models can live side by side.
    """

    def __init__(
        self,
        shape: MeshShape,
        transport: Transport | None,
        axes: dict[str, Axis],
        first_rank: int = 0,
    ) -> None:
        self.shape, self.transport, self.first_rank = shape, transport, first_rank
        self.tp, self.pp, self.dp = axes["tp"], axes["pp"], axes["dp"]
        self.tie, self.world = axes["tie"], axes["world"]
        self.device = transport.device if transport else torch.device("cpu")
        self._groups = [a.group for a in axes.values() if a.group is not None]

    @property
    def rank(self) -> int:
        return self.world.index

    @classmethod
    def single(cls, device: torch.device | None = None) -> Mesh:
        """The mesh of a process that is alone; joins nothing."""
        mesh = cls(MeshShape(), None, {a: Axis(a) for a in (*AXES, "tie", "world")})
        mesh.device = device or mesh.device
        return mesh

    @classmethod
    def at(cls, shape: MeshShape, rank: int, device: torch.device | None = None) -> Mesh:
        """The place of any rank of any shape, without groups: nothing can be sent."""
        coords = shape.coords(rank)
        axes = {a: Axis(a, coords[a], shape.size(a)) for a in AXES}
        axes["tie"] = Axis("tie")
        axes["world"] = Axis("world", rank, shape.world_size)
        mesh = cls(shape, None, axes)
        mesh.device = device or mesh.device
        return mesh

    @classmethod
    def create(cls, shape: MeshShape, transport: Transport, first_rank: int = 0) -> Mesh:
        """Create every group of ``shape``; collective over the transport's whole world.

        Every rank creates every group in the same order, also those it is no member of, as
        ``torch.distributed.new_group`` asks.
        """
        members: dict[str, list[tuple[int, ...]]] = {a: shape.groups(a) for a in AXES}
        if shape.pp > 1:
            members["tie"] = [(g[0], g[-1]) for g in members["pp"]]
        members["world"] = [tuple(range(shape.world_size))]
        me = transport.rank - first_rank
        axes = {a: Axis(a) for a in (*AXES, "tie", "world")}
        for name, groups in members.items():
            for ranks in groups:
                if len(ranks) == 1:
                    continue
                absolute = tuple(r + first_rank for r in ranks)
                group = transport.new_group(absolute)
                if group is not None:
                    axes[name] = Axis(name, ranks.index(me), len(ranks), absolute, group)
        # NCCL joins a communicator at its first use, where the host waits for all members: in
        # one order on all ranks, or two of them could wait for each other.
        for axis in axes.values():
            axis.all_reduce(torch.zeros(1, device=transport.device)).wait()
        return cls(shape, transport, axes, first_rank)

    def reshaped(self, shape: MeshShape) -> Mesh:
        """A mesh of another shape over the same ranks; collective. This one stays open; a process
        that is alone has no other."""
        if self.transport is None:
            return self
        return Mesh.create(shape, self.transport, self.first_rank)

    def new_group(self, members: Sequence[tuple[int, ...]]) -> list[Group | None]:
        """Further groups, by ranks of the shape; collective, closed with the mesh."""
        assert self.transport is not None
        first = self.first_rank
        made = [self.transport.new_group([r + first for r in ranks]) for ranks in members]
        self._groups += [g for g in made if g is not None]
        return made

    def close(self) -> None:
        """Destroy this mesh's groups; the process may then create another mesh."""
        for group in reversed(self._groups):
            assert self.transport is not None
            self.transport.close_group(group)
        self._groups.clear()
