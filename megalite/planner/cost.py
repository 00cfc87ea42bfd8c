"""What the layers of a model cost on one tp rank, for one microbatch. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.planner.constants import Framework
from megalite.planner.kernels import Kernels
from megalite.planner.shape import ModelShape

_MASK = 1  # bytes of a dropout mask
_WIDE = 4  # bytes of fp32
_BESIDE = 0.8  # of the weight products' time, what a collective beside them may take for nothing


@dataclass(frozen=True)
class Passes:
    """Seconds of F, I and W: what the device takes, and what the host takes to ask for it."""

    forward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0
    host_forward: float = 0.0
    host_backward: float = 0.0

    def __add__(self, other: Passes) -> Passes:
        return Passes(
            self.forward + other.forward,
            self.input_grad + other.input_grad,
            self.weight_grad + other.weight_grad,
            self.host_forward + other.host_forward,
            self.host_backward + other.host_backward,
        )

    def times(self, n: float) -> Passes:
        return Passes(
            self.forward * n,
            self.input_grad * n,
            self.weight_grad * n,
            self.host_forward * n,
            self.host_backward * n,
        )


@dataclass(frozen=True)
class Split:
    """How a layer is cut, and what is computed twice."""

    tp: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"

    @property
    def cut(self) -> int:
        """Parts of the sequence where layers are not cut."""
        return self.tp if self.sequence_parallel else 1


class LayerCosts:
    """Times of the three kinds of layer for one microbatch of ``sequences``."""

    def __init__(
        self,
        shape: ModelShape,
        split: Split,
        sequences: int,
        kernels: Kernels,
        framework: Framework,
    ) -> None:
        self.shape, self.split, self.kernels, self.framework = shape, split, kernels, framework
        self.sequences, self.n = sequences, sequences * shape.seq
        self.size = kernels.element_bytes

    # --- a transformer layer ---------------------------------------------------------------------

    def layer(self) -> Passes:
        forward, f_kernels = self._forward()
        core, core_kernels = self.attention_forward()
        again, k_again = {
            "none": (0.0, 0),
            "selective": (core, core_kernels),
            "full": (forward, f_kernels),
        }[self.split.recompute]
        exchange, collectives = self.exchange()
        if self.split.recompute == "full":
            again += exchange
        input_grad, weight_grad, b_kernels = self._backward()
        hidden = self._hidden_exchange(weight_grad)
        c = self.kernels.c
        launch = self.kernels.hw.launch_s
        waits = collectives * self.wait if launch else 0.0
        host_f = launch * c.launch_forward * (f_kernels + collectives) + waits
        host_again = launch * c.launch_forward * k_again
        if self.split.recompute == "full":
            host_again += launch * c.launch_forward * collectives + waits
        host_b = launch * c.launch_backward * (b_kernels + collectives) + waits
        return Passes(
            forward + exchange,
            input_grad + again + hidden,
            weight_grad,
            host_f,
            host_again + host_b,
        )

    def _forward(self) -> tuple[float, int]:
        """Device seconds without collectives, and the number of kernels."""
        k, s, n, size = self.kernels, self.shape, self.n, self.size
        d, (q, kv, ffn) = s.hidden, s.widths(self.split.tp)
        rows = n / self.split.cut
        products = (
            k.gemm(n, q + 2 * kv, d)
            + k.gemm(n, d, q)
            + k.gemm(n, s.ups * ffn, d)
            + k.gemm(n, d, ffn)
        )
        norms = 2 * k.stream(2 * rows * d * size)
        mask = _MASK if self._dropout else 0
        residuals = 2 * k.stream(rows * d * (3 * size + mask))
        activation = k.stream(n * ffn * size * (1 + s.ups), "activation")
        rotary = k.stream(2 * n * (q + kv) * size) if not s.learned_positions else 0.0
        core, core_kernels = self.attention_forward()
        kernels = 4 + 2 + 2 + 1 + (4 if not s.learned_positions else 0) + core_kernels
        return products + norms + residuals + activation + rotary + core, kernels

    @property
    def _dropout(self) -> bool:
        return self.shape.dropout or self.framework.dropout

    @property
    def _scores(self) -> tuple[float, float]:
        """Matrices of scores on this rank, and their elements."""
        batch = self.sequences * self.shape.heads / self.split.tp
        return batch, batch * self.shape.seq**2

    def _attention_flops(self) -> float:
        return 4.0 * self._scores[1] * self.shape.head_dim

    def attention_forward(self) -> tuple[float, int]:
        k, s = self.kernels, self.shape
        if s.fused_attention:
            return k.flash(self._attention_flops() / 2), 1
        batch, scores = self._scores
        size, mask = self.size, _MASK if self._dropout else 0
        products = k.gemm(s.seq, s.seq, s.head_dim, batch) + k.gemm(s.seq, s.head_dim, s.seq, batch)
        softmax = k.stream(2 * scores * size)
        dropout = k.stream(scores * (2 * size + mask)) if self._dropout else 0.0
        turned = k.stream(2 * 2 * self.n * s.widths(self.split.tp)[0] * size)
        return products + softmax + dropout + turned, 7

    def _attention_backward(self) -> tuple[float, int]:
        k, s = self.kernels, self.shape
        if s.fused_attention:
            return k.flash(2.5 * self._attention_flops() / 2), 3
        batch, scores = self._scores
        size, mask = self.size, _MASK if self._dropout else 0
        products = 2 * (
            k.gemm(s.seq, s.seq, s.head_dim, batch) + k.gemm(s.seq, s.head_dim, s.seq, batch)
        )
        softmax = k.stream(3 * scores * size)
        dropout = k.stream(scores * (2 * size + mask)) if self._dropout else 0.0
        turned = k.stream(4 * 2 * self.n * s.widths(self.split.tp)[0] * size)
        return products + softmax + dropout + turned, 11

    def _backward(self) -> tuple[float, float, int]:
        """Device seconds of I and W without collectives, and the number of kernels."""
        k, s, n, size = self.kernels, self.shape, self.n, self.size
        d, (q, kv, ffn) = s.hidden, s.widths(self.split.tp)
        rows = n / self.split.cut
        inputs = (
            k.gemm(n, d, q + 2 * kv)
            + k.gemm(n, q, d)
            + k.gemm(n, d, s.ups * ffn)
            + k.gemm(n, ffn, d)
        )
        norms = 2 * k.stream(5 * rows * d * size)
        mask = _MASK if self._dropout else 0
        residuals = 2 * k.stream(rows * d * (3 * size + (2 * size + mask if self._dropout else 0)))
        activation = k.stream(n * ffn * size * (1 + 2 * s.ups), "activation")
        biases = k.stream(n * size * (2 * d / self.split.cut + q + 2 * kv + ffn)) if s.bias else 0.0
        rotary = k.stream(2 * n * (q + kv) * size) if not s.learned_positions else 0.0
        core, core_kernels = self._attention_backward()
        weights = (
            k.gemm(q + 2 * kv, d, n)
            + k.gemm(d, q, n)
            + k.gemm(s.ups * ffn, d, n)
            + k.gemm(d, ffn, n)
        )
        weights += self.sum_gradients(s.layer_elements(self.split.tp))
        input_grad = inputs + norms + residuals + activation + biases + rotary + core
        summed = 0 if self.framework.fused_sum else 8
        return input_grad, weights, 8 + 4 + 4 + 2 + 4 + summed + core_kernels

    def sum_gradients(self, elements: float) -> float:
        """Adding a microbatch's gradient to the sum: the sum is read and written; without a
        fused kernel the gradient is written and read as well."""
        whole = 2 * self.framework.grad_bytes
        if not self.framework.fused_sum:
            whole += self.size
        return self.kernels.stream(elements * whole)

    # --- collectives of tensor parallelism -------------------------------------------------------

    def exchange(self) -> tuple[float, int]:
        """Of a forward pass: two all-reduces, or as many gathers and scatters."""
        tp, k = self.split.tp, self.kernels
        if tp == 1:
            return 0.0, 0
        whole = float(self.n * self.shape.hidden * self.size)
        wait = self.wait
        if self.split.sequence_parallel:
            return 4 * k.all_gather(whole, tp) + 2 * wait, 4
        return 2 * (k.all_reduce(whole, tp) + wait), 2

    @property
    def wait(self) -> float:
        """Until the last of the ranks has come."""
        tp = self.split.tp
        return self.kernels.c.sync * max(0, (tp - 1).bit_length())

    def _hidden_exchange(self, weight_grad: float) -> float:
        """Of a backward pass, what does not hide behind the weight products. Under sequence
        parallelism the gathers of output gradients stand before everything; the scatters hide, and
        the second gather of the inputs goes beside the input gradient."""
        exchange, _ = self.exchange()
        if not self.framework.overlap_tp or exchange == 0.0:
            return exchange
        waits = 2 * self.wait
        moved = exchange - waits
        hides = moved / 2 if self.split.sequence_parallel else moved
        shown = hides * (1 - self.kernels.hw.overlap)
        return waits + (moved - hides) + max(shown, hides - _BESIDE * weight_grad)

    # --- the ends --------------------------------------------------------------------------------

    def embedding(self) -> Passes:
        k, d = self.kernels, self.shape.hidden
        rows = float(self.n * d)
        mask = _MASK if self._dropout else 0
        parts = 3 if self.shape.learned_positions else 1
        forward = k.stream(rows * self.size * 2 * parts + rows * (2 * self.size + mask))
        back = k.stream(rows * (self.size + 2 * _WIDE) * (2 if parts == 3 else 1))
        elements = self.shape.embedding_elements(self.split.tp)
        reduce = 0.0
        if self.split.tp > 1:
            reduce = k.all_reduce(rows * self.size, self.split.tp) + self.wait
        if not self.framework.fused_sum:
            back += self.sum_gradients(elements)
        host = k.hw.launch_s * 6
        c = k.c
        return Passes(
            forward + reduce, back, 0.0, host * c.launch_forward, host * c.launch_backward
        )

    def head(self) -> Passes:
        """Final norm, logits and loss; the loss works in fp32 over its own logits."""
        k, s, n, size = self.kernels, self.shape, self.n, self.size
        d, v = s.hidden, s.rows(self.split.tp)
        norm = k.stream(2 * n / self.split.cut * d * size)
        logits = float(n * v)
        # Cast, maximum, subtract, gather, exponential, sum, and the quotient that is kept.
        passes = size + _WIDE * (1 + 1 + 2 + 2 + 1 + 2)
        loss = k.stream(k.c.loss * logits * passes)
        back = k.stream(k.c.loss * logits * (2 * _WIDE + _WIDE + size))
        whole = float(n * d * size)
        exchange = 0.0
        if self.split.tp > 1:
            exchange = k.all_reduce(whole, self.split.tp) + 3 * self.wait
        weights = k.gemm(v, d, n) + self.sum_gradients(s.head_elements(self.split.tp))
        host, c = k.hw.launch_s * 16, k.c
        return Passes(
            norm + k.gemm(n, v, d) + loss,
            k.gemm(n, d, v) + back + 2.5 * norm + exchange,
            weights,
            host * c.launch_forward,
            host * c.launch_backward,
        )
