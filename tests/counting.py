"""A transport that writes down what passes through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.mesh import Group, Transport, Work


@dataclass(frozen=True)
class Record:
    """One operation as this rank issued it.

    ``shape``, ``dtype`` and ``num_bytes`` are those of the tensor that this rank gives (receives,
    for ``recv``): an all-gather counts its input, a reduce-scatter its whole sum. ``group`` is the
    number of the group in the order of creation, ``peer`` the absolute rank of the other end of a
    message or of a broadcast's source.
    """

    op: str
    group: int
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int
    peer: int | None = None


class CountingTransport:
    """Passes everything on to ``inner``; ``records`` holds the operations of all its groups."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank, self.world_size, self.device = inner.rank, inner.world_size, inner.device
        self.records: list[Record] = []
        self.num_groups = 0

    def new_group(self, ranks: Sequence[int]) -> Group | None:
        number, self.num_groups = self.num_groups, self.num_groups + 1
        group = self.inner.new_group(ranks)
        return _CountingGroup(group, number, tuple(ranks), self.records) if group else None

    def close_group(self, group: Group) -> None:
        assert isinstance(group, _CountingGroup)
        self.inner.close_group(group.inner)

    def select(self, op: str | None = None, ranks: Sequence[int] | None = None) -> list[Record]:
        """The records of one operation, one set of ranks, or both."""
        return [
            r
            for r in self.records
            if op in (None, r.op) and (ranks is None or r.ranks == tuple(ranks))
        ]

    def count(self, op: str | None = None, ranks: Sequence[int] | None = None) -> int:
        return len(self.select(op, ranks))

    def num_bytes(self, op: str | None = None, ranks: Sequence[int] | None = None) -> int:
        return sum(r.num_bytes for r in self.select(op, ranks))

    def reset(self) -> None:
        """Forget the records, not the groups."""
        self.records.clear()


class _CountingGroup:
    def __init__(
        self, inner: Group, number: int, ranks: tuple[int, ...], records: list[Record]
    ) -> None:
        self.inner, self.number, self.ranks, self.records = inner, number, ranks, records

    def _record(self, op: str, tensor: Tensor, peer: int | None = None) -> None:
        self.records.append(
            Record(
                op=op,
                group=self.number,
                ranks=self.ranks,
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                num_bytes=tensor.numel() * tensor.element_size(),
                peer=None if peer is None else self.ranks[peer],
            )
        )

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Work:
        self._record("all_reduce", tensor)
        return self.inner.all_reduce(tensor, op)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        self._record("all_gather", tensor)
        return self.inner.all_gather(output, tensor)

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        self._record("reduce_scatter", tensor)
        return self.inner.reduce_scatter(output, tensor)

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        self._record("broadcast", tensor, src)
        return self.inner.broadcast(tensor, src)

    def send(self, tensor: Tensor, dst: int) -> Work:
        self._record("send", tensor, dst)
        return self.inner.send(tensor, dst)

    def recv(self, tensor: Tensor, src: int) -> Work:
        self._record("recv", tensor, src)
        return self.inner.recv(tensor, src)
