"""The kernels that ``measure`` times: those of a layer, with the data of a training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from launch.config import Config, TrainConfig
from launch.profile import Probe
from megalite.mesh import Axis, Mesh
from megalite.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from model.config import GPTConfig

_MB = 1 << 20
Body = Callable[[], object]


@dataclass(frozen=True)
class Sizes:
    """Of what is timed: like a layer of the models that train on such a device.

    Attributes:
        rows: tokens of a microbatch, of sequences of ``seq``.
        width, vocab: features of a token, and rows of the head.
        head: features of an attention head.
        update: parameters of an optimizer step.
    """

    rows: int
    width: int
    vocab: int
    seq: int
    head: int
    update: int


ON_CPU = Sizes(512, 512, 8192, 256, 64, 4 * _MB)
ON_ACCELERATOR = Sizes(8192, 4096, 32768, 2048, 128, 256 * _MB)
TINY = GPTConfig(num_layers=1, hidden_size=16, num_heads=1, seq_length=4, vocab_size=16)
"""Of its block nothing takes time but that there are kernels."""


def sizes_of(device: torch.device) -> Sizes:
    return ON_CPU if str(device) == "cpu" else ON_ACCELERATOR


KERNELS = (
    "products", "short", "attention", "activation", "stream", "head", "update", "block", "gap",
)  # fmt: skip


def bodies(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> dict[str, Body]:
    """What is timed, by name. Data is made anew or comes round after what else is timed."""
    return {
        "products": products(sizes.rows, sizes.width, device, dtype),
        "short": products(sizes.rows, sizes.width // 2, device, dtype),
        "attention": _attention(sizes, device, dtype),
        "activation": _activation(sizes, device, dtype),
        "stream": _stream(sizes, device, dtype),
        "head": _head(sizes, device, dtype),
        "update": _update(sizes.update, device),
        "block": _tiny_block(device),
        "gap": _gap(device, dtype),
    }


def linears(width: int) -> list[tuple[int, int]]:
    """(outputs, inputs) of the linears of a GPT-2 layer."""
    return [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]


def products(rows: int, width: int, device: torch.device, dtype: torch.dtype) -> Body:
    """F, I and W of a layer's linears."""

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    shapes = linears(width)
    inputs = {n: made(rows, n) for n in (width, 4 * width)}
    weights, biases = [made(*s) for s in shapes], [made(n) for n, _ in shapes]
    sums = [made(*s) for s in shapes]

    def body() -> Tensor:
        outputs = biases[0]
        for weight, bias, total in zip(weights, biases, sums, strict=True):
            x = inputs[weight.shape[1]]
            y = F.linear(x, weight, bias)
            outputs = y @ weight
            total.addmm_(y.t(), x)
        return outputs

    return body


def _attention(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Body:
    """Causal fused attention, forward and backward, of tensors that lie as a layer's do."""
    heads, batch = sizes.width // sizes.head, sizes.rows // sizes.seq
    shape = (sizes.seq, batch, heads, sizes.head)
    qkv = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    grad = torch.randn(shape, device=device, dtype=dtype)

    def body() -> Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)
        return torch.autograd.grad(y, qkv, grad)[0]

    return body


def _activation(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Body:
    """GELU, forward and backward."""
    shape = (sizes.rows, 4 * sizes.width)
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn(shape, device=device, dtype=dtype)

    def body() -> Tensor:
        return torch.autograd.grad(F.gelu(x, approximate="tanh"), x, grad)[0]

    return body


def _stream(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Body:
    """A norm forward and backward, and a residual sum: 7 and 3 times a hidden state's bytes."""
    shape, options = (sizes.rows, sizes.width), {"device": device, "dtype": dtype}
    x = torch.randn(shape, **options, requires_grad=True)  # type: ignore[call-overload]
    weight, bias = (torch.ones(sizes.width, **options, requires_grad=True) for _ in range(2))  # type: ignore[call-overload]
    grad: Tensor = torch.randn(shape, **options)  # type: ignore[call-overload]

    def body() -> Tensor:
        y = F.layer_norm(x, shape[1:], weight, bias)
        found: Tensor = torch.autograd.grad(y, (x, weight, bias), grad)[0] + grad
        return found

    return body


def _head(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Body:
    """Logits, loss, and the logits' gradient: the product is one of a layer's kind."""
    x = torch.randn(sizes.rows, 1, sizes.width, device=device, dtype=dtype)
    weight = torch.randn(sizes.vocab, sizes.width, device=device, dtype=dtype) * 0.02
    targets = torch.randint(sizes.vocab, (sizes.rows, 1), device=device)

    def body() -> Tensor:
        logits = F.linear(x, weight).requires_grad_()
        loss = vocab_parallel_cross_entropy(logits, targets, Axis("tp")).sum()
        return torch.autograd.grad(loss, logits)[0]

    return body


def _update(elements: int, device: torch.device) -> Body:
    """What a step does with each parameter once: zero, norm, clipping, AdamW; all in fp32."""
    param = torch.nn.Parameter(torch.zeros(elements, device=device))
    param.grad = grad = torch.zeros(elements, device=device)
    optimizer = torch.optim.AdamW([param], lr=1e-4, fused=True)
    factor = torch.ones((), device=device)

    def body() -> Tensor:
        grad.zero_()
        norms: Tensor = torch.linalg.vector_norm(grad.view(-1, 64), dim=1)
        torch._foreach_mul_([grad], factor)
        optimizer.step()
        return norms

    return body


def _tiny_block(device: torch.device) -> Body:
    """F, I and W of a block with nothing to compute: what the engine takes for its kernels."""
    cfg = Config(model=TINY, train=TrainConfig(micro_batch_size=1, dtype="fp32"))
    probe = Probe(cfg, Mesh.single(device), range(1))
    return lambda: probe.run()


def _gap(device: torch.device, dtype: torch.dtype) -> Body:
    """A kernel that does nothing to speak of."""
    x = torch.zeros(8, device=device, dtype=dtype)
    return lambda: x + 1
