"""Weights & Biases beside a run: it may fail, block or be absent, and training never notices.

Every call of wandb is made by one daemon thread, which a bounded queue feeds; wandb is imported
there, too. The axis is our own ``step``: wandb drops points whose own counter steps back, and an
offline run that is taken up again counts from 0. Steps that a restart repeats stand twice in wandb;
``metrics.jsonl`` has each once.
"""

from __future__ import annotations

import configparser
import importlib
import netrc
import os
import re
import signal
import sys
import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

QUEUE_LENGTH = 10_000
INIT_S = 30.0
FINISH_S = 10.0

_REACH = {"disabled": 0, "offline": 1, "online": 2}


def resolve_mode(wanted: str, env: Mapping[str, str]) -> tuple[str, str]:
    """What a run may do: ``(mode, warning)``; mode is online, offline or disabled.

    ``wanted`` is ``run.wandb``. ``auto`` is online with a key and offline without. ``WANDB_MODE``
    decides in place of ``auto`` and can otherwise only take away: nothing leaves the machine unless
    both allow it. wandb is never asked to go online without a key, since it would ask for one.
    """
    named = {"dryrun": "offline", "shared": "online"}.get(env.get("WANDB_MODE", ""))
    named = named or env.get("WANDB_MODE", "")
    modes = [mode for mode in (wanted, named) if mode in _REACH]
    mode = min(modes, key=_REACH.__getitem__, default="auto")
    if mode in ("disabled", "offline") or has_key(env):
        return ("online" if mode == "auto" else mode), ""
    warning = "online was asked for but there is no key (wandb login, or WANDB_API_KEY); offline"
    return "offline", (warning if mode == "online" else "")


def has_key(env: Mapping[str, str]) -> bool:
    """Whether wandb would find credentials for its server without asking."""
    if env.get("WANDB_API_KEY") or env.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    home = Path(env.get("HOME", "~")).expanduser()
    settings = configparser.ConfigParser(interpolation=None)
    with suppress(OSError, configparser.Error, UnicodeDecodeError):
        folder = env.get("WANDB_CONFIG_DIR") or home / ".config" / "wandb"
        settings.read(Path(folder).expanduser() / "settings")
    stored = settings["default"] if settings.has_section("default") else {}
    if stored.get("api_key"):
        return True
    url = env.get("WANDB_BASE_URL") or stored.get("base_url") or "https://api.wandb.ai"
    files = [env["NETRC"]] if env.get("NETRC") else [home / ".netrc", home / "_netrc"]
    for file in files:
        with suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            entry = netrc.netrc(Path(file).expanduser()).authenticators(urlsplit(url).netloc)
            return bool(entry and entry[2])
    return False


