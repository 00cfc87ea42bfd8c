"""wandb beside a run: whatever it does, the run goes on, and nobody is asked for a key."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from launch.tracking import Tracker, has_key, resolve_mode

ROOT = Path(__file__).parents[2]


class StubRun:
    """A run by wandb's rule: a point below the newest own step is dropped."""

    def __init__(self, stub: StubWandb) -> None:
        self.stub, self.next_step = stub, stub.steps

    def define_metric(self, name: str, **kwargs: Any) -> None:
        self.stub.calls.append(("define_metric", name, kwargs))

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        self.stub.on_log(values)
        step = self.next_step if step is None else step
        if step >= self.next_step:
            self.stub.points.append(dict(values))
            self.next_step = self.stub.steps = step + 1

    def save(self, path: str, base_path: str, policy: str) -> None:
        self.stub.threads.add(threading.current_thread().name)
        self.stub.calls.append(("save", path, base_path, policy))

    def finish(self, exit_code: int | None = None) -> None:
        self.stub.on_finish()
        self.stub.calls.append(("finish", exit_code))


class StubWandb:
    """Stands in for the module; ``on_...`` are called in its calls and may raise or block."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.points: list[dict[str, Any]] = []
        self.steps = 0
        self.threads: set[str] = set()
        self.on_init: Callable[[Mapping[str, Any]], None] = lambda kwargs: None
        self.on_log: Callable[[Mapping[str, Any]], None] = lambda values: None
        self.on_finish: Callable[[], None] = lambda: None

    def init(self, **kwargs: Any) -> StubRun:
        self.threads.add(threading.current_thread().name)
        self.calls.append(("init", kwargs))
        self.on_init(kwargs)
        return StubRun(self)

    def teardown(self) -> None:
        self.calls.append(("teardown",))

    def inits(self) -> list[dict[str, Any]]:
        return [call[1] for call in self.calls if call[0] == "init"]


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No key, no wandb settings; after the test, no thread of ours."""
    for name in [*os.environ, "WANDB_SILENT", "WANDB_ERROR_REPORTING", "NETRC"]:
        if name.startswith("WANDB_") or name == "NETRC":
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield
    assert [t.name for t in threading.enumerate() if t.name == "tracking"] == []


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubWandb:
    made = StubWandb()
    monkeypatch.setitem(sys.modules, "wandb", made)
    return made


def fail(*args: Any) -> None:
    raise RuntimeError("down: http://user:hunter2@host/ key-of-mine\nsecond line")


def steps_of(stub: StubWandb) -> list[int]:
    return [point["step"] for point in stub.points]


KEY = {"WANDB_API_KEY": "k"}


@pytest.mark.parametrize(
    ("wanted", "env", "mode", "warns"),
    [
        ("disabled", KEY, "disabled", False),
        ("disabled", {"WANDB_MODE": "online", **KEY}, "disabled", False),
        ("offline", KEY, "offline", False),
        ("offline", {"WANDB_MODE": "online", **KEY}, "offline", False),
        ("online", KEY, "online", False),
        ("online", {}, "offline", True),
        ("online", {"WANDB_MODE": "offline", **KEY}, "offline", False),
        ("online", {"WANDB_MODE": "disabled", **KEY}, "disabled", False),
        ("auto", {}, "offline", False),
        ("auto", KEY, "online", False),
        ("auto", {"WANDB_MODE": "dryrun", **KEY}, "offline", False),
        ("auto", {"WANDB_MODE": "disabled", **KEY}, "disabled", False),
        ("auto", {"WANDB_MODE": "online"}, "offline", True),
        ("auto", {"WANDB_MODE": "nonsense", **KEY}, "online", False),
    ],
)
def test_the_mode_follows_settings_environment_and_key(
    wanted: str, env: dict[str, str], mode: str, warns: bool, tmp_path: Path
) -> None:
    found, warning = resolve_mode(wanted, {"HOME": str(tmp_path), **env})
    assert (found, bool(warning)) == (mode, warns)


@pytest.mark.parametrize(
    ("env", "machine", "expected"),
    [
        ({}, "api.wandb.ai", True),
        ({}, "example.com", False),
        ({"WANDB_BASE_URL": "http://example.com:8080"}, "example.com:8080", True),
        ({"WANDB_BASE_URL": "http://example.com"}, "api.wandb.ai", False),
        ({"NETRC": "/nowhere/netrc"}, "api.wandb.ai", False),
    ],
)
def test_a_key_is_found_in_netrc_for_its_host_only(
    env: dict[str, str], machine: str, expected: bool, tmp_path: Path
) -> None:
    netrc = tmp_path / ".netrc"
    netrc.write_text(f"machine {machine}\n  login user\n  password secret\n")
    netrc.chmod(0o600)
    assert has_key({"HOME": str(tmp_path), **env}) is expected


