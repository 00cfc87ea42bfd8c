"""launch/torchrun.sh over two hosts: network namespaces with addresses of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from megalite.metrics import read_lines
from tests.faults.job import Host, Job, family, kill
from tests.faults.test_kills import calm_run, check, rain, show
from tests.launch import command

HOSTS = ("megahost0", "megahost1")
ADDRESSES = ("10.77.3.1", "10.77.3.2")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip"), reason="network namespaces need root and ip"
    ),
    pytest.mark.timeout(400),
]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def remove_hosts() -> None:
    for name in HOSTS:
        with suppress(subprocess.CalledProcessError):
            ip("netns", "del", name)


@pytest.fixture
def hosts() -> Iterator[None]:
    remove_hosts()
    for name in HOSTS:
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
    names = [("megav0", HOSTS[0]), ("megav1", HOSTS[1])]
    ip("link", "add", "megav0", "netns", HOSTS[0], "type", "veth", "peer", "name", "megav1")
    ip("link", "set", "megav1", "netns", HOSTS[1])
    for (link, name), address in zip(names, ADDRESSES, strict=True):
        ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
        ip("-n", name, "link", "set", link, "up")
    yield
    remove_hosts()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hosts_", dir="/tmp") as name:
        yield Path(name)


def host(index: int, nodes: str) -> Host:
    env = [f"NNODES={nodes}", f"NODE_RANK={index}", "NPROC=1", "MASTER_PORT=21877"]
    words = ["ip", "netns", "exec", HOSTS[index], "env", *env, f"MASTER_ADDR={ADDRESSES[0]}"]
    return Host(f"host{index}", [*words, "bash", "launch/torchrun.sh"])


def layouts(job: Job) -> list[str]:
    """The layouts of the steps, in order, each change once."""
    found = [line["layout"] for line in read_lines(job.run_dir / "metrics.jsonl")]
    return [b for a, b in zip(["", *found], found, strict=False) if a != b]


def until(done: Callable[[], bool], job: Job, limit_s: float) -> float:
    began = time.monotonic()
    while not done():
        assert time.monotonic() - began < limit_s, job.logs()
        time.sleep(0.1)
    return time.monotonic() - began


def test_a_job_loses_a_host_without_a_word_goes_on_and_takes_it_back(
    hosts: None, folder: Path
) -> None:
    two = [host(0, "1:2"), host(1, "1:2")]
    with Job(folder, 100_000, two) as job:
        until(lambda: len(read_lines(job.run_dir / "metrics.jsonl")) > 10, job, 60)
        ip("-n", HOSTS[0], "link", "set", "megav0", "down")  # no word leaves the lost host
        for pid in family(two[1].pid()):
            kill(pid)
        took = until(lambda: len(layouts(job)) == 2, job, 60)
        print(f"one host goes on {took:.1f} s after the other was lost")
        ip("-n", HOSTS[0], "link", "set", "megav0", "up")
        job.start(two[1])
        until(lambda: len(layouts(job)) == 3, job, 60)
        events = read_lines(job.run_dir / "events.jsonl")
        stops = [event["step"] for event in events if event["event"] == "stop"]
        starts = [event["step"] for event in events if event["event"] == "start"]
        assert stops == [starts[-1]], "the host was let in after a checkpoint of that very step"

        assert two[1].process is not None and two[0].process is not None
        os.kill(two[1].launcher(), signal.SIGUSR1)  # one host is asked, both stop
        assert [h.process.wait(60) for h in two if h.process] == [75, 75], job.logs()
    first, second, third = layouts(job)
    assert "dp 2" in first and "dp 1" in second and third == first

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


def test_kills_on_two_hosts_lose_nothing(hosts: None, folder: Path) -> None:
    targets = ["worker", "host", "agent", "worker", "host", "forkserver", "host", "worker"]
    (folder / "calm").mkdir()
    calm = calm_run(folder / "calm", 400)
    (folder / "struck").mkdir()
    with Job(folder / "struck", 400, [host(0, "2"), host(1, "2")]) as job:
        found = list(rain(job, targets, seed=3))
        job.finish(200)
    show(found)
    check(job, calm)
