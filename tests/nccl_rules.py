"""A transport between forked ranks that is as strict as NCCL, so that gloo's leniency shows.

- The device works behind the host's back (``tests.device_stream``), and so do messages:
  ``wait()`` stops the compute stream, not the host.
- A communicator does one operation after the other, in the order of issue, collectives and
  messages alike. A message needs both its ends at the head of their queues; there are no tags.
- A communicator's first operation blocks the host until every member has issued its own.
- Buffers belong to an operation from issue to ``wait()``: an operation of the device that writes
  them, or reads what will be written, raises. What will be written is poisoned at once, and
  delivered only by the wait. Every work is waited for before the rules end.

Ranks talk over Unix sockets in a folder that they share, and need no ``torch.distributed``.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.mesh import Group
from tests.device_stream import Borrowed, Device, Stream, overlap
from tests.switchboard import Switchboard


class RuleError(Exception):
    """A program that NCCL would hang on, or compute garbage with."""


class NcclRulesTransport:
    """A ``Transport`` over the ranks of one job.

    Args:
        folder: shared by the ranks of this job and by nothing else.
        timeout_s: of one operation, counted from the moment that only its peers are missing.
        lazy_init: false if communicators exist before their first use.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        folder: Path,
        timeout_s: float = 20.0,
        lazy_init: bool = True,
    ) -> None:
        self.rank, self.world_size, self.device = rank, world_size, torch.device("cpu")
        self.timeout_s, self.lazy_init = timeout_s, lazy_init
        self.compute = Device()
        self.groups: list[NcclRulesGroup] = []
        self.works: list[NcclWork] = []
        self._num_groups = 0
        self._switchboard = Switchboard(folder, rank, timeout_s, self.status)

    def new_group(self, ranks: Sequence[int]) -> Group | None:
        number, self._num_groups = self._num_groups, self._num_groups + 1
        if self.rank not in ranks:
            return None
        self.groups.append(NcclRulesGroup(self, number, tuple(ranks)))
        return self.groups[-1]

    def close_group(self, group: Group) -> None:
        assert isinstance(group, NcclRulesGroup)
        group.close()
        self.groups.remove(group)

    @contextmanager
    def device_rules(self, host_reads: int = 0) -> Iterator[None]:
        """A block in which the host runs ahead and may read ``host_reads`` values.

        Raises:
            HostReadError: at the first read too many.
            RuleError: at the end, for works that nothing waited for.
        """
        with self.compute.rules(host_reads):
            yield
        self._refuse_unwaited()

    def host_reads_allowed(self) -> Any:
        """A block in which a host read waits for the compute stream instead of raising."""
        return self.compute.host_reads_allowed()

    def synchronize(self) -> None:
        """Wait for all queues and deliver everything, as ``torch.cuda.synchronize`` does."""
        self.compute.stream.drain()
        for work in list(self.works):
            work.wait()
        self.compute.stream.drain()

    def close(self) -> None:
        self._refuse_unwaited()
        if self.groups:
            raise RuleError(f"{len(self.groups)} groups were left open: close what new_group made")
        self._switchboard.close()
        self.compute.stream.close()

    def status(self) -> str:
        """What each queue of this rank is at."""
        lines = [f"rank {self.rank}, {self.compute.stream}"]
        return "\n  ".join(lines + [str(group.stream) for group in self.groups])

    def everyones_status(self) -> str:
        return "\n".join(self._switchboard.ask(rank) for rank in range(self.world_size))

    def connect(self, group: int, peer: int) -> Connection | None:
        return self._switchboard.connect(group, peer)

    def _refuse_unwaited(self) -> None:
        if self.works:
            raise RuleError(f"nothing waited for {', '.join(w.what for w in self.works)}")


