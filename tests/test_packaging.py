from __future__ import annotations

import importlib
import pkgutil
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import megalite

ROOT = Path(__file__).resolve().parents[1]
NO_TORCH = ("errors", "trace", "config", "mesh_shape", "schedule", "parallel_config", "planner")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """What setup.py hands to setuptools."""
    given: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr("setuptools.setup", given.update)
        runpy.run_path("setup.py")
    return given


@pytest.fixture(scope="module")
def lock() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line.partition("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, _, version in pins}


@pytest.mark.parametrize("name", ["megalite", "model", "data", "launch", "tools"])
def test_a_package_is_imported_from_this_checkout(name: str, project: dict[str, Any]) -> None:
    file = importlib.import_module(name).__file__
    assert file is not None and Path(file).resolve() == ROOT / name / "__init__.py"
    assert name in project["packages"]


def test_every_folder_of_code_is_packaged(project: dict[str, Any]) -> None:
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for name in ("megalite", "model", "data", "launch", "tools")
        for path in (ROOT / name).rglob("*.py")
    }
    assert folders == set(project["packages"])


def test_the_lock_has_every_requirement_in_its_range(
    project: dict[str, Any], lock: dict[str, str]
) -> None:
    wanted = [*project["install_requires"], *project["extras_require"]["dev"]]
    for requirement in map(Requirement, wanted):
        version = lock[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} but {version}"
        assert len(list(requirement.specifier)) > 0
    assert not Requirement("torch>=2.13,<2.14").specifier.contains("2.12.0")


def test_the_lock_is_exact_and_leaves_the_choice_of_cuda_to_torch(lock: dict[str, str]) -> None:
    assert len(lock) > 50
    for name, version in lock.items():
        assert version and "+" not in version and " " not in version, name
        assert not name.startswith(("nvidia-", "cuda-")) and name not in ("triton", "pip")


def test_apex_is_no_requirement_for_the_index_has_another_one(
    project: dict[str, Any], lock: dict[str, str]
) -> None:
    wanted = [*project["install_requires"], *project["extras_require"]["dev"], *lock]
    assert "apex" not in {canonicalize_name(Requirement(w).name) for w in wanted}


def loaded(imports: list[str], watched: list[str]) -> list[str]:
    """Which of ``watched`` a fresh process has loaded after ``imports``."""
    code = f"import sys, {', '.join(imports)}\nprint(*(set({watched}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return sorted(done.stdout.split())


def test_what_needs_no_processes_loads_no_torch() -> None:
    modules = [
        module.name
        for module in pkgutil.walk_packages(megalite.__path__, "megalite.")
        if module.name.split(".")[1] in NO_TORCH
    ]
    assert len(modules) >= len(NO_TORCH) - 2
    assert loaded([*modules, "model.config", "data.config"], ["torch", "json"]) == ["json"]


def test_reading_the_config_loads_nothing_that_takes_long() -> None:
    slow = ["datasets", "pyarrow", "sentencepiece", "transformers", "wandb"]
    assert loaded(["launch.config"], [*slow, "yaml"]) == ["yaml"]


def test_data_loads_its_packages_where_they_are_used() -> None:
    watched = ["datasets", "pyarrow", "sentencepiece", "torch", "numpy"]
    assert loaded(["data.prepare", "data.dataset"], watched) == ["numpy"]
