"""Which layout a run has when: ``parallel.reconfigure``, and what a restart goes on with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from megalite.config import load
from megalite.errors import ConfigError
from megalite.parallel_config import ParallelConfig

FIELD = "parallel.reconfigure"
_ENTRY = re.compile(r"\s*(\d+)\s*:(.+)", re.ASCII | re.DOTALL)
_NEXT = re.compile(
    r",(?=\s*\w+\s*=)"
)  # a comma inside a value (partition, rank_order) is no border


@dataclass(frozen=True)
class _Section:
    parallel: ParallelConfig = field(default_factory=ParallelConfig)


def changed(parallel: ParallelConfig, values: Mapping[str, str]) -> ParallelConfig:
    """``parallel`` with other values in some of its fields, given as the text of a flag.

    Raises:
        ConfigError: for a field that is none, or a value that it does not take.
    """
    if "reconfigure" in values:
        raise ConfigError(
            FIELD, "one change of layout cannot name others", "Give each its own step"
        )
    read = _parsed(tuple(values.items()))
    return replace(parallel, **{name: getattr(read, name) for name in values})


@lru_cache(maxsize=1000)  # milliseconds each, and a long list comes back to the same layouts
def _parsed(values: tuple[tuple[str, str], ...]) -> ParallelConfig:
    flags = [f"--parallel.{name}={value}" for name, value in values]
    return load(_Section, None, flags).parallel


def changes_of(parallel: ParallelConfig) -> dict[int, dict[str, str]]:
    """Step -> the fields that change after it, as text.

    Raises:
        ConfigError: for an entry that cannot be read.
    """
    found: dict[int, dict[str, str]] = {}
    for entry in parallel.reconfigure:
        step, values = _read(entry)
        if step in found:
            raise ConfigError(
                FIELD, f"two changes after step {step}", "Put the fields of both into one"
            )
        found[step] = values
    return dict(sorted(found.items()))


def _read(entry: str) -> tuple[int, dict[str, str]]:
    how = "Write STEP:FIELD=VALUE[,FIELD=VALUE...], such as 100:tp=2,pp=2"
    split = _ENTRY.fullmatch(entry)
    pairs = [part.partition("=") for part in _NEXT.split(split[2])] if split else []
    values = {name.strip().replace("-", "_"): value.strip() for name, _, value in pairs}
    if split is None or len(values) < len(pairs) or not all(values.values()):
        raise ConfigError(FIELD, f"{entry!r} is no change of layout", how)
    if int(split[1]) < 1:
        raise ConfigError(FIELD, f"{entry!r} comes before the first step", "Use step 1 or later")
    known = {f.name for f in fields(ParallelConfig)}
    for name in values.keys() - known:
        raise ConfigError(FIELD, f"{entry!r}: parallel has no field {name}", how)
    return int(split[1]), values


def chain(parallel: ParallelConfig) -> Iterator[tuple[int, ParallelConfig]]:
    """Each step of ``parallel.reconfigure``, in order, with the layout from there on.

    Raises:
        ConfigError: that names the entry that cannot be read.
    """
    for step, values in changes_of(parallel).items():
        try:
            parallel = changed(parallel, values)
        except ConfigError as error:
            raise at_change(step, error) from error
        yield step, parallel


def at_change(step: int, error: ConfigError) -> ConfigError:
    """The error of a layout, as one of the change that leads to it."""
    return ConfigError(FIELD, f"after step {step}: {error.field}: {error.problem}", error.fix)


def to_plain(parallel: ParallelConfig) -> dict[str, Any]:
    """As JSON gives it back."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(parallel).items()}


def from_plain(values: Mapping[str, Any]) -> ParallelConfig:
    """Raises:
    TypeError: for fields of another version.
    """
    read: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return ParallelConfig(**read)


def layout_at(
    asked: ParallelConfig, step: int, live: Mapping[str, Any] | None = None
) -> ParallelConfig:
    """The layout in which a run is taken up after ``step``.

    Args:
        asked: what the command line and its file say.
        live: what the checkpoint says of a change that was made while its run lived: the layout
            that was ``asked`` for then, and that which the run had ``now``.
    Returns:
        ``now`` if the same is asked for as then, and otherwise ``asked`` with the changes of its
        own ``reconfigure`` up to this step. Of the former only a change at this very step has
        still to be made.
    """
    same = live is not None and live["asked"] == to_plain(asked)
    found = from_plain(live["now"]) if live is not None and same else asked
    for at, values in changes_of(asked).items():
        if at == step or (at < step and not same):
            found = changed(found, values)
    return found