def test_a_key_or_host_is_found_in_the_settings_of_wandb(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "WANDB_CONFIG_DIR": str(tmp_path)}
    assert not has_key(env)
    (tmp_path / "settings").write_text("[default]\nbase_url = http://example.com\n")
    (tmp_path / ".netrc").write_text("machine example.com login user password 100%secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert has_key(env)
    (tmp_path / "settings").write_text("no section\n")
    assert not has_key(env)
    (tmp_path / "settings").write_text("[default]\napi_key = 100%secret\n")
    assert has_key(env)


def test_disabled_imports_nothing_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    before = threading.enumerate()
    tracker = Tracker(tmp_path / "run", "", "disabled", {})
    tracker.log(1, {"loss": 1.0})
    tracker.finish()
    assert "wandb" not in sys.modules
    assert threading.enumerate() == before
    assert not (tmp_path / "run").exists()


def test_values_reach_wandb_in_order_with_our_step_as_their_axis(
    stub: StubWandb, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker(tmp_path / "a run", "", "auto", {"model": {"num_layers": 2}})
    for step in (10, 20, 30):
        tracker.log(step, {"loss": 1 / step})
    tracker.finish(exit_code=75)
    assert stub.points == [{"step": s, "loss": 1 / s} for s in (10, 20, 30)]
    assert ("define_metric", "*", {"step_metric": "step"}) in stub.calls
    assert stub.calls[-2:] == [("finish", 75), ("teardown",)]
    assert stub.threads == {"tracking"}
    (init,) = stub.inits()
    assert init["mode"] == "offline" and init["name"] == "a run"
    assert init["dir"] == str(tmp_path / "a run")
    assert init["config"] == {"model": {"num_layers": 2}}
    assert capfd.readouterr() == ("", "")


def page_in(folder: Path) -> Callable[[], Path]:
    def make() -> Path:
        (folder / "report.html").write_text("<!doctype html>")
        return folder / "report.html"

    return make


def test_the_page_is_made_and_kept_in_trackings_own_thread_before_the_end(
    stub: StubWandb, tmp_path: Path
) -> None:
    tracker = Tracker(tmp_path, "", "offline", {})
    tracker.log(1, {"loss": 1.0})
    tracker.attach(page_in(tmp_path))
    tracker.finish()
    saved = ("save", str(tmp_path / "report.html"), str(tmp_path), "now")
    names = [call[0] for call in stub.calls]
    assert saved in stub.calls and names.index("save") < names.index("finish")
    assert steps_of(stub) == [1] and stub.threads == {"tracking"}


def test_a_page_that_cannot_be_made_is_told_and_passes(
    stub: StubWandb, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker(tmp_path, "", "offline", {})
    tracker.attach(fail)
    tracker.finish(3)
    assert ("finish", 3) in stub.calls
    assert "the report is not among its files: RuntimeError" in capfd.readouterr().err


def test_a_page_that_takes_too_long_holds_nobody_up(stub: StubWandb, tmp_path: Path) -> None:
    gate = threading.Event()

    def slow() -> Path:
        gate.wait(30)
        return tmp_path

    tracker = Tracker(tmp_path, "", "offline", {}, finish_s=0.2)
    tracker.attach(slow)
    began = time.monotonic()
    tracker.finish()
    assert time.monotonic() - began < 10
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "tracking":
            thread.join(10)


def test_a_restart_from_an_older_step_keeps_the_run_and_loses_no_point(
    stub: StubWandb, tmp_path: Path
) -> None:
    for steps in (range(1, 213), range(201, 221)):
        tracker = Tracker(tmp_path, "", "offline", {})
        for step in steps:
            tracker.log(step, {})
        tracker.finish()
    first, second = stub.inits()
    assert first["id"] == second["id"] == (tmp_path / "wandb_id").read_text().strip()
    assert steps_of(stub) == [*range(1, 213), *range(201, 221)]


def test_points_that_carry_wandbs_own_step_would_be_lost(stub: StubWandb) -> None:
    run = stub.init()
    for step in [*range(1, 213), *range(201, 221)]:
        run.log({"step": step}, step=step)
    assert len(stub.points) < 212 + 20


def test_another_run_directory_is_another_run(stub: StubWandb, tmp_path: Path) -> None:
    for name in ("a", "b"):
        Tracker(tmp_path / name, "", "offline", {}).finish()
    first, second = stub.inits()
    assert first["id"] != second["id"]


def test_a_start_that_fails_online_goes_offline_and_loses_nothing(
    stub: StubWandb,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "key-of-mine")
    stub.on_init = lambda kwargs: fail() if kwargs["mode"] == "online" else None
    tracker = Tracker(tmp_path, "", "auto", {})
    tracker.log(1, {"loss": 1.0})
    tracker.finish()
    assert [kwargs["mode"] for kwargs in stub.inits()] == ["online", "offline"]
    assert steps_of(stub) == [1] and tracker.mode == "offline"
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and "goes offline: RuntimeError" in err
    assert "hunter2" not in err and "key-of-mine" not in err


def test_a_start_that_always_fails_turns_tracking_off(
    stub: StubWandb, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stub.on_init = fail
    tracker = Tracker(tmp_path, "", "offline", {}, queue_length=2)
    for step in range(5):
        tracker.log(step, {})
    tracker.finish()
    tracker.log(9, {})
    assert tracker.mode == "disabled" and stub.points == []
    assert capfd.readouterr().err.count("\n") == 1


def test_a_module_that_cannot_be_imported_turns_tracking_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    tracker = Tracker(tmp_path, "", "offline", {})
    tracker.finish()
    assert tracker.mode == "disabled"
    assert "goes off: ModuleNotFoundError" in capfd.readouterr().err


def end_thread(release: threading.Event) -> None:
    release.set()
    for thread in threading.enumerate():
        if thread.name == "tracking":
            thread.join()


def test_a_start_that_blocks_holds_nobody_up_and_the_newest_values_are_kept(
    stub: StubWandb, tmp_path: Path
) -> None:
    release = threading.Event()
    stub.on_init = lambda kwargs: None if release.wait(60) else None
    tracker = Tracker(tmp_path, "", "offline", {}, queue_length=3)
    for step in range(10):
        tracker.log(step, {})
    assert not release.is_set() and tracker.dropped == 7
    release.set()
    tracker.finish()
    assert steps_of(stub) == [7, 8, 9]


def test_an_end_while_the_start_blocks_is_bounded_and_starts_nothing_more(
    stub: StubWandb,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "key-of-mine")
    release = threading.Event()

    def block(kwargs: Mapping[str, Any]) -> None:
        release.wait(60)
        fail()

    stub.on_init = block
    tracker = Tracker(tmp_path, "", "auto", {}, finish_s=0.01)
    tracker.log(1, {})
    tracker.finish()
    assert not release.is_set(), "finish came back while wandb still blocked"
    assert "not done within 0.01 s" in capfd.readouterr().err
    end_thread(release)
    assert len(stub.inits()) == 1


def test_an_end_that_blocks_is_bounded(
    stub: StubWandb, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    release = threading.Event()
    stub.on_finish = lambda: None if release.wait(60) else None
    tracker = Tracker(tmp_path, "", "offline", {}, finish_s=0.01)
    tracker.finish()
    assert not release.is_set(), "finish came back while wandb still blocked"
    assert "not done within" in capfd.readouterr().err
    end_thread(release)


def test_refused_records_are_told_once_and_the_others_arrive(
    stub: StubWandb, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stub.on_log = lambda values: fail() if values["step"] in (2, 3) else None
    tracker = Tracker(tmp_path, "", "offline", {})
    for step in range(1, 6):
        tracker.log(step, {})
    tracker.finish()
    assert steps_of(stub) == [1, 4, 5]
    assert capfd.readouterr().err.count("\n") == 1


def test_an_end_that_raises_is_told_and_passes(
    stub: StubWandb, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stub.on_finish = fail
    Tracker(tmp_path, "", "offline", {}).finish()
    assert "could not be ended" in capfd.readouterr().err


def test_not_even_what_is_no_error_leaves_its_thread(
    stub: StubWandb, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Odd(BaseException):
        pass

    def odd(*values: object) -> None:
        raise Odd("odd")

    stub.on_log = stub.on_finish = odd
    tracker = Tracker(tmp_path, "", "offline", {})
    tracker.log(1, {})
    tracker.finish()
    told = capfd.readouterr().err
    assert "some records were refused" in told and "could not be ended" in told
    assert "Traceback" not in told


REAL = """
import sys, threading
from pathlib import Path
from launch.tracking import Tracker
def page():
    path = Path(sys.argv[1], "report.html")
    path.write_text("<!doctype html>")
    return path
tracker = Tracker(sys.argv[1], "tiny", "auto", {"model": {"num_layers": 2}}, finish_s=60)
for step in (10, 20):
    tracker.log(step, {"loss": 1 / step, "tokens": 64 * step})
tracker.attach(page)
tracker.finish()
assert tracker.mode == "offline" and threading.enumerate() == [threading.main_thread()]
"""


BLOCKED = """
import sys
from launch.tracking import Tracker
tracker = Tracker(sys.argv[1], "", "online", {}, init_s=3600, finish_s=3)
tracker.log(1, {"loss": 1.0})
tracker.finish()
print("ended in mode", tracker.mode)
sys.exit(75)
"""


def test_a_real_server_that_never_answers_keeps_no_process_alive(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}",
            "WANDB_API_KEY": "a" * 40,
        }
        done = subprocess.run(
            [sys.executable, "-c", BLOCKED, str(tmp_path / "run")],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 75 and "ended in mode" in done.stdout
    assert done.stderr == "wandb: not done within 3 s; wandb sync can send the rest later\n"


def test_a_real_offline_run_is_silent_and_reads_back(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", REAL, str(tmp_path / "run")],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (log,) = (tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb")
    assert (log.parent / "files" / "report.html").read_text() == "<!doctype html>"
    shown = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(log)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    summary = json.loads(shown.stdout)
    assert summary["name"] == "tiny" and summary["state"] == "finished"
    assert summary["run_id"] == (tmp_path / "run" / "wandb_id").read_text().strip()
    assert summary["config"]["model"] == {"num_layers": 2}
    assert {k: summary["summary"][k] for k in ("step", "loss", "tokens")} == {
        "step": 20,
        "loss": 1 / 20,
        "tokens": 1280,
    }
