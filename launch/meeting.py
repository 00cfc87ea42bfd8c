"""Where the launchers of a job's nodes meet: a rendezvous for torch's elastic agent.

One node hosts a store and has the ``Leader``; each node has a thread that says that it lives and
reads what the leader decided. The main thread of a launcher never waits for the network itself: a
host that is gone without a word would block it for good. torch's own rendezvous is not used: with
it survivors of a lost node wait for its last call, and their workers read addresses of the dead.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from launch.leader import Leader, Limits, Plan
from megalite.errors import ConfigError

IDLE_S, BUSY_S = 0.05, 0.005


class Ended(Exception):
    """The job is over for all nodes: its exit code and last words."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code, self.text = code, text


@dataclass(frozen=True)
class Place:
    """Where a job meets and who this node is. ``name`` is the same after a restart of the node."""

    host: str
    port: int
    hosts: bool
    run_id: str
    name: str
    order: int
    num_workers: int
    limits: Limits


class Meeting(RendezvousHandler):
    """A node's part in the rounds of a job. Raises ``Ended`` where a round is waited for in vain.

    ``stops``: whether this node was asked to stop the job.

    Attributes:
        why: the failure of this node's workers after which it arrives anew; empty: there was none.
    """

    def __init__(self, place: Place, stops: Callable[[], bool] = lambda: False) -> None:
        self.why = ""
        self._place, self._stops = place, stops
        self._joined = Plan()
        self._slot: int | None = -1
        self._wake = threading.Event()
        self._host: _Host | None = None
        if place.hosts:
            self._host = _Host(place, self._wake)
            self._place = replace(place, port=self._host.port)
            self._host.start()
        self._line = self._call()

    @property
    def place(self) -> Place:
        return self._place

    @property
    def plan(self) -> Plan:
        """The newest that is known."""
        return self._line.plan

    @property
    def joined(self) -> Plan:
        """The plan of the round in which this node trains."""
        return self._joined

    @property
    def first_rank(self) -> int:
        index = self._joined.index(self._slot)
        assert index is not None
        return self._joined.members[index].first_rank

    @property
    def broken(self) -> bool:
        """Whether this node's round is over: it must stop its workers and arrive anew."""
        plan = self._line.plan
        gone = self._line.silent_s > self._place.limits.lost_s or self._line.slot != self._slot
        return gone or bool(plan.ended) or plan.regroup == "hard" or plan.round > self._joined.round

    def goes_on(self, patience_s: float = 2.0) -> bool:
        """Whether workers that stopped without this node's wish did so to let a node in."""
        deadline = time.monotonic() + patience_s
        while self._line.connected and time.monotonic() < deadline:
            plan = self._line.plan
            if plan.exits or plan.ended or plan.regroup:
                return not (plan.exits or plan.ended)
            time.sleep(BUSY_S)
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        limits = self._place.limits
        if self._line.silent_s > limits.lost_s:
            self._line.hang_up()
            self._line = self._call()
        self._line.arrive(self.why)
        self.why = ""
        began = time.monotonic()
        while True:
            line, plan, slot = self._line, self._line.plan, self._line.slot
            if plan.ended:
                raise Ended(*plan.ended)
            index = plan.index(slot)
            if index is not None:
                break
            if not line.connected and self._stops():
                raise Ended(75, "")
            if not line.connected and time.monotonic() - began > limits.join_s:
                place = f"{self._place.host}:{self._place.port}"
                raise RendezvousTimeoutError(f"nobody answers at {place}, where the job meets")
            line.changed.wait(BUSY_S)
            line.changed.clear()
        line.train()
        self._joined, self._slot = plan, slot
        meets = RendezvousStoreInfo(self._place.host, self._place.port)
        # The agent asks for a store, which the ranks that the leader gave leave it no use for.
        return RendezvousInfo(HashStore(), index, len(plan.members), meets)

    def leave(self, code: int, text: str, patience_s: float = 10.0) -> None:
        """Say how this node ends; the host stays until the others have heard it."""
        self._line.leave(code, text)
        deadline = time.monotonic() + patience_s
        while not self._line.has_left and time.monotonic() < deadline - patience_s / 2:
            time.sleep(BUSY_S)
        if self._host is not None:
            self._host.finish(deadline)
        self._line.hang_up()

    def _call(self) -> _Line:
        line = _Line(self._place, self._wake, self._stops)
        line.start()
        return line

    # What torch's agent asks for besides.

    def get_backend(self) -> str:
        return "megalite"

    @property
    def use_agent_store(self) -> bool:
        return True

    def num_nodes_waiting(self) -> int:
        return int(self.broken)

    def is_closed(self) -> bool:
        return self.plan.ended is not None

    def set_closed(self) -> None:
        pass

    def get_run_id(self) -> str:
        return self._place.run_id

    def shutdown(self) -> bool:
        return True


