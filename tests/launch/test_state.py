"""The state of a run as it is saved: once, and read back into any layout to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launch.build import build
from launch.config import Config
from launch.job import share_text
from launch.state import Position, open_saver, restore, save_state, state_pieces
from megalite.checkpoint.load import open_checkpoint
from megalite.checkpoint.save import save
from megalite.data_parallel import bucket as bucket_module
from megalite.mesh import Mesh, Transport
from megalite.parallel_config import mesh_shape
from model.config import GPTConfig
from tests.parity.harness import GPT2, LLAMA, TRAIN, Part, assemble, batch_of, config, parts
from tests.ranks import RankError, run_ranks

ZERO, SP = {"zero1": True}, {"sequence_parallel": True}
V2 = {"schedule": "interleaved_1f1b", "virtual_stages": 2}
STEP = 2
# ranks and layout; dp is what is left
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {}),
    (2, {**ZERO}),
    (3, {**ZERO}),
    (4, {"tp": 2, **SP, **ZERO}),
    (4, {"pp": 2, **V2, **ZERO}),
    (8, {"tp": 4, **SP, **ZERO}),
    (6, {"pp": 2}),
]
KINDS = [
    (replace(GPT2, vocab_size=257), "bf16"),
    (replace(LLAMA, tied_embeddings=True), "fp64"),
    (LLAMA, "fp32"),
]


def configs(layout: dict[str, Any]) -> list[Config]:
    return [
        config(model, train=replace(TRAIN, dtype=dtype), **layout)  # type: ignore[arg-type]
        for model, dtype in KINDS
    ]


def place(root: Path, layout: int, kind: int) -> Path:
    return root / f"{layout}.{kind}"


def saved(transport: Transport, root: Path, layout: int, smallest: int) -> list[list[Part]]:
    """Train and save each kind of model; this replica's share of what was saved."""
    bucket_module._SMALLEST = smallest  # this process ends with the body
    found = []
    for kind, cfg in enumerate(configs(LAYOUTS[layout][1])):
        mesh = _mesh(transport, cfg)
        training = build(cfg, mesh)
        for step in range(STEP):
            training.step(batch_of(cfg, step, mesh.dp.index, mesh.dp.size), cfg.optim.lr)
        saver = open_saver(training, place(root, layout, kind), share_text(mesh))
        save_state(training, _position(), saver)
        assert [saved.error for saved in saver.finished()] == [None]
        found.append(parts(state_pieces(training, share=True)))
        mesh.close()
    return found


def loaded(transport: Transport, root: Path, layout: int, smallest: int) -> Any:
    """Take up the checkpoint of every layout; share of the state, whole weights, positions."""
    bucket_module._SMALLEST = smallest
    found = []
    for kind, cfg in enumerate(configs(LAYOUTS[layout][1])):
        mesh = _mesh(transport, cfg)
        training = build(cfg, mesh)
        for other in range(len(LAYOUTS)):
            checkpoint = open_checkpoint(place(root, other, kind) / f"step_{STEP:08d}")
            position = restore(training, checkpoint, share_text(mesh))
            steps = {float(s["step"]) for s in training.optimizer.inner.state.values()}
            assert steps <= {float(position.updates)}
            found.append((parts(state_pieces(training, share=True)), position, _weights(training)))
        mesh.close()
    return found


def _weights(training: Any) -> list[tuple[str, tuple[int, ...], Tensor]]:
    return [(p.name, p.offset, p.tensor.clone()) for p in training.flat.weight_pieces()]


def _mesh(transport: Transport, cfg: Config) -> Mesh:
    if transport.world_size == 1:
        return Mesh.single()
    return Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)


def _position() -> Position:
    return Position(STEP, 12, 180, STEP)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A checkpoint of each layout and kind, and what it holds."""
    root = tmp_path_factory.mktemp("states")
    found = []
    for n, (ranks, _) in enumerate(LAYOUTS):
        parts_of = run_ranks(ranks, saved, root, n, 700 + 300 * n)
        found.append([assemble(r[kind] for r in parts_of) for kind in range(len(KINDS))])
    return root, found


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(n, marks=[pytest.mark.full] if layout[0] > 4 else [], id=str(layout))
        for n, layout in enumerate(LAYOUTS)
    ],
)
def test_any_layout_reads_the_state_of_any_other_to_the_bit(
    layout: int, checkpoints: tuple[Path, list[Any]]
) -> None:
    root, expected = checkpoints
    ranks = run_ranks(LAYOUTS[layout][0], loaded, root, layout, 900)
    tried = [(kind, other) for kind in range(len(KINDS)) for other in range(len(LAYOUTS))]
    for n, (kind, other) in enumerate(tried):
        want = expected[other][kind]
        got = assemble(rank[n][0] for rank in ranks)
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor), f"{name} of {LAYOUTS[other]}"
        for rank in ranks:
            assert rank[n][1] == _position()
            for name, offset, part in rank[n][2]:
                at = tuple(slice(o, o + e) for o, e in zip(offset, part.shape, strict=True))
                assert torch.equal(want[name][at], part), f"{name} on a replica"


def test_a_checkpoint_holds_every_tensor_of_the_state(
    checkpoints: tuple[Path, list[Any]],
) -> None:
    root, expected = checkpoints
    for kind, (model, dtype) in enumerate(KINDS):
        masters = ["optim.master."] if dtype == "bf16" else []
        for n in range(len(LAYOUTS)):
            checkpoint = open_checkpoint(place(root, n, kind) / f"step_{STEP:08d}")
            weights = [name for name in checkpoint.names if not name.startswith("optim.")]
            prefixes = ["", "optim.exp_avg.", "optim.exp_avg_sq.", *masters]
            assert set(checkpoint.names) == {p + name for p in prefixes for name in weights}
            assert sum(expected[n][kind][w].numel() for w in weights) == model.num_parameters()
            assert all(expected[n][kind][f"optim.exp_avg.{w}"].any() for w in weights)


def bytes_written(root: Path, layout: int, kind: int) -> list[int]:
    """Of each rank that wrote any."""
    found: dict[str, int] = {}
    for path in (place(root, layout, kind) / f"step_{STEP:08d}").glob("*.safetensors"):
        rank = path.name.split("_")[1]
        found[rank] = found.get(rank, 0) + path.stat().st_size
    return list(found.values())


@pytest.mark.parametrize("layout", [1, 2, 3])
def test_replicas_write_equal_shares(layout: int, checkpoints: tuple[Path, list[Any]]) -> None:
    for kind in range(len(KINDS)):
        sizes = bytes_written(checkpoints[0], layout, kind)
        assert len(sizes) == LAYOUTS[layout][0]
        assert max(sizes) < 1.25 * min(sizes), sizes  # small buckets have large fills


def save_everything(transport: Transport, root: Path, model: GPTConfig) -> None:
    """A fault: every replica writes all that it has."""
    mesh = Mesh.create(mesh_shape(config(model).parallel, 2), transport)
    training = build(config(model), mesh)
    options = {"rank": mesh.rank, "world_size": 2, "share": share_text(mesh)}
    try:
        save(root, 1, state_pieces(training), {}, **options)  # type: ignore[arg-type]
    finally:
        mesh.close()


def test_a_state_that_is_written_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="CheckpointError"):
        run_ranks(2, save_everything, tmp_path, GPT2)
