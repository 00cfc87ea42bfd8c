"""The launcher: its flags, its exit codes and last words, and who gets which signal."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from launch.agent import Agent
from launch.flags import ENDLESS, parse, place_of
from megalite.errors import ConfigError
from tests.launch.command import ROOT, TINY, TRAIN, run

SCRIPT = str(ROOT / TRAIN)
ELASTIC = [sys.executable, "launch/elastic.py"]


def test_one_node_meets_itself_on_a_port_that_is_free() -> None:
    for flags in ([], ["--standalone"], ["--nnodes", "1"]):
        args = parse([*flags, "--nproc-per-node", "3", SCRIPT, "--config", "x"])
        place = place_of(args)
        assert (place.host, place.port, place.hosts, place.num_workers) == ("127.0.0.1", 0, True, 3)
        assert args.max_restarts == ENDLESS and args.training_script_args == ["--config", "x"]


def test_nodes_of_torchruns_static_kind_meet_at_the_first() -> None:
    flags = ["--nnodes", "1:4", "--master-addr", "n0", "--master-port", "21000", SCRIPT]
    first, third = (place_of(parse(["--node-rank", n, *flags])) for n in ("0", "2"))
    assert (first.host, first.port, first.hosts) == ("n0", 21000, True)
    assert (third.hosts, third.name, third.order) == (False, "node 2", 2)
    assert (first.limits.min_nodes, first.limits.max_nodes, first.limits.lost_s) == (1, 4, 15.0)


def test_nodes_of_the_c10d_kind_find_out_which_of_them_hosts() -> None:
    flags = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "a", "--rdzv-endpoint"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not place_of(parse([*flags, f"127.0.0.1:{port}", SCRIPT])).hosts
    assert place_of(parse([*flags, f"127.0.0.1:{port}", SCRIPT])).hosts
    conf = ["--rdzv-conf", "timeout=9,last_call_timeout=2,keep_alive_interval=1"]
    limits = place_of(parse([*conf, *flags, "127.0.0.1:1", SCRIPT])).limits
    assert (limits.join_s, limits.last_call_s, limits.lost_s) == (9, 2, 3)


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--nnodes", "2", "--master-port", "1"], "--node-rank"),
        (["--nnodes", "3:2"], "--nnodes"),
        (["--nnodes", "a"], "--nnodes"),
        (["--nproc-per-node", "0"], "--nnodes"),
        (["--rdzv-backend", "etcd"], "--rdzv-backend"),
        (["--module"], "--module"),
    ],
)
def test_flags_that_cannot_work_are_named(flags: list[str], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}"):
        place_of(parse([*flags, SCRIPT]))
    with pytest.raises(ConfigError, match="no such file"):
        parse(["nowhere.py"])


def test_bad_input_starts_nothing_and_is_said_once_and_last() -> None:
    for words, code, said in ((["--help"], 0, ""), (["--bogus", TRAIN], 2, "error: ")):
        found = run([*ELASTIC, *words])
        assert found.code == code and said in found.output.splitlines()[-1]
        assert "Traceback" not in found.output
    flags = ["--parallel.tp", "3"]
    found = run([*ELASTIC, "--nproc-per-node", "2", TRAIN, *TINY, *flags])
    assert found.code == 2
    assert found.output.splitlines()[-1].startswith("parallel.tp")
    assert found.output.count("parallel.tp:") == 1, found.output


FAILS = """
import os
print("worker", os.environ["RANK"], flush=True)
if os.environ["RANK"] == "1":
    raise ValueError("planted")
import time
time.sleep(60)
"""


def test_a_crash_that_comes_again_and_again_ends_with_the_first_error(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    found = run([*ELASTIC, "--nproc-per-node", "2", str(script)], timeout_s=60)
    assert found.code == 1
    assert found.output.count("worker 1") == 3
    assert "ValueError: planted" in found.last_lines(3)
    assert "rank 1 (local rank 1) ended with 1" in found.last_lines(20)


WAITS = """
import multiprocessing, sys, time
sys.path[0] = "."
from launch.launcher import Requests
queue = multiprocessing.get_context("forkserver").SimpleQueue()  # as torch's agent has
found = Requests()
print("ready", flush=True)
while not found.asked:
    time.sleep(0.01)
print("asked", flush=True)
time.sleep(60)
"""


def test_a_second_term_ends_at_once_and_the_first_asks() -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", WAITS], cwd=ROOT, text=True, **pipes)  # type: ignore[call-overload]
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "asked\n"
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None, "USR1 and then TERM is no second TERM"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 1
    finally:
        process.kill()
        said = process.communicate()[1]
    assert said == "elastic: asked a second time: ended without a checkpoint\n"


@pytest.mark.parametrize("failures", [2, 3])
def test_a_server_that_is_killed_while_it_forks_is_started_again(
    failures: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    left = [EOFError("unexpected EOF"), ConnectionResetError(), BrokenPipeError()][:failures]

    def start(agent: Agent, group: Any) -> dict[int, Any]:
        if left:
            raise left.pop()
        return {0: group}

    monkeypatch.setattr(LocalElasticAgent, "_start_workers", start)
    agent = Agent.__new__(Agent)
    if failures == 3:
        with pytest.raises(EOFError):
            agent._forked("group", 2)  # type: ignore[arg-type]
    else:
        assert agent._forked("group", 2) == {0: "group"}  # type: ignore[arg-type]
    assert capfd.readouterr().err.count("the process that forks workers is gone") == 2
