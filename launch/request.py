"""A request to a running job for another layout, and the job's answer: files in its run.dir.

A request survives the job's restarts. It is renamed when it is taken, and removed once it is
refused or a checkpoint has the new layout: one that a failure cut off, or took back, is found at
the next start and taken once more. Cut off a second time it is dropped, for it may be the cause.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.files import write_whole

REQUEST, ANSWER = "reconfigure.request.json", "reconfigure.answer.json"
TAKEN, AGAIN = "reconfigure.taken", "reconfigure.again"
"""Of a request that was taken once, or twice; its number and ``.json`` follow."""
KEPT_S = 600.0
"""A request older than this at a start of the job is dropped: whoever made it has given up."""
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

    Args:
        has: whether the job is in a layout with these fields already.
    Attributes:
        dropped: what is said of requests that were found at the start and are not carried out.
    """

    def __init__(
        self,
        run_dir: Path,
        is_open: bool,
        has: Callable[[Mapping[str, str]], bool] = lambda values: False,
    ) -> None:
        self._request, self._answer = run_dir / REQUEST, run_dir / ANSWER
        self._open = is_open
        self._left: list[Path] = []  # of failures of the job, oldest first
        self._taken: dict[str, Path] = {}  # by this process, and in no checkpoint yet
        self.dropped: list[str] = []
        if is_open:
            self._find_left(run_dir, has)

    def is_full(self) -> bool:
        """Whether there is a request; one look at the directory."""
        return self._open and (bool(self._left) or self._request.exists())

    def take(self) -> str:
        """The request as text for ``parse``, empty if there is none."""
        if not self._open:
            return ""
        source, kind, number = self._request, TAKEN, f"{time.time_ns()}"
        if self._left:
            source = self._left.pop(0)
            kind, number = AGAIN, _number(source)
        target = source.with_name(f"{kind}.{number}.json")
        with suppress(OSError):
            source.rename(target)
            text = json.dumps(_read(target))
            if request := parse(text):
                self._taken[request.id] = target
                return text
            target.unlink()
        return ""

    def answer(self, request: Request, done: bool, text: str) -> None:
        """Tell who asked. A full disk only costs the answer."""
        if self._open:
            document = {"id": request.id, "done": done, "text": text}
            with suppress(OSError):
                write_whole(self._answer, json.dumps(document).encode())
            if not done and request.id in self._taken:
                self._taken.pop(request.id).unlink(missing_ok=True)

    def settle(self) -> None:
        """A checkpoint has the layout: what was taken is not to be taken again."""
        for path in self._taken.values():
            path.unlink(missing_ok=True)
        self._taken.clear()

    def close(self) -> None:
        """The run ends: what was not read yet is answered."""
        while self.is_full() and (request := parse(self.take())):
            self.answer(request, False, "the run has ended")
        self.settle()
        self._open = False

    def _find_left(self, run_dir: Path, has: Callable[[Mapping[str, str]], bool]) -> None:
        """What a job before this one has taken and a failure took back; newest first, for with a
        layout that the job has those before it were carried out, too."""
        done = False
        for path in sorted(run_dir.glob("reconfigure.[at][ag]*.*.json"), key=_number, reverse=True):
            request = parse(json.dumps(_read(path)))
            if request and not done and has(request.values):
                self.answer(request, True, "the job was restarted in this layout")
                done = True
            if done or not request:
                path.unlink(missing_ok=True)
            elif path.name.startswith(AGAIN):
                self._drop(path, request, "was cut off twice by failures of the job")
            elif not self._drop_old(path, request):
                self._left.insert(0, path)
        if request := parse(json.dumps(_read(self._request))):
            self._drop_old(self._request, request)

    def _drop_old(self, path: Path, request: Request) -> bool:
        old = time.time() - path.stat().st_mtime > KEPT_S
        if old:
            self._drop(path, request, f"was older than {KEPT_S:g} s when the job started")
        return old

    def _drop(self, path: Path, request: Request, why: str) -> None:
        values = ", ".join(f"{name}={value}" for name, value in request.values.items())
        self.dropped.append(f"a request for {values} {why}: it is dropped")
        self.answer(request, False, self.dropped[-1])
        path.unlink(missing_ok=True)


def _number(path: Path) -> str:
    """Of a request that was taken: when, in nanoseconds."""
    return path.name.split(".")[2]


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
