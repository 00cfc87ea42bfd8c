"""What each kind of layer costs, in plain numbers: by formula, or as measured. No torch.

A model has three kinds of layer: the embedding, the blocks, and the head with the loss. Costs are
those of one microbatch on one tp rank, by pass: F forward, I input gradient, W weight gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from model.config import GPTConfig

FLOPS_PER_BYTE = 100.0
"""Operations that take as long as moving one byte: 10 on a CPU core, 150 to 300 in bf16 on GPUs
since 2020. It only matters where much is moved for few operations, as in the embedding."""
_SUM_BYTES = 4  # of an element of a gradient sum or of the loss


@dataclass(frozen=True)
class Passes:
    """A number for each of F, I and W; B is I and W."""

    forward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.input_grad + self.weight_grad

    def __add__(self, other: Passes) -> Passes:
        return Passes(
            self.forward + other.forward,
            self.input_grad + other.input_grad,
            self.weight_grad + other.weight_grad,
        )

    def __mul__(self, by: float) -> Passes:
        return Passes(self.forward * by, self.input_grad * by, self.weight_grad * by)


@dataclass(frozen=True)
class LayerCost:
    """Of one layer, or of several.

    Attributes:
        time: in seconds, or any unit.
        num_elements: parameters held.
        kept_bytes: activations kept from F until the microbatch's backward has ended.
    """

    time: Passes = Passes()
    num_elements: int = 0
    kept_bytes: int = 0

    def __add__(self, other: LayerCost) -> LayerCost:
        return LayerCost(
            self.time + other.time,
            self.num_elements + other.num_elements,
            self.kept_bytes + other.kept_bytes,
        )

    def __mul__(self, by: int) -> LayerCost:
        return LayerCost(self.time * by, self.num_elements * by, self.kept_bytes * by)


@dataclass(frozen=True)
class ModelCosts:
    """The cost of each kind of layer; ``stages`` gives what a simulator takes."""

    embedding: LayerCost
    block: LayerCost
    head: LayerCost

    def stages(self, layers: Sequence[range]) -> list[LayerCost]:
        """The cost of each stage of a split, from stage -> its blocks."""
        found = [self.block * len(blocks) for blocks in layers]
        found[0] += self.embedding
        found[-1] += self.head
        return found


@dataclass(frozen=True)
class LayerWork:
    """What one layer has to do: operations, and bytes read and written, to first order."""

    flops: Passes
    moved_bytes: Passes
    num_elements: int
    kept_bytes: int

    def cost(self, flops_per_byte: float) -> LayerCost:
        """Its time in operations, a byte moved counting as so many."""
        time = self.flops + self.moved_bytes * flops_per_byte
        return LayerCost(time, self.num_elements, self.kept_bytes)


@dataclass(frozen=True)
class ModelWork:
    """The work of each kind of layer."""

    embedding: LayerWork
    block: LayerWork
    head: LayerWork

    def costs(self, flops_per_byte: float = FLOPS_PER_BYTE) -> ModelCosts:
        """In operations."""
        kinds = self.embedding, self.block, self.head
        return ModelCosts(*(kind.cost(flops_per_byte) for kind in kinds))


def model_work(
    cfg: GPTConfig,
    micro_batch_size: int,
    tp: int = 1,
    *,
    element_bytes: int = 2,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> ModelWork:
    """Of a microbatch of full sequences, on one tp rank.

    Causal attention counts half of the score matrix, and 2.5 times its forward in I, where the
    scores are computed again (Dao 2023, arXiv:2307.08691, section 3.1.2). A tied head counts its
    matrix too: it holds a copy unless it shares a rank with the embedding. What is computed again
    counts in I: under ``recompute`` full a block keeps its input only.
    """
    n, cut = micro_batch_size * cfg.seq_length, tp if sequence_parallel else 1
    return ModelWork(
        _embedding(cfg, n, tp, cut, element_bytes),
        _recomputed(cfg, n, tp, cut, element_bytes, recompute),
        _head(cfg, n, tp, cut, element_bytes),
    )


def block_elements(cfg: GPTConfig, tp: int = 1) -> int:
    """Parameters of a block that a tp rank holds."""
    d, q, kv, ffn = cfg.hidden_size, *_widths(cfg, tp)
    ups = _ups(cfg)
    biases = q + 2 * kv + ups * ffn + 2 * d if cfg.bias else 0
    return d * (2 * q + 2 * kv + (ups + 1) * ffn) + biases + 2 * _norm_elements(cfg)


def embedding_elements(cfg: GPTConfig, tp: int = 1) -> int:
    """Parameters of the embedding on a tp rank, padding included."""
    positions = cfg.seq_length * cfg.hidden_size if cfg.position == "learned" else 0
    return _rows(cfg, tp) * cfg.hidden_size + positions


def head_elements(cfg: GPTConfig, tp: int = 1) -> int:
    """Parameters of the final norm and the head on a tp rank, padding included."""
    return _rows(cfg, tp) * cfg.hidden_size + _norm_elements(cfg)


def _rows(cfg: GPTConfig, tp: int) -> int:
    return -(-cfg.vocab_size // tp)


def _ups(cfg: GPTConfig) -> int:
    """Matrices into the MLP."""
    return 2 if cfg.activation == "swiglu" else 1


def _widths(cfg: GPTConfig, tp: int) -> tuple[int, int, int]:
    """A tp rank's features of queries, of keys, and of the MLP."""
    kv = max(cfg.kv_heads // tp, 1) * cfg.head_dim
    return cfg.num_heads // tp * cfg.head_dim, kv, cfg.ffn // tp


def _norm_elements(cfg: GPTConfig) -> int:
    return cfg.hidden_size * (2 if cfg.norm == "layernorm" else 1)


def _block(cfg: GPTConfig, n: int, tp: int, cut: int, size: int) -> LayerWork:
    d, q, kv, ffn = cfg.hidden_size, *_widths(cfg, tp)
    ups = _ups(cfg)
    products = 2.0 * n * d * (2 * q + 2 * kv + (ups + 1) * ffn)
    attention = 2.0 * n * cfg.seq_length * q
    flops = Passes(products + attention, products + 2.5 * attention, products)
    # Inputs and outputs of two norms; q, k, v and the attention's output; what the MLP's
    # activation takes and makes (of a gated one, the gate before and after SiLU). Korthikanti et
    # al. 2022 (arXiv:2205.05198), table 2, whose masks of dropout are a byte each.
    inner = 2 * q + 2 * kv + 2 * ups * ffn
    kept = n * (size * (4 * d // cut + inner) + 2 * _mask_bytes(cfg, cut))
    elements = block_elements(cfg, tp)
    return LayerWork(flops, _moved(elements, kept, size), elements, kept)


def _mask_bytes(cfg: GPTConfig, cut: int) -> int:
    """Of one dropout of a token."""
    return cfg.hidden_size // cut if cfg.dropout else 0


def _recomputed(cfg: GPTConfig, n: int, tp: int, cut: int, size: int, recompute: str) -> LayerWork:
    """A block of which a part is computed again. A fused attention keeps nothing to speak of but
    what it takes and gives: there, selective only takes time."""
    block = _block(cfg, n, tp, cut, size)
    flops, moved = block.flops, block.moved_bytes
    if recompute == "full":
        again = Passes(0.0, flops.forward)
        kept = n * size * cfg.hidden_size // cut
        return LayerWork(
            flops + again, moved + Passes(0.0, moved.forward), block.num_elements, kept
        )
    if recompute == "selective":
        attention = 2.0 * n * cfg.seq_length * _widths(cfg, tp)[0]
        return replace(block, flops=flops + Passes(0.0, attention))
    return block


def _moved(elements: int, kept: float, size: int) -> Passes:
    """F writes what it keeps and reads it once; I reads it and works on as much again; W reads it
    and adds to the fp32 sums."""
    return Passes(
        elements * size + 2.0 * kept,
        elements * size + 3.0 * kept,
        2.0 * elements * _SUM_BYTES + kept,
    )


def _embedding(cfg: GPTConfig, n: int, tp: int, cut: int, size: int) -> LayerWork:
    """The gradient's rows are added in I, where there is no input to have a gradient."""
    rows = float(n * cfg.hidden_size)
    moved = Passes(2 * rows * size, rows * (size + 2 * _SUM_BYTES))
    # Token ids twice, which are another rank's, and a mask of dropout.
    kept = n * (16 + (1 if tp > 1 else 0) + _mask_bytes(cfg, cut))
    return LayerWork(Passes(), moved, embedding_elements(cfg, tp), kept)


def _head(cfg: GPTConfig, n: int, tp: int, cut: int, size: int) -> LayerWork:
    """The loss keeps its exponentials in fp32 at least; they become the gradient."""
    d, rows = cfg.hidden_size, _rows(cfg, tp)
    product = 2.0 * n * d * rows
    wide = max(size, _SUM_BYTES)
    kept = n * (2 * d * size // cut + rows * wide)
    elements = head_elements(cfg, tp)
    return LayerWork(
        Passes(product, product, product), _moved(elements, kept, size), elements, kept
    )
