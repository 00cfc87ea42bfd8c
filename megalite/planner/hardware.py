"""What a machine can do: numbers from YAML files, each with its source. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megalite.errors import ConfigError

FOLDER = Path(__file__).resolve().parent / "hardware"
_ALIASES = {"a100": "a100-80", "a100-80gb": "a100-80", "a100-40gb": "a100-40"}
_MAPPINGS = ("constants", "rates")
_MAY_BE_ZERO = ("launch_s", "reserve_bytes", "overlap")
TILES = ((256, 128), (128, 128), (128, 64), (64, 64))
"""Rows and columns of a result that one processor makes at a time, as cuBLAS has them."""


@dataclass(frozen=True)
class HardwareSpec:
    """One kind of device, its links to the others of its node, and its share of the network.

    Bandwidths are of one direction, in bytes a second. Where ``processors`` is 1 there are no
    tiles and no waves (a CPU core).

    Attributes:
        memory_bytes: of the device.
        peak_flops: of matrix products in the training dtype.
        gemm_share: of the peak, the most that long products reach.
        hbm_bytes_s, hbm_share: of its memory, and what kernels reach of it.
        processors: that share a product, in tiles.
        node_size: devices that the fast links join.
        link_bytes_s, link_share, link_latency_s: all-reduce bandwidth inside a node; the start
            of a collective.
        net_bytes_s, net_share, net_latency_s: of the network, a device.
        launch_s: the host's time for one kernel.
        reserve_bytes: what runtime and library take before anything is allocated.
        gather_share: of an all-reduce's time, what a gather or a reduce-scatter takes.
        overlap: of a collective or message that goes on beside computation, the part that costs
            it nothing: 1 where links work by themselves, less where the processor copies.
        constants: of ``constants.Constants``, those that were measured here and hold instead.
        rates: bytes a second of kinds of kernels that were measured apart (``Kernels.stream``).
    """

    name: str
    memory_bytes: float
    peak_flops: float
    gemm_share: float
    hbm_bytes_s: float
    hbm_share: float
    processors: int
    node_size: int
    link_bytes_s: float
    link_share: float
    link_latency_s: float
    net_bytes_s: float
    net_share: float
    net_latency_s: float
    launch_s: float = 0.0
    reserve_bytes: float = 0.0
    gather_share: float = 0.5
    overlap: float = 1.0
    constants: tuple[tuple[str, float], ...] = ()
    rates: tuple[tuple[str, float], ...] = ()

    def with_network(self, bytes_s: float) -> HardwareSpec:
        return replace(self, net_bytes_s=bytes_s)


def read_yaml(path: Path) -> dict[str, Any]:
    """A mapping in a YAML file.

    Raises:
        ConfigError: if it cannot be read or is none.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ConfigError(str(path), f"cannot be read: {reason}", "Name a YAML file") from error
    if not isinstance(found, dict):
        raise ConfigError(str(path), "is no mapping of names to values", "See docs/planner.md")
    return found


def known_hardware() -> list[str]:
    return sorted(p.stem for p in FOLDER.glob("*.yaml") if not p.stem.startswith("_"))


def find_hardware(name: str) -> HardwareSpec:
    """By name (a100-80, h100, ...), or from a YAML file such as ``measure`` writes.

    Raises:
        ConfigError: for an unknown name, and a file that is none.
    """
    if name.endswith((".yaml", ".yml")):
        return _load(Path(name))
    key = name.lower().replace("_", "-").replace(" ", "-")
    key = _ALIASES.get(key, key)
    if key not in known_hardware():
        near = get_close_matches(key, known_hardware(), n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(
            "--gpu",
            f"there is no hardware {name!r}",
            f"{hint}Use one of {', '.join(known_hardware())}, or a file that measure wrote",
        )
    return _load(FOLDER / f"{key}.yaml")


@cache
def _load(path: Path) -> HardwareSpec:
    return parse_hardware(read_yaml(path), path)


def parse_hardware(found: Mapping[str, Any], path: Path) -> HardwareSpec:
    """From entries ``name: {value, source}``.

    Raises:
        ConfigError: if a number is missing, or has no source, or is none.
    """
    values: dict[str, Any] = {"name": str(found.get("name", path.stem))}
    for field in fields(HardwareSpec):
        if field.name in ("name", *_MAPPINGS):
            continue
        entry = found.get(field.name)
        if entry is None and field.default is not MISSING:
            continue
        number = entry.get("value") if isinstance(entry, dict) else None
        if (
            not isinstance(number, int | float)
            or not isinstance(entry, dict)
            or not entry.get("source")
        ):
            raise ConfigError(
                f"{path.name}: {field.name}",
                f"{entry!r} is no number with its source",
                "Write {value: NUMBER, source: TEXT}",
            )
        if number < 0 or (number == 0 and field.name not in _MAY_BE_ZERO):
            raise ConfigError(f"{path.name}: {field.name}", f"got {number}", "Use more than 0")
        whole = field.name in ("processors", "node_size")
        values[field.name] = int(number) if whole else float(number)
    for mapping in _MAPPINGS:
        values[mapping] = tuple(
            (name, float(entry["value"])) for name, entry in (found.get(mapping) or {}).items()
        )
    return HardwareSpec(**values)
