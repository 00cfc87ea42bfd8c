"""A transport whose messages can be made to end for good before a rank goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from megalite.mesh import Group, TorchTransport, Work


class Settled:
    """Waits a moment before and after the end of each message while ``pause_s`` is above 0.

    A transport's thread holds a message until it has ended, and may be the last to do so: the
    profiler, which sees what this thread frees, would count it until the end.
    """

    def __init__(self, transport: TorchTransport) -> None:
        self.inner, self.pause_s = transport, 0.0
        self.rank, self.world_size = transport.rank, transport.world_size
        self.device = transport.device

    def new_group(self, ranks: Sequence[int]) -> Group | None:
        made = self.inner.new_group(ranks)
        group: Any = _Group(made, self) if made is not None else None
        return group  # type: ignore[no-any-return]

    def close_group(self, group: Any) -> None:
        self.inner.close_group(group.inner)


class _Group:
    def __init__(self, inner: Group, owner: Settled) -> None:
        self.inner, self.owner = inner, owner

    def __getattr__(self, name: str) -> Callable[..., Work]:
        start = getattr(self.inner, name)
        return lambda *args, **options: _Work(start(*args, **options), self.owner)


class _Work:
    def __init__(self, work: Work, owner: Settled) -> None:
        self.work: Work | None = work
        self.owner = owner

    def wait(self) -> None:
        if self.work is not None:
            self._pause()
            self.work.wait()
            self.work = None
            self._pause()

    def _pause(self) -> None:
        if self.owner.pause_s:
            time.sleep(self.owner.pause_s)
