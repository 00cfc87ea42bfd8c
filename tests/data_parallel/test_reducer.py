"""When gradients are summed over replicas, and that each is summed once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from launch.build import Training, build
from megalite.data_parallel import bucket as bucket_module
from megalite.data_parallel.bucket import FlatParameters
from megalite.data_parallel.reducer import GradReducer
from megalite.mesh import Axis, Mesh, Work
from megalite.mesh_shape import MeshShape
from megalite.schedule.action import Action, Plan
from megalite.schedule.lower import lower
from megalite.slices import Slice, get_slice, set_slice
from megalite.tensor_parallel.linear import RowParallelLinear
from model.config import GPTConfig
from tests.parity.harness import GPT2, LLAMA, TRAIN, batch_of, config

M = 4


class Recorder:
    """A group whose sums are this rank's own part; writes down what it is asked for."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.given: dict[int, Tensor] = {}
        self.pending = 0

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Work:
        self.events.append(("reduce", tensor.data_ptr()))
        self.given[tensor.data_ptr()] = tensor.clone()
        self.pending += 1
        return self

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        assert output.numel() * 2 == tensor.numel()
        return self.all_reduce(tensor)

    def wait(self) -> None:
        self.pending -= 1


def recorded(
    model: GPTConfig, plan: Plan | None = None, zero1: bool = False
) -> tuple[Training, Recorder]:
    """One rank of dp 2, as if alone, and what its dp group sees."""
    recorder = Recorder()
    axes = {a: Axis(a) for a in ("pp", "tp", "tie", "world")}
    dp = Axis("dp", 0, 2, (0, 1), recorder)  # type: ignore[arg-type]
    train = replace(TRAIN, global_batch_size=2 * M, micro_batch_size=1)
    cfg = config(model, train=train, zero1=zero1)
    training = build(cfg, Mesh(MeshShape(dp=2), None, {**axes, "dp": dp}))
    assert training.plan.num_microbatches == M
    training.plan = plan or training.plan
    for module in training.gpt.values():
        sink = module.layout.sink
        told = sink.on_ready
        assert told is not None

        def ready(param: Tensor, told=told) -> None:  # type: ignore[no-untyped-def]
            recorder.events.append(("ready", id(param)))
            told(param)

        sink.on_ready = ready
    return training, recorder


def run(training: Training) -> None:
    batch = batch_of(training.cfg, 0, 0, 2)
    training.reducer.zero(M)
    training.executor.run(training.plan, batch, training.reducer)


def one_rank(*order: str) -> Plan:
    """A plan of one rank and stage: B, or I and W, of microbatches in the given order."""
    actions = [Action.parse(f"0{text}") for text in order]
    return lower(Plan("by hand", M, (0,), (tuple(actions),)))


PLANS = {
    "one by one": None,
    "W after each I": one_rank(*(f"{op}{m}" for m in range(M) for op in "FIW")),
    "every W at the end": one_rank(
        *(f"{op}{m}" for m in range(M) for op in "FI"), *(f"W{m}" for m in range(M))
    ),
    "W backwards": one_rank(
        *(f"F{m}" for m in range(M)),
        *(f"I{m}" for m in (2, 0, 3, 1)),
        *(f"W{m}" for m in reversed(range(M))),
    ),
    "B and W mixed": one_rank("F0", "F1", "I0", "F2", "B1", "F3", "I2", "W2", "B3", "W0"),
}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "_SMALLEST", 1000)


@pytest.mark.parametrize("zero1", [False, True], ids=["sum", "zero1"])
@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_bucket_is_reduced_once_and_when_it_is_complete(
    plan: str, model: GPTConfig, zero1: bool
) -> None:
    training, recorder = recorded(model, PLANS[plan], zero1)
    run(training)
    early = [b for b in training.flat.buckets if not b.late]
    late = [b for b in training.flat.buckets if b.late]
    assert len(early) > 5
    assert len(late) == (1 if model.tied_embeddings else 0)

    reduced = [pointer for what, pointer in recorder.events if what == "reduce"]
    assert sorted(reduced) == sorted(b.grad.data_ptr() for b in early)
    for bucket in early:
        before = recorder.events[: recorder.events.index(("reduce", bucket.grad.data_ptr()))]
        given = Counter(param for what, param in before if what == "ready")
        assert all(given[id(p)] == M for p in bucket.params), "reduced before it was complete"
        assert torch.equal(recorder.given[bucket.grad.data_ptr()], bucket.grad)
    training.reducer.finish()
    reduced = [pointer for what, pointer in recorder.events if what == "reduce"]
    assert sorted(reduced) == sorted(b.grad.data_ptr() for b in training.flat.buckets)
    assert recorder.pending == 0


@pytest.mark.parametrize("zero1", [False, True], ids=["sum", "zero1"])
@pytest.mark.parametrize("plan", PLANS)
def test_the_first_reduction_runs_behind_the_last_backward(plan: str, zero1: bool) -> None:
    training, recorder = recorded(LLAMA, PLANS[plan], zero1)
    run(training)
    order = [what for what, _ in recorder.events]
    first, last = order.index("reduce"), len(order) - 1 - order[::-1].index("ready")
    behind = order[first:last].count("ready") / order.count("ready") * M
    assert behind > 0.6, f"only {behind:.0%} of the last backward is left to hide behind"


