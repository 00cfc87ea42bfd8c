"""Which apex is installed, told from its files alone."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megalite.errors import ConfigError
from megalite.optim.adamw import apex_state, choose_backend

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
RAISES = "raise ModuleNotFoundError(\"No module named 'pyramid'\")"
ENDS = "raise SystemExit('no such luck')"

# name -> the files of a site-packages folder, and what apex_state says of them
INSTALLED: dict[str, tuple[dict[str, str], str]] = {
    "nothing": ({}, "absent"),
    "the web toolkit": ({"apex/__init__.py": RAISES}, "web toolkit"),
    "one that ends the process": ({"apex/__init__.py": ENDS}, "web toolkit"),
    "a single file": ({"apex.py": RAISES}, "web toolkit"),
    "a folder without code": ({"apex/readme.txt": ""}, "web toolkit"),
    "python only": (
        {"apex/__init__.py": RAISES, "apex/multi_tensor_apply/__init__.py": RAISES},
        "without its CUDA extensions",
    ),
    "complete": (
        {
            "apex/__init__.py": RAISES,
            "apex/multi_tensor_apply/__init__.py": RAISES,
            "amp_C.py": RAISES,
        },
        "complete",
    ),
    "the kernels of an old build": ({"amp_C.py": RAISES}, "absent"),
}


@pytest.fixture(params=INSTALLED)
def installed(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    for name, text in INSTALLED[request.param][0].items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield request.param
    assert not {"apex", "amp_C"} & {name.split(".")[0] for name in sys.modules}, "was imported"


def test_the_state_of_what_is_installed_is_told(installed: str) -> None:
    expected = INSTALLED[installed][1]
    assert expected in apex_state()
    if expected != "complete":
        assert "complete" not in apex_state()


def test_auto_takes_only_a_complete_apex_and_only_on_a_gpu(installed: str) -> None:
    assert choose_backend("torch", GPU) == "torch"
    assert choose_backend("auto", CPU) == "torch"
    assert choose_backend("auto", GPU, torch.float64) == "torch"
    assert choose_backend("auto", GPU) == ("apex" if installed == "complete" else "torch")


def test_apex_that_was_asked_for_and_cannot_serve_is_an_error(installed: str) -> None:
    if installed == "complete":
        assert choose_backend("apex", GPU) == "apex"
        with pytest.raises(ConfigError, match="needs CUDA and fp32, not cpu"):
            choose_backend("apex", CPU)
        with pytest.raises(ConfigError, match="cannot leave a step out"):
            choose_backend("apex", GPU, skips=True)
        assert choose_backend("auto", GPU, skips=True) == "torch"
        return
    for device in (CPU, GPU):
        with pytest.raises(ConfigError) as caught:
            choose_backend("apex", device)
        assert caught.value.field == "optim.backend"
        assert INSTALLED[installed][1] in str(caught.value)
        assert "optim.backend=torch" in caught.value.fix


def test_no_requirement_names_apex() -> None:
    root = Path(__file__).resolve().parents[2]
    lock = (root / "requirements.lock").read_text().lower()
    setup = (root / "setup.py").read_text() + (root / "pyproject.toml").read_text()
    assert tomllib.loads((root / "pyproject.toml").read_text())
    assert "torch==" in lock
    assert not [line for line in lock.splitlines() if line.startswith("apex")]
    assert not [line for line in setup.splitlines() if '"apex' in line and "apex.*" not in line]