class Tracker:
    """One run in wandb. World rank 0 makes it; other ranks pass the mode ``disabled``.

    Args:
        run_dir: holds the id, so that a restart continues the same run, and the offline files.
        name: shown in wandb; empty: the name of ``run_dir``.
        mode: ``run.wandb``: auto, online, offline or disabled.
        config: the settings of the run, plain values.
    """

    def __init__(
        self,
        run_dir: str | Path,
        name: str,
        mode: str,
        config: Mapping[str, Any],
        *,
        queue_length: int = QUEUE_LENGTH,
        init_s: float = INIT_S,
        finish_s: float = FINISH_S,
    ) -> None:
        self.mode, warning = resolve_mode(mode, os.environ)
        self.dropped = 0
        self._dir, self._config = Path(run_dir), dict(config)
        self._name = name or self._dir.resolve().name
        self._init_s, self._finish_s = init_s, finish_s
        self._waiting: deque[dict[str, Any]] = deque(maxlen=queue_length)
        self._changed = threading.Condition()
        self._ending, self._abandoned, self._exit_code = False, False, 0
        self._warned: set[str] = set()
        self._attached: Callable[[], Path] | None = None
        self._thread: threading.Thread | None = None
        if self.mode == "disabled":
            return
        # Before the thread starts: wandb reads both while it is imported.
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        if warning:
            self._warn(warning)
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Hand one step's values over; never waits. If wandb is slow, the oldest are dropped."""
        if self.mode == "disabled":
            return
        with self._changed:
            self.dropped += len(self._waiting) == self._waiting.maxlen
            self._waiting.append({"step": step, **values})
            self._changed.notify()

    def attach(self, make: Callable[[], Path]) -> None:
        """Keep a file with the run, made by ``make`` in tracking's own thread when the run ends."""
        self._attached = make

    def finish(self, exit_code: int = 0) -> None:
        """Send what is waiting and end the run, within ``finish_s``; then wandb is left alone."""
        if self._thread is None:
            return
        with self._changed:
            self._ending, self._exit_code = True, exit_code
            self._changed.notify()
        self._thread.join(self._finish_s)
        if self._thread.is_alive():
            self._warn(f"not done within {self._finish_s:g} s; wandb sync can send the rest later")
            self._abandoned = True
            _kill_service()
            self._thread.join(1.0)
        elif self.dropped and self.mode != "disabled":
            self._warn(f"{self.dropped} records were dropped; metrics.jsonl has them all")
        self._thread = None

    def _work(self) -> None:
        try:
            run = self._start()
            if run is not None:
                self._feed(run)
                self._attach(run)
                run.finish(exit_code=self._exit_code)
        except BaseException as error:  # here and below: nobody else's thread ends by it
            self._warn("the run could not be ended", error)
        finally:
            _teardown()

    def _start(self) -> Any:
        """A run in the resolved mode, else offline, else None."""
        for mode in dict.fromkeys((self.mode, "offline")):
            try:
                wandb: Any = importlib.import_module("wandb")
                if self._abandoned:
                    break
                run = wandb.init(
                    project=os.environ.get("WANDB_PROJECT", "megalite"),
                    dir=str(self._dir),
                    id=self._run_id(),
                    name=self._name,
                    config=self._config,
                    mode=mode,
                    resume="allow" if mode == "online" else None,
                    settings={
                        "silent": True,
                        "console": "off",
                        "init_timeout": self._init_s,
                        "finish_timeout": 0.8 * self._finish_s,
                    },
                )
                self.mode = mode
                return run
            except BaseException as error:
                if self._abandoned:
                    break
                _teardown()
                end = "offline" if mode == "online" else "off"
                self._warn(f"no run could be started, tracking goes {end}", error)
        self.mode = "disabled"
        return None

    def _run_id(self) -> str:
        path = self._dir / "wandb_id"
        with suppress(FileNotFoundError):
            if found := path.read_text().strip():
                return found
        self._dir.mkdir(parents=True, exist_ok=True)
        made = uuid.uuid4().hex[:12]
        aside = path.with_suffix(".new")
        aside.write_text(made + "\n")
        aside.replace(path)
        return made

    def _feed(self, run: Any) -> None:
        try:
            run.define_metric("step", hidden=True)
            run.define_metric("*", step_metric="step")
        except BaseException as error:
            self._warn("the step is not its axis", error)
        while (values := self._take()) is not None:
            try:
                run.log(values)
            except BaseException as error:
                self._warn("some records were refused; metrics.jsonl has them all", error)

    def _attach(self, run: Any) -> None:
        if self._attached is None or self._abandoned:
            return
        try:
            path = self._attached().resolve()
            run.save(str(path), base_path=str(path.parent), policy="now")
        except BaseException as error:
            self._warn("the report is not among its files", error)

    def _take(self) -> dict[str, Any] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ending)
            return self._waiting.popleft() if self._waiting else None

    def _warn(self, text: str, error: BaseException | None = None) -> None:
        """One line, once for each text, without anything secret."""
        if text in self._warned:
            return
        self._warned.add(text)
        if error is not None:
            text += f": {type(error).__name__} {' '.join(str(error).split())}"
        key = os.environ.get("WANDB_API_KEY")
        text = text.replace(key, "***") if key else text
        text = re.sub(r"//[^/@\s]+@", "//***@", text)[:300]
        with suppress(OSError, ValueError):
            print(f"wandb: {text}", file=sys.stderr, flush=True)


def _teardown() -> None:
    """End wandb's own process and threads; a run that failed would block the next of its id."""
    with suppress(Exception, SystemExit):
        sys.modules["wandb"].teardown()


def _kill_service() -> None:
    """End the process that wandb started, for which its exit hook would wait for minutes."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            pid, rest = stat.read_text().split(" (", 1)
            name, fields = rest.rsplit(") ", 1)
            if name == "wandb-core" and int(fields.split()[1]) == os.getpid():
                os.kill(int(pid), signal.SIGKILL)
