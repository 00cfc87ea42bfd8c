"""The held-out loss is that of one process, again and again, and training does not notice it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data.dataset import TokenDataset
from data.loader import EvalLoader
from launch.build import Training, build
from launch.config import Config
from launch.job import share_text
from launch.pretrain_gpt import evaluate
from launch.state import Position, open_saver, restore, save_state
from megalite.checkpoint.load import open_checkpoint
from megalite.errors import ConfigError
from megalite.mesh import Mesh, Transport
from megalite.parallel_config import mesh_shape
from tests.data.shards import write_shards
from tests.parity.harness import GPT2, TRAIN, batch_of, config
from tests.ranks import run_ranks

TOKENS = 333  # 21 windows of 16: neither the last window nor the last batch of 6 is full
MODEL = replace(GPT2, dropout=0.2)


def config_of(**layout: Any) -> Config:
    return config(MODEL, train=TRAIN, **layout)


def loss_of(training: Training, directory: Path, max_batches: int = 0) -> tuple[float, float]:
    mesh = training.mesh
    loader = EvalLoader(
        TokenDataset.open(directory, "val"),
        seq_length=MODEL.seq_length,
        global_batch_size=TRAIN.global_batch_size,
        micro_batch_size=TRAIN.micro_batch_size,
        dp_index=mesh.dp.index,
        dp_size=mesh.dp.size,
        max_batches=max_batches,
    )
    return evaluate(training, [loader])


def step(training: Training, number: int) -> float:
    dp = training.mesh.dp
    batch = batch_of(training.cfg, number, dp.index, dp.size)
    return float(training.step(batch, 1e-2).loss)


def rank(transport: Transport, directory: Path, root: Path, cfg: Config) -> list[Any]:
    """Losses of training and evaluation, with a save in between, and those after a restore."""
    mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
    training = build(cfg, mesh)
    found: list[Any] = [step(training, 0)]
    save_state(training, Position(1, 6, 96, 1), open_saver(training, share_text(mesh), root))
    path = root / "step_00000001"
    found += [loss_of(training, directory, most) for most in (0, 0, 2, 999)]
    found.append(step(training, 1))
    restore(training, open_checkpoint(path), share_text(mesh))
    found += [loss_of(training, directory), step(training, 1)]
    mesh.close()
    return found


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = torch.Generator().manual_seed(1)
    directory = tmp_path_factory.mktemp("val") / "a"
    ids = torch.randint(2, MODEL.vocab_size, (TOKENS - 1,), generator=draw)
    write_shards(directory, [ids.tolist()], name="val")
    return directory


def test_every_layout_evaluates_as_one_process_and_training_goes_on_as_without(
    held_out: Path, tmp_path: Path
) -> None:
    (alone,) = run_ranks(1, rank, held_out, tmp_path / "alone", config_of())
    first, whole, again, part, beyond, second, restored, repeated = alone
    assert whole == again == beyond == restored and part != whole
    assert second == repeated
    layout = config_of(tp=2, pp=2, sequence_parallel=True)
    for got in run_ranks(8, rank, held_out, tmp_path / "eight", layout):
        flat = torch.tensor([first, *whole, *again, *part, *beyond, second, *restored, repeated])
        ours = torch.tensor([x for each in got for x in (each if type(each) is tuple else [each])])
        torch.testing.assert_close(ours, flat, rtol=1e-6, atol=0)
    training = build(config_of(), Mesh.single())
    assert step(training, 0) == pytest.approx(first, rel=1e-12)
    assert step(training, 1) == pytest.approx(second, rel=1e-12)
    undropped = build(config(GPT2, train=TRAIN), Mesh.single())
    assert step(undropped, 0) != pytest.approx(first, rel=1e-6)


def test_without_held_out_text_there_is_a_clear_error(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", [[2, 3, 4]])
    with pytest.raises(ConfigError, match="holds no split 'val'"):
        TokenDataset.open(tmp_path / "a", "val")
