"""A request to a running job for another layout, and the job's answer: two files in its run.dir."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.files import write_whole

REQUEST, ANSWER = "reconfigure.request.json", "reconfigure.answer.json"
_POLL_S = 0.1


@dataclass(frozen=True)
class Request:
    """``values`` are fields of ``parallel`` as the text of a flag."""

    id: str
    values: dict[str, str]


@dataclass(frozen=True)
class Answer:
    """What the job said of a request; ``done`` if its layout is now the one asked for."""

    id: str
    done: bool
    text: str


def ask(run_dir: Path, values: Mapping[str, str]) -> Request:
    """Write a request; one that was not read yet is replaced."""
    request = Request(uuid.uuid4().hex, dict(values))
    document = {"id": request.id, "parallel": request.values}
    write_whole(run_dir / REQUEST, json.dumps(document).encode())
    return request


def wait_for_answer(run_dir: Path, request: Request, wait_s: float) -> Answer | None:
    """The answer to a request, if it comes in time."""
    give_up = time.monotonic() + wait_s
    while True:
        found = _read(run_dir / ANSWER)
        if found.get("id") == request.id:
            return Answer(request.id, bool(found.get("done")), str(found.get("text")))
        if time.monotonic() >= give_up:
            return None
        time.sleep(_POLL_S)


class Mailbox:
    """The job's end; only one rank has one that is open.

    A request from before the job began is thrown away: nobody waits for it any more.
    """

    def __init__(self, run_dir: Path, is_open: bool) -> None:
        self._request, self._answer = run_dir / REQUEST, run_dir / ANSWER
        self._open = is_open
        if is_open:
            self._request.unlink(missing_ok=True)

    def is_full(self) -> bool:
        """Whether there is a request; one look at the directory."""
        return self._open and self._request.exists()

    def take(self) -> str:
        """The request as text for ``parse``, empty if there is none; it is gone then."""
        if not self._open:
            return ""
        found = _read(self._request)
        self._request.unlink(missing_ok=True)
        return json.dumps(found) if found else ""

    def answer(self, request: Request, done: bool, text: str) -> None:
        """Tell who asked. A full disk only costs the answer."""
        if self._open:
            document = {"id": request.id, "done": done, "text": text}
            with suppress(OSError):
                write_whole(self._answer, json.dumps(document).encode())

    def close(self) -> None:
        """The run ends: what was not read yet is answered."""
        if self.is_full() and (request := parse(self.take())):
            self.answer(request, False, "the run has ended")
        self._open = False


def parse(text: str) -> Request | None:
    """The request that ``Mailbox.take`` gave, if it is one."""
    found: Any = json.loads(text) if text else {}
    values = found.get("parallel")
    if not isinstance(values, dict):
        return None
    return Request(str(found.get("id")), {str(k): str(v) for k, v in values.items()})


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
