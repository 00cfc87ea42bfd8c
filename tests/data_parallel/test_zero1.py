"""ZeRO-1: what is sent, when it is waited for, and that all replicas step or none."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launch.build import Training, build, describe, hold, make_plan, users
from launch.config import Config
from megalite.data_parallel import bucket as bucket_module
from megalite.data_parallel.bucket import FlatParameters
from megalite.mesh import Axis, Mesh, Transport, Work
from megalite.mesh_shape import MeshShape
from megalite.parallel_config import mesh_shape
from megalite.slices import Slice, set_slice
from megalite.trace import Trace
from model.config import GPTConfig
from tests.counting import CountingTransport
from tests.parity.harness import GPT2, LLAMA, TRAIN, assemble, batch_of, config, parts
from tests.ranks import run_ranks

SP = {"sequence_parallel": True}
V2 = {"schedule": "interleaved_1f1b", "virtual_stages": 2}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "_SMALLEST", 1000)


class Recorder:
    """A group of two that hears nothing of the other; writes down what is begun and awaited."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.names: dict[int, str] = {}

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Work:
        return _Noted(self, f"sum {self.names[tensor.data_ptr()]}")

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        return _Noted(self, f"scatter {self.names[tensor.data_ptr()]}")

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        return _Noted(self, f"gather {self.names[output.data_ptr()]}")


class _Noted:
    def __init__(self, recorder: Recorder, what: str) -> None:
        self.recorder, self.what = recorder, what
        recorder.events.append(f"begin {what}")

    def wait(self) -> None:
        self.recorder.events.append(f"end {self.what}")


def recorded(model: GPTConfig, **layout: Any) -> tuple[Training, Recorder]:
    """Replica 1 of 2 of the whole model, as if alone, and what its dp group is asked for."""
    recorder = Recorder()
    axes = {a: Axis(a) for a in ("pp", "tp", "tie", "world")}
    axes["dp"] = Axis("dp", 1, 2, (0, 1), recorder)  # type: ignore[arg-type]
    training = build(config(model, zero1=True, **layout), Mesh(MeshShape(dp=2), None, axes))
    for n, bucket in enumerate(training.flat.buckets):
        recorder.names[bucket.weight.data_ptr()] = recorder.names[bucket.grad.data_ptr()] = str(n)
    return training, recorder


def note_calls(training: Training, recorder: Recorder) -> None:
    """Let every module that holds parameters itself write down when its forward begins."""
    (gpt,) = training.gpt.values()
    for name, module in gpt.named_modules():
        own = [p for _, p in module.named_parameters(recurse=False)]
        own = [p for p in own if module is not gpt or p is not gpt.head]
        if own:
            held = sorted({recorder.names[_bucket(training, p).weight.data_ptr()] for p in own})
            text = f"use {name} {','.join(held)}"
            module.register_forward_pre_hook(lambda *_, t=text: recorder.events.append(t))


def _bucket(training: Training, param: nn.Parameter) -> Any:
    return training.flat.bucket_of[id(param)]


@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_step_scatters_and_gathers_each_bucket_once(model: GPTConfig) -> None:
    training, recorder = recorded(model)
    assert len(training.flat.buckets) > 5
    for _ in range(2):
        recorder.events.clear()
        training.step(batch_of(training.cfg, 0, 1, 2), 1e-3)
        begun = [e.split()[1:] for e in recorder.events if e.startswith("begin")]
        names = sorted(recorder.names[b.grad.data_ptr()] for b in training.flat.buckets)
        assert sorted(n for what, n in begun if what == "scatter") == names
        assert sorted(n for what, n in begun if what == "gather") == names
        assert not [n for what, n in begun if what == "sum"]
    training.flat.current()
    assert sum(e.startswith("begin") for e in recorder.events) == 2 * len(names)


def test_gathers_are_waited_for_by_their_first_user_and_not_before() -> None:
    training, recorder = recorded(LLAMA)
    batch = batch_of(training.cfg, 0, 1, 2)
    training.step(batch, 1e-3)
    begun = [e.split()[-1] for e in recorder.events if e.startswith("begin gather")]
    note_calls(training, recorder)
    recorder.events.clear()
    training.gradients(batch)
    first = recorder.events[: recorder.events.index("begin scatter 0")]
    waited: list[str] = []
    early = 0
    for event in first:
        if event.startswith("end gather"):
            waited.append(event.split()[-1])
        elif event.startswith("use"):
            assert set(event.split()[-1].split(",")) <= set(waited), f"{event} is too early"
            early += len(waited) < len(training.flat.buckets)
    assert sorted(waited) == sorted(begun)
    assert (waited[0], waited[-1]) == (begun[0], begun[-1]), "begun in the order of use"
    assert early > 10, "most of the forward runs beside gathers"