class _Line(threading.Thread):
    """A node's connection to the leader; calls again whenever it breaks."""

    def __init__(self, place: Place, wake: threading.Event, stops: Callable[[], bool]) -> None:
        super().__init__(name="meeting", daemon=True)
        self._place, self._wake, self._stops = place, wake, stops
        self._poke = threading.Event()
        self._arrives = self._trains = self._closed = False
        self._left: tuple[int, str] | None = None
        self._why = ""
        self._beats, self._heard = 0, time.monotonic()
        self.plan = Plan()
        self.slot: int | None = None
        self.changed = threading.Event()
        self.connected = self.has_left = False

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._heard

    def arrive(self, why: str) -> None:
        """Wait for a round, in a slot of its own."""
        self._why = why
        self.slot, self._trains, self._arrives = None, False, True
        self._poke.set()

    def train(self) -> None:
        """The round that was waited for has begun."""
        self._trains = True

    def leave(self, code: int, text: str) -> None:
        self._left = code, text
        self._poke.set()

    def hang_up(self) -> None:
        self._closed = True

    def run(self) -> None:
        while not self._closed:
            try:
                self._talk(_connect(self._place, False))
            except (RuntimeError, ConnectionError):  # torch's errors of networks are the first
                # Another leader will know nothing of this node: who waits must arrive again.
                self.connected, self.slot = False, None
                self._arrives = not self._trains
                time.sleep(0.1)

    def _talk(self, store: Store) -> None:
        self.connected = True
        while not self._closed:
            if self._arrives:
                self._arrives = False
                self.slot = self._register(store)
                self._wake.set()
            elif self.slot is not None:
                leaves = self._left is not None
                store.set(f"beat/{self.slot}", self._beat())
                self.has_left = leaves
            if store.check(["plan"]):
                plan = Plan.from_json(store.get("plan"))
                if plan != self.plan:
                    self.plan = plan
                    self.changed.set()
            self._heard = time.monotonic()
            self._poke.wait(IDLE_S if self._trains else BUSY_S)
            self._poke.clear()

    def _register(self, store: Store) -> int:
        slot = int(store.add("slots", 1))
        told = {name: getattr(self._place, name) for name in ("name", "order", "num_workers")}
        told["why"] = self._why
        store.set(f"beat/{slot}", self._beat())
        store.set(f"node/{slot}", json.dumps(told))
        return slot

    def _beat(self) -> str:
        self._beats += 1
        return json.dumps({"n": self._beats, "stops": self._stops(), "left": self._left})


class _Host(threading.Thread):
    """The leader's thread, and the store in which all of the job is said."""

    def __init__(self, place: Place, wake: threading.Event) -> None:
        super().__init__(name="leader", daemon=True)
        self._wake, self._leader, self._seen = wake, Leader(place.limits), 0
        self._finish_by: float | None = None
        self._server = _serve(place)
        self.port = self._server.port
        self._store = _connect(replace(place, port=self.port), True)

    def finish(self, deadline: float) -> None:
        """Return when the other nodes know the end, or at ``deadline``."""
        self._finish_by = deadline
        self._wake.set()
        self.join(max(0.0, deadline + 1.0 - time.monotonic()))

    def run(self) -> None:
        said = Plan()
        self._store.set("plan", said.to_json())
        while True:
            now = time.monotonic()
            self._listen(now)
            plan = self._leader.decide(now)
            if plan != said:
                self._store.set("plan", plan.to_json())
                said = plan
            if self._finish_by is not None and (
                now > self._finish_by or self._leader.all_left or self._leader.is_quiet(now, 2.0)
            ):
                return
            waits = self._leader.plan.round == 0 or plan.regroup or self._finish_by
            self._wake.wait(BUSY_S if waits else IDLE_S)
            self._wake.clear()

    def _listen(self, now: float) -> None:
        while self._store.check([f"node/{self._seen + 1}"]):
            self._seen += 1
            told = json.loads(self._store.get(f"node/{self._seen}"))
            self._leader.arrive(self._seen, told, now)
        slots = self._leader.slots
        beats = self._store.multi_get([f"beat/{slot}" for slot in slots]) if slots else []
        for slot, beat in zip(slots, beats, strict=True):
            self._leader.hear(slot, beat.decode(), now)


def _serve(place: Place) -> TCPStore:
    limit = timedelta(seconds=60)
    try:
        return TCPStore(
            place.host, place.port, is_master=True, wait_for_workers=False, timeout=limit
        )
    except RuntimeError as error:
        raise ConfigError(
            "--master-port",
            f"cannot listen on port {place.port} of this node: {error}",
            "Name a free one on every node",
        ) from error


def _connect(place: Place, local: bool) -> Store:
    """A connection of its own: what one thread waits for must not block another."""
    store = TCPStore(
        "127.0.0.1" if local else place.host,
        place.port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=5),
    )
    return PrefixStore(f"meeting/{place.run_id}", store)
