"""Every command of the README is run, with a small model and in a folder of its own."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.launch.command import ROOT, SMALL, run

README = (ROOT / "README.md").read_text(encoding="utf-8")
TEMPLATES = ("git clone", "bash launch/torchrun.sh --config FILE", "sbatch ")
MAKE = re.compile(r"make ([\w-]+)")


def commands() -> list[str]:
    """The lines of the README's shell blocks, without their comments."""
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands' own files lie: a text, and a finished run."""
    place = tmp_path_factory.mktemp("readme")
    words = [f"word{i % 97} and thing{i % 31}" for i in range(40000)]
    paragraphs = [" ".join(words[i : i + 40]) for i in range(0, len(words), 40)]
    (place / "my.txt").write_text("\n".join(paragraphs))
    (place / "runs").mkdir()
    (place / "corpora").mkdir()
    command = [sys.executable, "launch/pretrain_gpt.py"]
    flags = ["--config", "launch/configs/gpt_tiny_cpu.yaml", *SMALL, "--train.steps", "2"]
    flags += ["--checkpoint.every", "2"]
    done = run([*command, *flags, "--run.dir", str(place / "runs/my_run")])
    assert done.code == 0, done.output
    return place


def placed(word: str, folder: Path) -> str:
    """Files that the README invents lie in ``folder``."""
    invented = word.startswith(("my.", "corpora/mine", "runs/my_run"))
    return str(folder / word) if invented else word


@pytest.mark.parametrize("line", commands())
def test_a_command_of_the_readme_works(line: str, folder: Path, tmp_path: Path) -> None:
    if line.startswith(TEMPLATES):
        script = next((w for w in shlex.split(line) if w.startswith("launch/")), None)
        assert script is None or run(["bash", "-n", script]).code == 0
        return
    if target := MAKE.fullmatch(line):
        done = run(["make", "-n", target[1]])
        assert done.code == 0, done.output
        return
    if "--from-hf" in line and not (folder / "runs/my_run/hf").exists():
        test_a_command_of_the_readme_works(
            next(c for c in commands() if "--to hf" in c), folder, tmp_path
        )
    words = [placed(word, folder) for word in shlex.split(line)]
    if words[0] == "torchrun":
        words[:1] = ["python", "-m", "torch.distributed.run", "--standalone"]
    assert words[0] == "python", f"no rule for {line!r}"
    words[0] = sys.executable
    if "launch/pretrain_gpt.py" in words:
        extra = [*SMALL, "--train.steps", "2", "--run.dir", str(tmp_path / "run")]
        words = [*words, *extra]
    if "--vocab-size" in words:
        words[words.index("--vocab-size") + 1] = "300"
    done = run(words)
    assert done.code == 0, done.output


def test_the_readme_is_short_and_its_files_exist() -> None:
    assert len(README.splitlines()) < 200
    for name in set(re.findall(r"`(\w+/[\w/]+\.(?:py|md|sh|yaml))`", README)):
        found = (ROOT / name).exists() or list(ROOT.glob(f"*/**/{name}"))
        assert found, f"README names {name}"
