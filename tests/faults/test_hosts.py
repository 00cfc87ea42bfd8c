"""launch/torchrun.sh over several hosts: network namespaces with addresses of their own."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from megalite.metrics import read_lines
from tests.faults.job import Host, Job, family, kill, until
from tests.faults.phases import Phase
from tests.faults.rain import Rain, show
from tests.faults.test_kills import calm_run, check
from tests.launch import command

HOSTS = tuple(f"megahost{n}" for n in range(4))
SWITCH = "megaswitch"
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip"), reason="network namespaces need root and ip"
    ),
    pytest.mark.timeout(400),
]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def address(index: int) -> str:
    return f"10.77.3.{index + 1}"


def remove_hosts() -> None:
    for name in (*HOSTS, SWITCH):
        with suppress(subprocess.CalledProcessError):
            ip("netns", "del", name)


@pytest.fixture
def hosts() -> Iterator[None]:
    """Namespaces with one link each, to a bridge in a namespace of its own."""
    remove_hosts()
    ip("netns", "add", SWITCH)
    ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
    ip("-n", SWITCH, "link", "set", "bridge", "up")
    for n, name in enumerate(HOSTS):
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
        peer = ["type", "veth", "peer", "name", f"port{n}", "netns", SWITCH]
        ip("link", "add", "megav", "netns", name, *peer)
        ip("-n", SWITCH, "link", "set", f"port{n}", "master", "bridge", "up")
        ip("-n", name, "addr", "add", f"{address(n)}/24", "dev", "megav")
        ip("-n", name, "link", "set", "megav", "up")
    yield
    remove_hosts()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hosts_", dir="/tmp") as name:
        yield Path(name)


def host(index: int, nodes: str) -> Host:
    env = [f"NNODES={nodes}", f"NODE_RANK={index}", "NPROC=1", "MASTER_PORT=21877"]
    words = ["ip", "netns", "exec", HOSTS[index], "env", *env, f"MASTER_ADDR={address(0)}"]
    return Host(f"host{index}", [*words, "bash", "launch/torchrun.sh"])


def lose(index: int, one: Host) -> None:
    """Cut a host off, so that no word leaves it, and end all that runs there."""
    ip("-n", HOSTS[index], "link", "set", "megav", "down")
    for pid in family(one.pid()):
        kill(pid)


def take_back(index: int, one: Host, job: Job) -> None:
    ip("-n", HOSTS[index], "link", "set", "megav", "up")
    job.start(one)


def layouts(job: Job) -> list[str]:
    """The layouts of the steps, in order, each change once."""
    found = [line["layout"] for line in read_lines(job.run_dir / "metrics.jsonl")]
    return [b for a, b in zip(["", *found], found, strict=False) if a != b]


def goes_on(job: Job, count: int) -> bool:
    """Whether the job has come to its ``count``-th layout, and to a checkpoint in it."""
    return len(layouts(job)) == count and len(set(job.layouts()[-12:])) == 1


def stop_by(one: Host, all_hosts: list[Host], job: Job) -> None:
    """Ask one host to stop; all do."""
    os.kill(one.launcher(), signal.SIGUSR1)
    assert [h.process.wait(60) for h in all_hosts if h.process] == [75] * len(all_hosts), job.logs()


def check_calm(job: Job, folder: Path) -> None:
    """The steps are those of one process that nobody disturbed."""
    done = job.lines()
    assert [line["step"] for line in done] == list(range(1, len(done) + 1))
    calm = folder / "calm"
    flags = ["--train.steps", "100000", "--run.stop_at", str(len(done))]
    assert command.train(1, calm, *flags, timeout_s=200).code == 0
    expected = read_lines(calm / "metrics.jsonl")
    for a, b in zip(done, expected, strict=True):
        for name in ("loss", "grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=1e-10, abs=1e-12)
        assert a["samples"] == b["samples"] and a["tokens"] == b["tokens"]


def test_a_job_loses_a_host_without_a_word_goes_on_and_takes_it_back(
    hosts: None, folder: Path
) -> None:
    two = [host(0, "1:2"), host(1, "1:2")]
    with Job(folder, 100_000, two) as job:
        until(lambda: len(read_lines(job.run_dir / "metrics.jsonl")) > 10, job, 60)
        lose(1, two[1])
        took = until(lambda: len(layouts(job)) == 2, job, 60)
        print(f"one host goes on {took:.1f} s after the other was lost")
        take_back(1, two[1], job)
        until(lambda: len(layouts(job)) == 3, job, 60)
        events = read_lines(job.run_dir / "events.jsonl")
        stops = [event["step"] for event in events if event["event"] == "stop"]
        starts = [event for event in events if event["event"] == "start"]
        assert stops == [starts[-1]["step"]], "it was let in after a checkpoint of that very step"
        assert [e["why"] for e in starts][1:] == ["a node was lost", "a node has joined"]
        stop_by(two[1], two, job)
    first, second, third = layouts(job)
    assert "dp 2" in first and "dp 1" in second and third == first
    check_calm(job, folder)


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ([], {4: "tp 1 x pp 1 x dp 4", 3: "tp 1 x pp 1 x dp 3", 2: "tp 1 x pp 1 x dp 2"}),
        (
            ["--parallel.tp", "2", "--parallel.pp", "2"],
            {4: "tp 2 x pp 2 x dp 1", 3: "tp 1 x pp 3 x dp 1", 2: "tp 1 x pp 2 x dp 1"},
        ),
    ],
    ids=["replicas", "tp and pp"],
)
def test_four_hosts_become_three_and_two_and_four_again(
    flags: list[str], sizes: dict[int, str], hosts: None, folder: Path
) -> None:
    four = [host(n, "1:4") for n in range(4)]
    nodes = [4, 3, 2, 3, 4]
    with Job(folder, 100_000, four, flags=flags) as job:
        until(lambda: len(read_lines(job.run_dir / "metrics.jsonl")) > 10, job, 60)
        for number, lost in enumerate((3, 2), 2):
            lose(lost, four[lost])
            took = until(lambda n=number: goes_on(job, n), job, 60)  # type: ignore[misc]
            print(f"{nodes[number - 1]} hosts have a checkpoint {took:.1f} s after a loss")
        for number, back in enumerate((3, 2), 4):
            take_back(back, four[back], job)
            until(lambda n=number: goes_on(job, n), job, 60)  # type: ignore[misc]
        stop_by(four[1], four, job)
    assert layouts(job) == [f"{sizes[n]}, 1f1b" for n in nodes]
    starts = [e for e in read_lines(job.run_dir / "events.jsonl") if e["event"] == "start"]
    assert [e["world_size"] for e in starts] == nodes
    check_calm(job, folder)


def test_kills_on_two_hosts_lose_nothing(hosts: None, folder: Path) -> None:
    targets = ["worker", "host", "agent", "worker", "host", "forkserver", "host", "worker"]
    (folder / "calm").mkdir()
    calm = calm_run(folder / "calm", 400)
    (folder / "struck").mkdir()
    with Job(folder / "struck", 400, [host(0, "2"), host(1, "2")]) as job:
        found = list(Rain(job, random.Random(3)).fall(targets, [Phase.TRAIN] * len(targets)))
        job.finish(200)
    show(found)
    check(job, calm)