class NcclWork:
    """An operation in flight: ``source`` is what it reads, ``target`` what it will write."""

    def __init__(
        self, transport: NcclRulesTransport, what: str, source: Tensor | None, target: Tensor | None
    ) -> None:
        # Aliases of their own: autograd must not count what is done to them here.
        self.what, self._transport = what, transport
        self.source, self.target = (None if t is None else t.data for t in (source, target))
        self.given = None if self.source is None else self.source.clone()
        if self.target is not None:
            self.target.fill_(_poison(self.target.dtype))
        self.result: Tensor | None = None
        self.error: BaseException | None = None
        self.issued = transport.compute.stream.record()
        self.done = threading.Event()
        self._finished = False
        self._loans = [
            Borrowed(tensor, readable, what)
            for tensor, readable in ((self.source, True), (self.target, False))
            if tensor is not None
        ]
        transport.compute.borrowed += self._loans
        transport.works.append(self)

    def wait(self) -> None:
        """Let what the device does from now on see the result; does not block the host."""
        compute = self._transport.compute
        if self in self._transport.works:
            self._transport.works.remove(self)
            compute.borrowed = [loan for loan in compute.borrowed if loan not in self._loans]
        if compute.active:
            compute.stream.put(f"wait for {self.what}", self._finish)
        else:
            with torch.no_grad():
                self._finish()

    def _finish(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error
        if self._finished:
            return
        self._finished = True
        if self.source is not None and self.given is not None:
            in_place = self.target is not None and overlap(self.source, self.target)
            if not in_place and not _same_bytes(self.source, self.given):
                raise RuleError(f"{self.what}: its buffer was overwritten before wait()")
        if self.target is not None and self.result is not None:
            if not _same_bytes(
                self.target, torch.full_like(self.target, _poison(self.target.dtype))
            ):
                raise RuleError(f"{self.what}: its result's buffer was written before wait()")
            self.target.copy_(self.result.view(self.target.shape))
        self.given = self.result = None


class NcclRulesGroup:
    """A communicator: a queue, its thread, and a socket to each member that it talks to.

    In a collective every member talks to member 0, which compares, computes and answers.
    """

    def __init__(self, transport: NcclRulesTransport, number: int, ranks: tuple[int, ...]) -> None:
        self.transport, self.number, self.ranks = transport, number, ranks
        self.index = ranks.index(transport.rank)
        self.stream = Stream(f"group {number} of ranks {ranks}")
        self._links: dict[int, Connection] = {}
        self._error: BaseException | None = None
        self._ready = not transport.lazy_init

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> NcclWork:
        if op not in ("sum", "max"):
            raise ValueError(f"no reduction is called {op!r}")

        def center(parts: list[Tensor]) -> list[Tensor]:
            return [_reduced(parts, op)] * len(parts)

        return self._collective(f"all_reduce {op}", tensor, tensor, center)

    def all_gather(self, output: Tensor, tensor: Tensor) -> NcclWork:
        _check_ratio(output, tensor, len(self.ranks))

        def center(parts: list[Tensor]) -> list[Tensor]:
            return [torch.cat(parts)] * len(parts)

        return self._collective("all_gather", tensor, output, center)

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> NcclWork:
        _check_ratio(tensor, output, len(self.ranks))

        def center(parts: list[Tensor]) -> list[Tensor]:
            return list(_reduced(parts, "sum").chunk(len(parts)))

        return self._collective("reduce_scatter", tensor, output, center)

    def broadcast(self, tensor: Tensor, src: int) -> NcclWork:
        def center(parts: list[Tensor]) -> list[Tensor]:
            return [parts[src]] * len(parts)

        target = None if self.index == src else tensor
        return self._collective(f"broadcast from rank {self.ranks[src]}", tensor, target, center)

    def send(self, tensor: Tensor, dst: int) -> NcclWork:
        work = self._work(f"send to rank {self.ranks[dst]}", tensor, None)
        terms = ("message", self.ranks[self.index], *_terms(tensor))

        def run() -> None:
            assert work.given is not None
            self._meet(dst, work.what, terms)
            self._link(dst, work.what).send_bytes(_bytes(work.given))

        return self._issue(work, run)

    def recv(self, tensor: Tensor, src: int) -> NcclWork:
        work = self._work(f"recv from rank {self.ranks[src]}", None, tensor)
        terms = ("message", self.ranks[src], *_terms(tensor))

        def run() -> None:
            self._meet(src, work.what, terms)
            work.result = self._receive(src, work.what, tensor.dtype)

        return self._issue(work, run)

    def close(self) -> None:
        self.stream.close()
        for link in self._links.values():
            link.close()

    # --- issuing -------------------------------------------------------------------------------

    def _work(self, kind: str, source: Tensor | None, target: Tensor | None) -> NcclWork:
        shown = source if source is not None else target
        assert shown is not None
        for tensor in (source, target):
            if tensor is not None and not tensor.is_contiguous():
                raise RuleError(f"{kind}: NCCL takes contiguous tensors only")
        if shown.dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64):
            raise RuleError(f"{kind}: NCCL has no {shown.dtype}")
        what = f"{kind} of {_describe(shown)} in group {self.number} {self.ranks}"
        return NcclWork(self.transport, what, source, target)

    def _collective(
        self,
        kind: str,
        source: Tensor,
        target: Tensor | None,
        center: Callable[[list[Tensor]], list[Tensor]],
    ) -> NcclWork:
        work = self._work(kind, source, target)

        def run() -> None:
            assert work.given is not None
            self._gather_terms(work.what, (kind, *_terms(source)))
            work.result = self._through_center(work.given, work.what, center)

        return self._issue(work, run)

    def _issue(self, work: NcclWork, run: Callable[[], None]) -> NcclWork:
        if not self._ready:
            self._initialize()

        def perform() -> None:
            self.stream.doing = f"{work.what}, which the compute stream has not come to"
            work.issued.wait()
            self._error = self._error or self.transport.compute.stream.error
            self.stream.doing = work.what
            self._guarded(run, work)

        self.stream.put(work.what, perform)
        return work

    def _guarded(self, run: Callable[[], None], work: NcclWork) -> None:
        """One failure ends the communicator, and with it all that is queued behind."""
        try:
            if self._error is not None:
                raise self._error
            run()
        except BaseException as error:
            self._error = work.error = error
        finally:
            work.done.set()

    def _initialize(self) -> None:
        self._ready = True
        what = f"the host-blocking first use of group {self.number} {self.ranks}"
        event = threading.Event()

        def run() -> None:
            try:
                self._gather_terms(what, ("first use", self.ranks))
            except BaseException as error:
                self._error = error
            finally:
                event.set()

        self.stream.put(what, run)
        event.wait()
        if self._error is not None:
            raise self._error

    # --- talking, in the communicator's own thread ---------------------------------------------

    def _link(self, peer: int, what: str) -> Connection:
        if peer not in self._links:
            link = self.transport.connect(self.number, self.ranks[peer])
            if link is None:
                raise self._late(peer, what)
            self._links[peer] = link
        return self._links[peer]

    def _hear(self, peer: int, what: str) -> bytes:
        """The next word of a peer; it comes when the peer's queue has come to it."""
        link = self._link(peer, what)
        try:
            if link.poll(self.transport.timeout_s):
                return link.recv_bytes()
        except (EOFError, OSError):
            raise ConnectionError(f"Peer is gone: rank {self.ranks[peer]} during {what}") from None
        raise self._late(peer, what)

    def _late(self, peer: int, what: str) -> RuleError:
        return RuleError(
            f"{what} has waited {self.transport.timeout_s:g} s for rank {self.ranks[peer]}; "
            f"the ranks are at:\n{self.transport.everyones_status()}"
        )

    def _compare(self, peer: int, what: str, terms: tuple[object, ...]) -> None:
        theirs, their_what = pickle.loads(self._hear(peer, what))
        if theirs is None:
            raise RuleError(their_what)
        if theirs != terms:
            me, other = self.ranks[self.index], self.ranks[peer]
            raise RuleError(f"rank {me} is at {what}\nrank {other} is at {their_what}")

    def _meet(self, peer: int, what: str, terms: tuple[object, ...]) -> None:
        """Wait until ``peer`` is at this message, too."""
        self._link(peer, what).send_bytes(pickle.dumps((terms, what)))
        self._compare(peer, what, terms)

    def _gather_terms(self, what: str, terms: tuple[object, ...]) -> None:
        """Wait until every member is at this collective."""
        if self.index != 0:
            return self._meet(0, what, terms)
        answer: tuple[object, str] = (terms, what)
        try:
            for peer in range(1, len(self.ranks)):
                self._compare(peer, what, terms)
        except Exception as error:
            answer = (None, str(error))
            raise
        finally:
            for link in self._links.values():
                with suppress(OSError):
                    link.send_bytes(pickle.dumps(answer))

    def _through_center(
        self, mine: Tensor, what: str, center: Callable[[list[Tensor]], list[Tensor]]
    ) -> Tensor:
        mine = mine.reshape(-1)
        if self.index != 0:
            self._link(0, what).send_bytes(_bytes(mine))
            return self._receive(0, what, mine.dtype)
        others = range(1, len(self.ranks))
        answers = center([mine] + [self._receive(peer, what, mine.dtype) for peer in others])
        for peer in others:
            self._link(peer, what).send_bytes(_bytes(answers[peer]))
        return answers[0]

    def _receive(self, peer: int, what: str, dtype: torch.dtype) -> Tensor:
        data = bytearray(self._hear(peer, what))
        return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


# --- tensors -----------------------------------------------------------------------------------


def _poison(dtype: torch.dtype) -> float | int | bool:
    """A value that spoils whatever is computed from it."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _terms(tensor: Tensor) -> tuple[int, str]:
    """What the two ends of an operation must agree on; shapes may differ."""
    return tensor.numel(), str(tensor.dtype)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _check_ratio(whole: Tensor, part: Tensor, size: int) -> None:
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
        raise ValueError(f"{_describe(whole)} is not {size} times {_describe(part)}")


def _reduced(parts: list[Tensor], op: str) -> Tensor:
    """In the order of members, so that every rank sees the same rounding."""
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part if op == "sum" else torch.maximum(total, part)
    return total
