"""One clock for all ranks: marks on a device's stream, and how far hosts' clocks are apart."""

from __future__ import annotations

import hashlib
import os
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import torch

from megalite.mesh import Axis, Group
from megalite.trace import Clock, HostClock, Offset

_ROUNDS = 64


def clock_of(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock()


class CudaClock:
    """Marks are events on the current stream: nothing waits until they are read, steps later.

    Differences of events are exact to 0.5 us only over short times, so each reading is taken from
    a mark less than a second before it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._base, self._base_s = self._anchor()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def done(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def seconds(self, mark: torch.cuda.Event) -> float:
        mark.synchronize()
        at: float = self._base_s + self._base.elapsed_time(mark) / 1e3
        if at - self._base_s > 1.0:
            self._base, self._base_s = mark, at
        return at

    def drift(self) -> float:
        """How far marks have come to lie behind the host's clock since the start, seconds."""
        mark, now = self._anchor()
        return now - self.seconds(mark)

    def _anchor(self) -> tuple[torch.cuda.Event, float]:
        """An event on an idle device, and the host's time when it was recorded."""
        torch.cuda.synchronize(self.device)
        mark = self.mark()
        mark.synchronize()
        return mark, time.monotonic()


def host_id() -> int:
    """63 bits, equal where ``time.monotonic`` is one clock: one boot and one time namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        boot = f"{socket.gethostname()} {uuid.getnode()}"
    try:
        boot += os.readlink("/proc/self/ns/time")
    except OSError:
        pass
    digest = hashlib.sha256(boot.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def clock_offset(
    world: Axis,
    device: torch.device,
    *,
    host: int | None = None,
    now: Callable[[], float] = time.monotonic,
) -> Offset:
    """This rank's clock against that of rank 0; collective over ``world``.

    Ranks of rank 0's host read its clock. Of every other host the first rank answers with its
    clock to a number of messages from rank 0, one host after the other; the fastest of them tells
    most: the answer was given within that round trip. The others of that host take it over.

    Args:
        host, now: of this rank, in place of the real ones.
    """
    if world.group is None:
        return Offset(now())
    mine = torch.tensor([host_id() if host is None else host], device=device)
    hosts = mine.new_empty(world.size)
    world.all_gather(hosts, mine).wait()
    first: dict[int, int] = {}
    for rank, found in enumerate(hosts.tolist()):
        first.setdefault(found, rank)
    table = torch.zeros(world.size, 2, dtype=torch.float64, device=device)
    for leader in sorted(first.values())[1:]:
        if world.index == 0:
            measured = _ask(world.group, leader, device, now)
            table[leader] = torch.tensor(measured, dtype=table.dtype)
        elif world.index == leader:
            _answer(world.group, device, now)
    world.broadcast(table, 0).wait()
    leader = first[int(mine)]
    seconds, uncertainty = table[leader].tolist()
    return Offset(now(), seconds, uncertainty, leader == 0)


def _ask(
    group: Group, rank: int, device: torch.device, now: Callable[[], float]
) -> tuple[float, float]:
    """The other's clock minus this one, and half the shortest round trip."""
    word, best = torch.zeros(1, dtype=torch.float64, device=device), (0.0, float("inf"))
    for _ in range(_ROUNDS):
        begun = now()
        group.send(word, rank).wait()
        group.recv(word, rank).wait()
        theirs = word.item()
        ended = now()
        half = (ended - begun) / 2
        if half < best[1]:
            best = theirs - (begun + half), half
    return best


def _answer(group: Group, device: torch.device, now: Callable[[], float]) -> None:
    word = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(_ROUNDS):
        group.recv(word, 0).wait()
        word.item()  # waits for the device
        group.send(torch.tensor([now()], dtype=torch.float64, device=device), 0).wait()
