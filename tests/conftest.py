"""What holds for every test: no network, the same random examples each time, no process left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from tests.ranks import close_server  # noqa: E402

settings.register_profile(
    "megalite",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("megalite")


def living_children() -> dict[int, str]:
    """The processes, by pid, that this one has started and that still run, with their commands."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            try:
                state = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
                command = Path("/proc", pid, "cmdline").read_text().replace("\0", " ")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state != "Z" and "multiprocessing.resource_tracker" not in command:
                found[int(pid)] = command
    return found


@pytest.fixture(scope="session", autouse=True)
def no_process_outlives_the_session() -> Iterator[None]:
    before = set(living_children())
    yield
    close_server()
    left = {pid: command for pid, command in living_children().items() if pid not in before}
    assert not left, f"tests have left processes running: {left}"
