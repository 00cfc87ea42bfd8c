"""Connections between the processes of a job, over Unix sockets in a folder that they share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path


class Switchboard:
    """Connects the communicators of ranks, and tells other ranks what this one is at."""

    def __init__(
        self, folder: Path, rank: int, timeout_s: float, status: Callable[[], str]
    ) -> None:
        self._folder, self._rank, self._timeout_s, self._status = folder, rank, timeout_s, status
        self._arrived: dict[tuple[int, int], Connection] = {}
        self._changed = threading.Condition()
        self._listener = Listener(self._address(rank), "AF_UNIX", backlog=128)
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def _address(self, rank: int) -> str:
        return str(self._folder / f"socket{rank}")

    def _answer(self) -> None:
        while (connection := self._listener.accept()) is not None:
            match connection.recv():
                case ("status",):
                    connection.send(self._status())
                case ("group", int(number), int(rank)):
                    with self._changed:
                        self._arrived[number, rank] = connection
                        self._changed.notify_all()
                case ("end",):
                    return

    def _call(self, rank: int) -> Connection | None:
        """A connection to a rank, which may have yet to start."""
        give_up = time.monotonic() + self._timeout_s
        while time.monotonic() < give_up:
            with suppress(FileNotFoundError, ConnectionRefusedError):
                return Client(self._address(rank), "AF_UNIX")
            time.sleep(0.005)
        return None

    def connect(self, group: int, peer: int) -> Connection | None:
        """The connection for a communicator to a peer; None if that does not come in time."""
        if self._rank < peer:
            connection = self._call(peer)
            if connection is not None:
                connection.send(("group", group, self._rank))
            return connection
        with self._changed:
            self._changed.wait_for(lambda: (group, peer) in self._arrived, self._timeout_s)
            return self._arrived.pop((group, peer), None)

    def ask(self, rank: int) -> str:
        """What a rank is at."""
        if rank == self._rank:
            return self._status()
        try:
            with Client(self._address(rank), "AF_UNIX") as connection:
                connection.send(("status",))
                return str(connection.recv()) if connection.poll(2.0) else f"rank {rank}: no answer"
        except (OSError, EOFError):
            return f"rank {rank} is gone"

    def close(self) -> None:
        with Client(self._address(self._rank), "AF_UNIX") as connection:
            connection.send(("end",))
        self._thread.join()
        self._listener.close()
