"""Text from a model in training, or from a checkpoint, in whatever layout it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from launch.build import Training, build_stages, forward_plan
from launch.config import Config
from megalite.checkpoint.load import Checkpoint
from megalite.checkpoint.manifest import Share, together
from megalite.errors import CheckpointError, ConfigError
from megalite.mesh import Mesh
from megalite.pipeline.executor import Batch, Executor
from megalite.pipeline.p2p import Channels
from megalite.pipeline.stage import Stage
from megalite.schedule.action import Plan
from megalite.slices import Piece, get_slice
from model.generate import Decoder, Sampling, generate
from model.gpt import Block, GPTStage


def sample(
    training: Training,
    prompt: Sequence[int],
    max_new_tokens: int,
    vocab_size: int,
    *,
    temperature: float = 0.7,
    seed: int = 0,
    stop: Callable[[int], bool] = lambda token: False,
) -> list[int]:
    """Token ids that go on from ``prompt`` (not empty); collective, the same on every rank.

    Only the first ``vocab_size`` ids are drawn: the tokenizer's, of which the model may have more.
    A draw depends on (seed, its number) only. ``temperature`` 0 takes the likeliest token. Stops
    before a token for which ``stop`` is true.
    """
    cfg, mesh = training.cfg, training.mesh

    def forward(tokens: Tensor, places: Tensor | None) -> Tensor | None:
        return training.forward(one_batch(tokens, places))

    # A window that is cut over tp has to be whole.
    cut = cfg.parallel.sequence_parallel and mesh.tp.size > 1
    model = decoder(forward, training.gpt, mesh, training.plan, cfg.model.seq_length, keeps=not cut)
    sampling = Sampling(temperature, seed=seed, num_ids=vocab_size)
    return generate(model, [prompt], max_new_tokens, sampling, stop=stop)[0]


def load_decoder(
    cfg: Config, mesh: Mesh, checkpoint: Checkpoint, share: Share, eod: int
) -> Decoder:
    """The weights of a checkpoint alone, in ``cfg.train.dtype``; collective over the mesh.

    Raises:
        ConfigError: the same on every rank, naming the file that is damaged.
    """
    plan = forward_plan(tuple(range(mesh.pp.size)), 1)
    gpt = build_stages(cfg, mesh, plan, eod=eod)
    files = checkpoint.files_to_verify(mesh.rank, mesh.shape.world_size)
    try:
        together(share, lambda: checkpoint.verify(files))
        checkpoint.read(_empty(gpt), cast=True, share=share)
    except CheckpointError as error:
        raise ConfigError("--checkpoint", str(error), "Name a good one") from error
    stages = {
        s: Stage(module, s, plan.num_stages, module.layout.sink, module.layout.dtype, mesh.device)
        for s, module in gpt.items()
    }
    executor = Executor(mesh.pp.index, stages, Channels(mesh, plan))

    def forward(tokens: Tensor, places: Tensor | None) -> Tensor | None:
        return executor.run(plan, one_batch(tokens, places))

    return decoder(forward, gpt, mesh, plan, cfg.model.seq_length)


def _empty(gpt: Mapping[int, GPTStage]) -> Iterator[Piece]:
    """What the stages hold of the global weights; the padding is set to zero here."""
    for stage in gpt.values():
        for param in stage.parameters():
            at = get_slice(param)
            param.data.zero_()
            yield Piece(at.name, at.shape, at.offset, at.valid(param.data))


def one_batch(tokens: Tensor, places: Tensor | None) -> Batch:
    """One microbatch of (b, s) tokens."""
    return Batch(tokens.unsqueeze(0), None, places=None if places is None else places.unsqueeze(0))


def decoder(
    forward: Callable[[Tensor, Tensor | None], Tensor | None],
    gpt: Mapping[int, GPTStage],
    mesh: Mesh,
    plan: Plan,
    context: int,
    *,
    keeps: bool = True,
) -> Decoder:
    """What generates with the stages of one rank."""
    blocks = [b for stage in gpt.values() for b in stage.blocks if isinstance(b, Block)]
    last, border = plan.rank_of[-1], next(iter(gpt.values())).eod
    return Decoder(forward, blocks, context, mesh.tp, mesh.pp, last, mesh.device, border, keeps)
