from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.mesh import Transport
from tests import ranks
from tests.conftest import living_children
from tests.ranks import RankError, run_ranks

# --- bodies ------------------------------------------------------------------------------------


def report(transport: Transport, given: dict[str, Any]) -> tuple[int, int, dict[str, Any]]:
    return transport.rank, transport.world_size, given


def num_threads(transport: Transport) -> tuple[int, int]:
    return threading.active_count(), torch.get_num_threads()


def sum_of_ranks(transport: Transport) -> torch.Tensor:
    group = transport.new_group(range(transport.world_size))
    assert group is not None
    x = torch.tensor([float(transport.rank)])
    group.all_reduce(x).wait()
    transport.close_group(group)
    return x


def square_gradient(transport: Transport) -> float:
    x = torch.tensor(3.0, requires_grad=True)
    (x * x).backward()
    assert x.grad is not None
    return x.grad.item()


def fail_on_rank_1(transport: Transport, how: str) -> None:
    if transport.rank == 1:
        match how:
            case "raise":
                raise ValueError("the true error")
            case "abort":
                os.abort()
            case "exit":
                os._exit(3)
            case "hang":
                time.sleep(100.0)
    sum_of_ranks(transport)


def leave_a_group_open(transport: Transport) -> None:
    transport.new_group(range(transport.world_size))


def say(transport: Transport, words: str) -> None:
    print(words)


def warn(transport: Transport) -> None:
    warnings.warn("something is old", DeprecationWarning, stacklevel=1)


# --- what a call gives -------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["gloo", "nccl_rules"])
def test_results_come_in_the_order_of_ranks(transport: str) -> None:
    given = {"tensor": torch.arange(3.0)}
    for rank, (own, size, got) in enumerate(run_ranks(3, report, given, transport=transport)):
        assert (own, size) == (rank, 3)
        assert torch.equal(got["tensor"], given["tensor"])


@pytest.mark.parametrize("transport", ["gloo", "nccl_rules"])
def test_ranks_talk_to_each_other(transport: str) -> None:
    assert [x.item() for x in run_ranks(4, sum_of_ranks, transport=transport)] == [6.0] * 4


def test_ranks_come_from_a_process_without_threads_though_this_one_ran_a_backward_pass() -> None:
    assert square_gradient(None) == 6.0  # type: ignore[arg-type]
    assert run_ranks(2, square_gradient) == [6.0, 6.0]
    assert run_ranks(2, num_threads) == [(1, 1), (1, 1)]
    server = ranks._running[0].process.pid
    assert len(os.listdir(f"/proc/{server}/task")) == 1


def test_a_full_exit_is_quiet_and_honest() -> None:
    assert len(run_ranks(2, sum_of_ranks, full_exit=True, silent=True)) == 2


def test_a_body_that_ranks_cannot_import_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a function of a module"):
        run_ranks(1, lambda transport: None)


# --- what a failure says -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "start"),
    [
        ("raise", "rank 1 raised:\nTraceback"),
        ("abort", "rank 1 died of SIGABRT"),
        ("exit", "rank 1 exited with 3"),
    ],
)
def test_the_first_true_error_comes_first(how: str, start: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(3, fail_on_rank_1, how)
    assert str(caught.value).startswith(start)
    if how == "raise":
        assert "ValueError: the true error" in str(caught.value).partition("\nrank ")[0]


def test_nothing_fails_without_a_failing_rank() -> None:
    assert run_ranks(2, fail_on_rank_1, "not at all") == [None, None]


def test_a_hang_ends_with_the_stacks_of_all_ranks() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, fail_on_rank_1, "hang", timeout_s=1.0)
    first, rank_0, rank_1 = re.split(r"rank \d was still running", str(caught.value))
    assert "no end within 1 s of ranks 0, 1" in first
    assert "in sum_of_ranks" in rank_0 and "in fail_on_rank_1" in rank_0
    assert "in sum_of_ranks" not in rank_1 and "in fail_on_rank_1" in rank_1


@pytest.mark.parametrize("transport", ["gloo", "nccl_rules"])
def test_a_group_left_open_is_an_error(transport: str) -> None:
    with pytest.raises(RankError, match="1 groups were left open"):
        run_ranks(2, leave_a_group_open, transport=transport)


def test_what_ranks_print_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, say, "good morning")
    shown = capsys.readouterr().out
    assert "output of rank 0\ngood morning" in shown and "output of rank 1\ngood morning" in shown
    with pytest.raises(RankError, match="good morning"):
        run_ranks(2, say, "good morning", silent=True)


def test_ranks_treat_warnings_as_the_caller_does() -> None:
    with pytest.raises(RankError, match="DeprecationWarning: something is old"):
        run_ranks(1, warn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_ranks(1, warn, silent=True)


# --- what is left behind -----------------------------------------------------------------------

# A module without torch, for a server and ranks that start at once.
BODIES = """
import os, pathlib, time

def ids(rank):
    return os.getpid(), os.getppid()

def tell_and_hang(rank):
    pathlib.Path(__file__).with_name("{}.{}".format(*ids(rank))).touch()
    time.sleep(100)
"""
CALLER = """
import bodies
from tests import ranks
from tests.conftest import living_children
ranks.PRELOAD = ()
ranks.run_ranks(2, bodies.tell_and_hang, transport="none")
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < limit, what
        time.sleep(0.01)


def test_no_process_survives_a_killed_caller(tmp_path: Path) -> None:
    (tmp_path / "bodies.py").write_text(BODIES)
    root = Path(__file__).resolve().parent.parent
    path = {"PYTHONPATH": f"{tmp_path}:{root}"}
    caller = subprocess.Popen([sys.executable, "-c", CALLER], env={**os.environ, **path})
    try:
        wait_until(lambda: len(list(tmp_path.glob("*.[0-9]*"))) == 2, "the ranks did not start")
        pids = {int(pid) for told in tmp_path.glob("*.[0-9]*") for pid in told.name.split(".")}
        assert len(pids) == 3 and all(map(alive, pids))
    finally:
        caller.kill()
        caller.wait()
    wait_until(lambda: not any(map(alive, pids)), "ranks or their server live on")


def test_a_server_that_has_died_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bodies.py").write_text(BODIES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ranks, "PRELOAD", ())
    monkeypatch.setattr(ranks, "_running", [])
    bodies = importlib.import_module("bodies")
    servers = []
    for _ in range(2):
        (_, parent), (_, same_parent) = run_ranks(2, bodies.ids, transport="none")
        assert parent == same_parent == ranks._running[0].process.pid
        ranks._running[0].process.kill()
        ranks._running[0].process.wait()
        servers.append(parent)
    assert servers[0] != servers[1]


def test_a_child_that_still_runs_is_seen_at_the_end_of_the_session() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        assert "time.sleep(100)" in living_children()[child.pid]
    finally:
        child.kill()
        child.wait()
    assert child.pid not in living_children()