@pytest.mark.parametrize("plan", [p for p in PLANS if PLANS[p]])
def test_backward_in_two_parts_sums_the_gradients_of_one_part(plan: str) -> None:
    whole, _ = recorded(LLAMA)
    parted, _ = recorded(LLAMA, PLANS[plan])
    for training in (whole, parted):
        run(training)
        training.reducer.finish()
    for a, b in zip(whole.flat.buckets, parted.flat.buckets, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-15)
        assert a.grad.any()


def test_a_second_step_is_like_the_first() -> None:
    training, recorder = recorded(GPT2)
    for _ in range(2):
        run(training)
        training.reducer.finish()
    half = len(recorder.events) // 2
    assert recorder.events[:half] == recorder.events[half:]


def test_a_parameter_without_gradient_is_named() -> None:
    training, _ = recorded(GPT2)
    block = training.gpt[0].blocks[1]
    block.mlp = nn.Identity()
    with pytest.raises(AssertionError, match=r"stage 0: no gradient for .*layers\.1\.mlp\.up"):
        run(training)


def test_a_gradient_of_one_microbatch_that_is_missing_is_noticed() -> None:
    training, _ = recorded(GPT2)
    (row,) = [
        m
        for m in training.gpt[0].modules()
        if isinstance(m, RowParallelLinear)
        and get_slice(m.weight).name == "layers.2.mlp.down.weight"
    ]
    told = training.gpt[0].layout.sink.on_ready
    assert told is not None
    seen = []

    def forgetful(param: Tensor) -> None:
        seen.append(param)
        if param is not row.weight or sum(p is param for p in seen) != 2:
            told(param)

    training.gpt[0].layout.sink.on_ready = forgetful
    with pytest.raises(AssertionError, match=r"layers\.2\.mlp\.down"):
        run(training)


def small(name: str, *shape: int, **more: object) -> nn.Parameter:
    piece = Slice(name, shape, (0,) * len(shape), shape, **more)  # type: ignore[arg-type]
    return set_slice(nn.Parameter(torch.zeros(shape)), piece)


@pytest.mark.parametrize("more", [{"partial": True}, {"tied": "owner"}, {"tied": "copy"}])
def test_a_gradient_that_waits_for_the_end_is_missed_too(more: dict[str, object]) -> None:
    found, lost = small("found", 3), small("lost", 2, **more)
    flat = FlatParameters({0: [found, lost]})
    reducer = GradReducer(flat, Mesh.single())
    reducer.zero(1)
    reducer.grad_ready(found)
    reducer.started(0)
    with pytest.raises(AssertionError, match="no gradient for lost"):
        reducer.finish()
    reducer.grad_ready(lost)
    reducer.finish()


def test_zero_leaves_nothing_of_the_last_step() -> None:
    shared = small("kv", 2, 3, partial=True, slot=(1, 2), replica=1)
    params = [small("w", 4, decay=True), small("n", 5, partial=True), shared]
    flat = FlatParameters({0: params})
    reducer = GradReducer(flat, Mesh.single())
    for _ in range(2):
        reducer.zero(1)
        for param in params:
            assert not param.main_grad.any()  # type: ignore[attr-defined]
            param.main_grad.add_(1.0)  # type: ignore[attr-defined]
            reducer.grad_ready(param)
        reducer.finish()
        for bucket in flat.buckets:
            for _, view in bucket.views(bucket.grad):
                assert bool((view == 1).all()), "a gradient of two steps"


def test_copies_that_share_a_part_of_a_cut_parameter_use_one_sum() -> None:
    class Doubling(Recorder):
        def all_reduce(self, tensor: Tensor, op: str = "sum") -> Work:
            super().all_reduce(tensor, op)
            tensor.mul_(2)
            return self

    group = Doubling()
    axes = {a: Axis(a) for a in ("pp", "dp", "tie", "world")}
    tp = Axis("tp", 3, 4, (0, 1, 2, 3), group)  # type: ignore[arg-type]
    norm = small("norm", 5, partial=True, replica=3)
    kv = small("kv", 2, 3, partial=True, slot=(1, 2), replica=1)
    flat = FlatParameters({0: [norm, kv]})
    reducer = GradReducer(flat, Mesh(MeshShape(tp=4), None, {**axes, "tp": tp}))
    reducer.zero(1)
    for param in (norm, kv):
        param.main_grad.add_(1.0)  # type: ignore[attr-defined]
        reducer.grad_ready(param)
    reducer.finish()
    (given,) = group.given.values()
    assert given.numel() == 5 + 2 * 6
    assert float(given.sum()) == 5 + 6, "a rank fills its own slot only"
    for bucket in flat.buckets:
        for _, view in bucket.views(bucket.grad):
            assert bool((view == 2).all())


def test_replicas_differ_in_nothing_that_the_order_of_reductions_depends_on() -> None:
    orders = []
    for model in (GPT2, replace(GPT2, tied_embeddings=False)):
        for index in (0, 1):
            training, recorder = recorded(model)
            training.mesh.dp = replace(training.mesh.dp, index=index)
            run(training)
            place = {b.grad.data_ptr(): n for n, b in enumerate(training.flat.buckets)}
            orders.append([place[p] for what, p in recorder.events if what == "reduce"])
    assert orders[0] == orders[1]
    assert orders[2] == orders[3]
