"""Where the nodes of a Slurm job meet: prints ``ADDRESS PORT``. Needs nothing but Python."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path


def parse_hosts(node_list: str) -> list[str]:
    """The hosts of Slurm's short form: ``a[01-03],b7`` is a01, a02, a03, b7."""
    names = re.findall(r"(?:\[[^\]]*\]|[^,\[\]\s])+", node_list)
    cut = [re.findall(r"\[[^\]]*\]|[^\[\]]+", name) for name in names]
    return ["".join(chosen) for parts in cut for chosen in product(*map(_choices, parts))]


def _choices(part: str) -> list[str]:
    if not part.startswith("["):
        return [part]
    ends = [item.partition("-")[::2] for item in part[1:-1].split(",")]
    return [str(n).zfill(len(a)) for a, b in ends for n in range(int(a), int(b or a) + 1)]


def hosts_of(node_list: str) -> list[str]:
    """The same by ``scontrol`` where there is one; containers often have none."""
    if shutil.which("scontrol"):
        words = ["scontrol", "show", "hostnames", node_list]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.split():
            return done.stdout.split()
    return parse_hosts(node_list)


def port_of(job_id: int, low: int = 32768, high: int = 60999) -> int:
    """A port of the job, outside ``low .. high``, which the system gives to connections at will."""
    ranges = [(20000, 29500), (1024, low), (high + 1, 65536)]
    free = [(a, b) for a, b in ranges if b - a >= 1000 and (b <= low or a > high)] or ranges
    return free[0][0] + job_id % (free[0][1] - free[0][0])


def address_of(env: Mapping[str, str]) -> str:
    """The first host, or MASTER_ADDR if that is another name of it; ValueError if it is not."""
    first = hosts_of(env["SLURM_JOB_NODELIST"])[0]
    address = env.get("MASTER_ADDR") or first
    try:
        with socket.create_server((address, 0)) as here:
            fits = not here.getsockname()[0].startswith("127.")
    except OSError:
        fits = False
    if address != first and not fits:
        raise ValueError(f"MASTER_ADDR is {address}, but the first host is {first}: unset it")
    return address


if __name__ == "__main__":
    reserved = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    port = os.environ.get("MASTER_PORT") or port_of(
        int(os.environ["SLURM_JOB_ID"]), *map(int, reserved)
    )
    try:
        print(address_of(os.environ), port)
    except ValueError as error:
        sys.exit(str(error))
