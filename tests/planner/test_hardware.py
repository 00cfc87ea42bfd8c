from __future__ import annotations

from pathlib import Path

import pytest

from megalite.errors import ConfigError
from megalite.planner.constants import bounds, load_constants, load_stacks
from megalite.planner.hardware import (
    FOLDER,
    find_hardware,
    known_hardware,
    parse_hardware,
    read_yaml,
)


def test_every_number_has_a_source() -> None:
    assert set(known_hardware()) >= {"a100-40", "a100-80", "h100", "h200", "b200"}
    for name in known_hardware():
        found = read_yaml(FOLDER / f"{name}.yaml")
        entries = {k: v for k, v in found.items() if k != "name"}
        assert all(e["source"] for e in entries.values())
        assert find_hardware(name).name == found["name"]


def test_names_are_forgiving_and_a_wrong_one_is_answered() -> None:
    assert find_hardware("A100-80GB") is find_hardware("a100")
    with pytest.raises(ConfigError, match=r"h10.*Did you mean h100\?.*b200"):
        find_hardware("h10")


@pytest.mark.parametrize(
    "entry", [{"value": 1.0}, {"value": "x", "source": "s"}, 3.0, None, {"value": 0, "source": "s"}]
)
def test_a_number_without_value_or_source_is_refused(entry: object) -> None:
    found = read_yaml(FOLDER / "h100.yaml")
    with pytest.raises(ConfigError, match="peak_flops"):
        parse_hardware({**found, "peak_flops": entry}, Path("mine.yaml"))
    assert parse_hardware(found, Path("mine.yaml")).peak_flops > 0


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    with pytest.raises(ConfigError, match="cannot be read"):
        find_hardware(str(path))
    path.write_text("- 1\n")
    with pytest.raises(ConfigError, match="no mapping"):
        find_hardware(str(path))


def test_constants_lie_within_their_bounds() -> None:
    constants = load_constants()
    for name, (low, value, high) in bounds().items():
        assert low <= value <= high
        assert getattr(constants, name) == value


def test_an_unknown_stack_has_the_scalar_one() -> None:
    stacks = load_stacks()
    assert stacks.scalar("no such framework", "selene") == 1.0
    assert stacks.framework("no such framework").name == "megalite"
    assert all(0.8 < s < 1.4 for s in stacks.scalars.values())