def test_without_the_hooks_a_use_before_its_wait_would_be_seen() -> None:
    training, recorder = recorded(LLAMA)
    for gpt in training.gpt.values():
        for module in gpt.modules():
            module._forward_pre_hooks.clear()
    batch = batch_of(training.cfg, 0, 1, 2)
    training.step(batch, 1e-3)
    note_calls(training, recorder)
    recorder.events.clear()
    training.gradients(batch)
    assert not [e for e in recorder.events if e.startswith("end gather")]


@pytest.mark.parametrize(
    "read",
    [
        lambda t: list(t.flat.weight_pieces()),
        lambda t: list(t.flat.weight_pieces(share=True)),
        lambda t: t.losses(batch_of(t.cfg, 0, 1, 2)),
        lambda t: t.flat.current(),
        lambda t: t.optimizer.publish(),
    ],
    ids=["weights", "share", "evaluation", "wait", "another update"],
)
def test_whoever_reads_the_weights_waits_for_all_of_them(read: Any) -> None:
    training, recorder = recorded(GPT2)
    training.step(batch_of(training.cfg, 0, 1, 2), 1e-3)
    recorder.events.clear()
    read(training)
    ended = [e for e in recorder.events if e.startswith("end")]
    assert len(ended) == len(training.flat.buckets)
    recorder.events.clear()
    training.flat.current()
    left = len(training.flat.buckets) if read.__code__.co_names[-1] == "publish" else 0
    assert len(recorder.events) == left, "nothing is waited for twice"


@pytest.mark.parametrize("model", [GPT2, LLAMA, replace(GPT2, tied_embeddings=False)])
@pytest.mark.parametrize("layout", [{"tp": 4, **SP}, {"pp": 2, **V2}, {"pp": 2}])
def test_every_parameter_has_a_module_that_waits_for_it(
    model: GPTConfig, layout: dict[str, Any]
) -> None:
    cfg = config(model, zero1=True, **layout)
    size = 2 * layout.get("tp", 1) * layout.get("pp", 1)
    shape = mesh_shape(cfg.parallel, size)
    for rank in range(size):
        held = hold(cfg, Mesh.at(shape, rank), make_plan(cfg, shape.dp))
        for gpt in held.gpt.values():
            named = [p for _, params in users(gpt) for p in params]
            assert {id(p) for p in named} >= {id(p) for p in gpt.parameters()}
            assert all(module._forward_pre_hooks for module, _ in users(gpt))


def test_without_zero1_or_without_replicas_nothing_is_gathered_and_no_module_waits() -> None:
    for cfg, mesh in (
        (config(GPT2), Mesh.at(MeshShape(dp=2), 1)),
        (config(GPT2, zero1=True), Mesh.single()),
    ):
        training = build(cfg, mesh)
        assert not training.flat.zero1
        held = hold(cfg, mesh, make_plan(cfg, mesh.shape.dp)).gpt.values()
        assert not any(m._forward_pre_hooks for g in held for m in g.modules())
        training.flat.gather()
        assert not training.flat._gathers
        assert "ZeRO-1" not in describe(training)


def small(name: str, *shape: int, **more: object) -> nn.Parameter:
    piece = Slice(name, shape, (0,) * len(shape), shape, **more)  # type: ignore[arg-type]
    return set_slice(nn.Parameter(torch.ones(shape)), piece)


