"""Side-by-side benchmarks by name: each module has ``run() -> list[Row]``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from difflib import get_close_matches

from megalite.errors import ConfigError
from tools.benches.rows import Row

BENCHES: dict[str, str] = {
    "checkpoint": "tools.benches.checkpoint",
    "gpu": "tools.benches.gpu",
    "layouts": "tools.benches.layouts",
    "pipeline": "tools.benches.pipeline",
    "planner": "tools.benches.planner",
    "recovery": "tools.benches.recovery",
    "size": "tools.benches.size",
}
"""Name -> module, imported when asked for: what one bench needs, another need not have."""


def find_benches(name: str) -> list[Callable[[], list[Row]]]:
    """What runs for a name; ``all`` is every bench.

    Raises:
        ConfigError: for an unknown name.
    """
    if name != "all" and name not in BENCHES:
        close = get_close_matches(name, [*BENCHES, "all"], n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        known = ", ".join([*BENCHES, "all"])
        raise ConfigError("bench", f"unknown name {name!r}", f"{hint}Known: {known}")
    modules = BENCHES.values() if name == "all" else [BENCHES[name]]
    return [importlib.import_module(module).run for module in modules]
