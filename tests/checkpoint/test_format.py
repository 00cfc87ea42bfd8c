"""The format of a checkpoint does not change unnoticed."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from megalite.checkpoint.load import open_checkpoint
from megalite.checkpoint.manifest import MANIFEST
from megalite.checkpoint.piece import view
from megalite.slices import Piece
from tests.checkpoint.jobs import (
    names_in,
    save_job,
    whole,
)

FORMAT_1 = Path(__file__).parent / "format_1" / "step_00000003"


def format_1_hands() -> list[list[Piece]]:
    w = torch.arange(12, dtype=torch.float32).reshape(3, 4) / 8
    s = torch.tensor(-0.5, dtype=torch.bfloat16)
    n = torch.arange(5, dtype=torch.int64)
    return [
        [Piece("w", (3, 4), (0, 0), view(w, (0, 0), ((0, 0), (3, 1)))), Piece("s", (), (), s)],
        [Piece("w", (3, 4), (0, 1), view(w, (0, 0), ((0, 1), (3, 3)))), Piece("n", (5,), (0,), n)],
    ]


def test_a_stored_checkpoint_of_format_1_is_read() -> None:
    state = {
        "w": torch.zeros(3, 4),
        "s": torch.zeros((), dtype=torch.bfloat16),
        "n": torch.zeros(5, dtype=torch.int64),
    }
    checkpoint = open_checkpoint(FORMAT_1)
    checkpoint.read(whole(state))
    assert checkpoint.extra == {"samples": 24}
    assert state["w"].flatten().tolist() == [i / 8 for i in range(12)]
    assert state["s"].item() == -0.5
    assert state["n"].tolist() == [0, 1, 2, 3, 4]


def test_format_1_is_still_written(tmp_path: Path) -> None:
    """Shards byte for byte, and a manifest of the same content: its hash is of that."""
    path = save_job(tmp_path, 3, format_1_hands(), {"samples": 24})
    assert names_in(path) == names_in(FORMAT_1)
    manifest, stored = (json.loads((x / MANIFEST).read_text()) for x in (path, FORMAT_1))
    assert manifest == stored and list(manifest) == list(stored) and stored["format"] == 1
    for file in set(path.iterdir()) - {path / MANIFEST}:
        assert file.read_bytes() == (FORMAT_1 / file.name).read_bytes(), file.name


def test_a_manifest_has_a_line_for_each_file_and_tensor(tmp_path: Path) -> None:
    path = save_job(tmp_path, 3, format_1_hands(), {"samples": 24})
    lines = [line.strip() for line in (path / MANIFEST).read_text().splitlines()]
    for start in ('"rank_00000_000.safetensors": {', '"w": {', '"s": {', '"n": {', '"extra": {'):
        assert sum(line.startswith(start) for line in lines) == 1, start