@pytest.mark.parametrize("dp", [1, 2, 3, 5])
def test_shares_are_equal_whole_vectors_and_together_the_bucket(dp: int) -> None:
    ranks = [
        FlatParameters({0: [small("a", 7, 30), small("b", 5)]}, Axis("dp", n, dp), True)
        for n in range(dp)
    ]
    for bucket, *others in zip(*(flat.buckets for flat in ranks), strict=True):
        assert bucket.weight.numel() == -(-215 // (64 * dp)) * 64 * dp
        mine = torch.arange(bucket.weight.numel())
        shares = [b.share(mine) for b in (bucket, *others)]
        assert torch.equal(torch.cat(shares), mine)
        assert {s.numel() % 64 for s in shares} == {0}
        assert all(b.share(s) is s for b, s in zip((bucket, *others), shares, strict=True))
    whole = assemble(parts(flat.weight_pieces(share=True)) for flat in ranks)
    assert {n: tuple(t.shape) for n, t in whole.items()} == {"a": (7, 30), "b": (5,)}


def test_a_wait_is_seen_in_the_trace() -> None:
    axis = Axis("dp", 0, 2, (0, 1), Recorder())  # type: ignore[arg-type]
    trace = Trace(most=100)
    flat = FlatParameters({0: [small("a", 3)]}, axis, True, trace)
    axis.group.names[flat.buckets[0].weight.data_ptr()] = "0"  # type: ignore[union-attr]
    flat.gather()
    with trace.step(1):
        flat.current()
        flat.current()
    trace.finish()
    assert [s.name for s in trace.steps[1]] == ["gather", "step 1"]


# --- several ranks -----------------------------------------------------------------------------


def counts(transport: Transport, cfgs: list[Config]) -> list[dict[str, int]]:
    """Operations of a step by axis, without those of forward and backward over tp and pp."""
    bucket_module._SMALLEST = 1000  # this process ends with the body
    found = []
    for cfg in cfgs:
        counting = CountingTransport(transport)
        mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), counting)
        training = build(cfg, mesh)
        per_step = []
        for step in range(2):
            counting.reset()
            training.step(batch_of(cfg, step, mesh.dp.index, mesh.dp.size), 1e-3)
            over_dp = counting.select(ranks=mesh.dp.ranks)
            per_step.append({op: sum(r.op == op for r in over_dp) for op in COUNTED})
        assert per_step[0] == per_step[1]
        found.append({**per_step[1], "buckets": len(training.flat.buckets)})
        training.flat.current()
        mesh.close()
    return found


COUNTED = ("all_reduce", "reduce_scatter", "all_gather")


@pytest.mark.parametrize("layout", [{"tp": 2, **SP}, {"pp": 2}], ids=["tp", "pp"])
def test_the_messages_over_dp_do_not_grow_with_the_number_of_microbatches(
    layout: dict[str, Any],
) -> None:
    cfgs = [
        config(
            GPT2,
            train=replace(TRAIN, global_batch_size=2 * m, micro_batch_size=1),
            zero1=zero1,
            **layout,
        )
        for zero1 in (True, False)
        for m in (2, 5)
    ]
    for rank in run_ranks(4, counts, cfgs):
        few, many, off, _ = rank
        assert few == many
        n = few["buckets"]
        assert n > 5
        assert few == {"all_reduce": 0, "reduce_scatter": n, "all_gather": n, "buckets": n}
        assert off == {"all_reduce": n, "reduce_scatter": 0, "all_gather": 0, "buckets": n}


def skipped(transport: Transport, cfg: Config, bad: float) -> tuple[list[float], dict[str, bool]]:
    """A good step, one in which a number that this rank does not own is bad, and a good one: what
    the totals say, and which steps have changed the state on this rank."""
    bucket_module._SMALLEST = 1000
    mesh = Mesh.create(mesh_shape(cfg.parallel, transport.world_size), transport)
    training = build(cfg, mesh)
    zero = training.reducer.zero

    def poisoned(num_microbatches: int) -> None:
        zero(num_microbatches)
        if mesh.rank == transport.world_size - 1:
            training.flat.buckets[0].grad[0] = bad  # of the first replica's share

    finite, changed = [], {}
    for step in range(3):
        before = state(training)
        training.reducer.zero = poisoned if step == 1 else zero  # type: ignore[method-assign]
        batch = batch_of(cfg, step, mesh.dp.index, mesh.dp.size)
        finite.append(float(training.step(batch, 1e-3).finite))
        after = state(training)
        changed[f"step {step}"] = not all(map(torch.equal, before, after))
    assert training.mesh.dp.size > 1
    mesh.close()
    return finite, changed


def state(training: Training) -> list[Tensor]:
    pieces = [*training.flat.weight_pieces(), *training.optimizer.pieces()]
    steps = [s["step"] for s in training.optimizer.inner.state.values()]
    return [p.tensor.clone() for p in pieces] + [s.clone() for s in steps]


@pytest.mark.parametrize("dtype", ["bf16", "fp64"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_bad_number_in_one_share_makes_every_replica_skip(dtype: Any, bad: float) -> None:
    cfg = config(GPT2, train=replace(TRAIN, dtype=dtype), pp=2, zero1=True)
    for finite, changed in run_ranks(4, skipped, cfg, bad):
        assert finite == [1.0, 0.0, 1.0]
        assert changed == {"step 0": True, "step 1": False, "step 2": True}
