"""torchrun's flags as ``launch/elastic.py`` takes them."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from argparse import Namespace
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs, Std
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config
from torch.distributed.run import (
    determine_local_world_size,
    get_args_parser,
    parse_min_max_nnodes,
)

from launch.leader import Limits
from launch.meeting import Place
from megalite.errors import ConfigError

ENDLESS = 1_000_000
"""Restarts where --max-restarts names no number: a crash that comes again and again is found."""
_PORT = 29500


def parse(argv: list[str]) -> Namespace:
    """The flags, with torchrun's own parser; a usage error exits with 2."""
    parser = get_args_parser()
    parser.set_defaults(max_restarts=ENDLESS, monitor_interval=0.02, node_rank=None)
    args = parser.parse_args(argv)
    for name in ("module", "no_python", "run_path", "virtual_local_rank"):
        if getattr(args, name):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(flag, "workers are forked, not started", "Name a Python file")
    if not Path(args.training_script).is_file():
        raise ConfigError(args.training_script, "there is no such file", "Name a Python file")
    return args


def place_of(args: Namespace) -> Place:
    """Where and with whom this node meets.

    Raises:
        ConfigError: for flags that name no place.
    """
    try:
        least, most = parse_min_max_nnodes(args.nnodes)
        workers = determine_local_world_size(args.nproc_per_node)
        conf = _parse_rendezvous_config(args.rdzv_conf)
        limits = _limits(least, most, conf)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            "--nnodes, --nproc-per-node, --rdzv-conf", str(error), "Mend it"
        ) from error
    if not 1 <= least <= most or workers < 1:
        raise ConfigError("--nnodes", f"{args.nnodes} nodes of {workers} workers", "Use 1 or more")
    host, port, hosts = _meeting_point(args, most, conf)
    rank = args.node_rank
    name = f"node {rank}" if rank is not None else f"{socket.gethostname()} {os.getpid()}"
    order = rank if rank is not None else 0 if hosts else most
    return Place(host, port, hosts, args.rdzv_id, name, order, workers, limits)


def _limits(least: int, most: int, conf: dict[str, str]) -> Limits:
    beats = float(conf.get("keep_alive_interval", 5)) * float(conf.get("keep_alive_max_attempt", 3))
    join = conf.get("join_timeout", conf.get("timeout", 600))
    return Limits(least, most, beats, float(conf.get("last_call_timeout", 10)), float(join))


def _meeting_point(args: Namespace, most: int, conf: dict[str, str]) -> tuple[str, int, bool]:
    """Host, port, and whether this node is the host."""
    named = args.rdzv_endpoint
    if args.rdzv_backend not in ("static", "c10d"):
        raise ConfigError("--rdzv-backend", f"{args.rdzv_backend} is not known", "Use c10d")
    alone = args.rdzv_backend == "static" and args.master_port is None and not named and most == 1
    if args.standalone or alone:
        return "127.0.0.1", 0, True
    if args.rdzv_backend == "static":
        host, port = args.master_addr, args.master_port or _PORT
        if named:
            host, port = _split(named)
        if args.node_rank is None and most > 1:
            raise ConfigError("--node-rank", "is missing", "Give each node its own, from 0")
        return host, port, not args.node_rank
    host, port = _split(named or f"localhost:{_PORT}")
    if "is_host" in conf:
        return host, port, str(conf["is_host"]).lower() in ("1", "true", "t", "yes", "y")
    return host, port, _can_listen(host, port)


def _split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    if host and port.isdecimal():
        return host.strip("[]"), int(port)
    return endpoint, _PORT


def _can_listen(host: str, port: int) -> bool:
    """Whether a name or address is of this node, and its port free."""
    try:
        with socket.create_server((host, port)):
            return True
    except OSError:
        return False


def logs_of(args: Namespace, folder: Path) -> LogsSpecs:
    """Where the workers' output and errors go; files of their own only where asked for."""
    chosen = args.local_ranks_filter
    return DefaultLogsSpecs(
        args.log_dir or str(folder / "logs"),
        Std.from_str(args.redirects),
        Std.from_str(args.tee),
        {int(rank) for rank in chosen.split(",")} if chosen else None,
    )


def interface_to(place: Place) -> str:
    """The network interface that leads to the meeting place, for gloo: a host's own name often
    stands for an address that no other host can reach. Empty where it cannot be told (Linux, IPv4).
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((place.host, place.port))
            address = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                if _address_of(probe, name) == address:
                    return name
    except OSError:
        pass
    return ""


def _address_of(probe: socket.socket, name: str) -> str:
    ask_address = 0x8915
    try:
        found = fcntl.ioctl(probe.fileno(), ask_address, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return ""
    return socket.inet_ntoa(found[20:24])
