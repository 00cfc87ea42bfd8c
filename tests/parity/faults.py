"""Planted faults: each breaks one thing that a layout needs, and must be seen by parity.

A fault changes the ``Training`` that it is given. What it changes elsewhere (``_patch``) lasts
until ``undo``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from launch import build as build_module
from launch.build import Training, loss_constant
from megalite.data_parallel.bucket import FlatParameters
from megalite.dropout import Draw
from megalite.grads import WeightProduct
from megalite.mesh import DONE, Axis, Work
from megalite.optim import clip as clip_module
from megalite.optim.clip import square_sum
from megalite.pipeline.p2p import Kind
from megalite.pipeline.stage import Stage
from megalite.recompute import _Recompute
from megalite.rng import initialize
from megalite.slices import Slice, get_slice, set_slice
from megalite.tensor_parallel.cross_entropy import IGNORE
from megalite.tensor_parallel.linear import ColumnParallelLinear, Layout, RowParallelLinear
from model import gpt as gpt_module
from model.documents import document_mask, places
from model.gpt import Block

_changed: list[tuple[Any, str, Any]] = []


def _patch(owner: Any, name: str, value: Any) -> None:
    """Change something of a class or a module."""
    _changed.append((owner, name, vars(owner)[name]))
    setattr(owner, name, value)


def undo() -> None:
    """Take back what faults have changed outside of a Training."""
    while _changed:
        setattr(*_changed.pop())


def _is_key_or_value(at: Slice) -> bool:
    return ".k." in at.name or ".v." in at.name


def _modules(training: Training, kind: type) -> Iterator[Any]:
    for gpt in training.gpt.values():
        yield from (module for module in gpt.modules() if isinstance(module, kind))


# --- sums that are missing or made twice -------------------------------------------------------


@dataclass
class _Deaf:
    """A group that gathers, but whose sums are its own part only."""

    real: Any
    index: int
    size: int

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Work:
        return DONE

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        return self.real.all_gather(output, tensor)  # type: ignore[no-any-return]

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        output.copy_(tensor.chunk(self.size)[self.index])
        return DONE


def _deaf(axis: Axis) -> Axis:
    return replace(axis, group=_Deaf(axis.group, axis.index, axis.size))  # type: ignore[arg-type]


def _without(training: Training, name: str) -> None:
    """Let the reducer see an axis of size 1."""
    training.reducer.mesh = copy.copy(training.mesh)
    setattr(training.reducer.mesh, name, Axis(name))


def no_dp_sum(training: Training) -> None:
    """Each replica keeps its own gradient; under ZeRO-1 it updates its share with that."""
    training.reducer.mesh = copy.copy(training.mesh)
    training.reducer.mesh.dp = _deaf(training.mesh.dp)


def averaged_over_dp(training: Training) -> None:
    """The mean of the replicas' gradients, which are parts of a sum."""
    finish = training.reducer.finish

    def wrong() -> None:
        finish()
        for bucket in training.flat.buckets:
            bucket.grad /= training.mesh.dp.size

    training.reducer.finish = wrong  # type: ignore[method-assign]


def no_partial_sum(training: Training) -> None:
    _without(training, "tp")


def _own_part_only(training: Training, chosen: Callable[[Slice], bool]) -> None:
    """Leave some parameters out of the sum of partial gradients over tp."""
    reducer, summed = training.reducer, training.reducer._sum
    late = [p for b in training.flat.buckets if b.late for p in b.params]
    partial = [get_slice(p) for p in late if get_slice(p).partial]
    partial.sort(key=lambda at: at.name)
    kept = [s for at, s in zip(partial, reducer._slots, strict=True) if chosen(at)]

    def wrong(name: str, axis: Axis, grad: Tensor) -> Work:
        if name != "tp":
            return summed(name, axis, grad)
        own = [slot.clone() for slot in kept]
        summed(name, axis, grad).wait()
        for slot, before in zip(kept, own, strict=True):
            slot.copy_(before)
        return DONE

    reducer._sum = wrong  # type: ignore[method-assign]


def no_norm_grad_sum(training: Training) -> None:
    """Norms of a cut sequence keep the gradient of their part of it."""
    _own_part_only(training, lambda at: "norm" in at.name)


def no_shared_kv_sum(training: Training) -> None:
    """Each copy of a key/value head keeps the gradient of its own queries."""
    _own_part_only(training, _is_key_or_value)


def no_tie_sum(training: Training) -> None:
    _without(training, "tie")


def tie_summed_twice(training: Training) -> None:
    training.reducer._tie_grads *= 2


def no_input_grad_sum(training: Training) -> None:
    for module in _modules(training, ColumnParallelLinear):
        module.layout = replace(module.layout, tp=_deaf(module.layout.tp))


def no_head_input_grad_sum(training: Training) -> None:
    logits = gpt_module.vocab_logits

    def wrong(x: Tensor, layout: Layout, weight: Tensor) -> Tensor:
        return logits(x, replace(layout, tp=_deaf(layout.tp)), weight)

    _patch(gpt_module, "vocab_logits", wrong)


def no_output_sum(training: Training) -> None:
    """One row-parallel linear gives its own part of the sum."""
    for module in list(_modules(training, RowParallelLinear))[:1]:
        module.layout = replace(module.layout, tp=_deaf(module.layout.tp))


# --- biases, padding, heads --------------------------------------------------------------------


def _more_bias(training: Training, times: int) -> None:
    def again(module: RowParallelLinear, _: Any, out: Tensor) -> Tensor:
        assert module.bias is not None
        return out + times * module.bias.detach()

    for module in _modules(training, RowParallelLinear):
        module.register_forward_hook(again)


def doubled_bias(training: Training) -> None:
    """Seen from the second step on: biases start at zero."""
    _more_bias(training, 1)


def bias_before_the_sum(training: Training) -> None:
    """Every tp rank adds the bias."""
    _more_bias(training, training.mesh.tp.size - 1)


def padding_in_the_softmax(training: Training) -> None:
    _patch(gpt_module, "padded_rows", lambda weight: 0)


class _NoMax(_Deaf):
    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Work:
        return DONE if op == "max" else self.real.all_reduce(tensor, op)  # type: ignore[no-any-return]


def maximum_of_a_part(training: Training) -> None:
    """The cross-entropy takes the largest logit of each rank's own part of the vocabulary."""
    for gpt in training.gpt.values():
        tp = gpt.layout.tp
        deaf = replace(tp, group=_NoMax(tp.group, tp.index, tp.size))  # type: ignore[arg-type]
        gpt.layout = replace(gpt.layout, tp=deaf)


def foreign_tokens_are_looked_up(training: Training) -> None:
    """A rank takes tokens of another's part of the vocabulary for its own."""
    embed = gpt_module.vocab_parallel_embedding

    def wrong(tokens: Tensor, layout: Layout, weight: nn.Parameter) -> Tensor:
        first = layout.tp.index * weight.shape[0]
        return embed(tokens % weight.shape[0] + first, layout, weight)

    _patch(gpt_module, "vocab_parallel_embedding", wrong)


# --- initial weights ---------------------------------------------------------------------------


def _start_as(
    training: Training, params: Iterable[nn.Parameter], change: Callable[[Slice], Slice]
) -> None:
    """Draw initial weights as if parameters were other parts."""
    for param in params:
        at = get_slice(param)
        set_slice(param, change(at))
        initialize([param], training.cfg.train.seed)
        set_slice(param, at)


def weights_by_local_index(training: Training) -> None:
    """Every tp rank draws its part as if it were the first."""
    _start_as(
        training,
        training.flat.parameters(),
        lambda at: replace(at, offset=(0,) * len(at.offset)),
    )


def weights_by_local_layer(training: Training) -> None:
    """Every stage numbers its layers from 0."""
    for gpt in training.gpt.values():
        for n, block in enumerate(gpt.blocks):
            assert isinstance(block, Block)
            old, new = f"{block.name}.", f"layers.{n}."
            change = lambda at, old=old, new=new: replace(at, name=at.name.replace(old, new))  # noqa: E731
            _start_as(training, block.parameters(), change)


def wrong_kv_head(training: Training) -> None:
    """Ranks go round the key/value heads, in place of neighbours sharing one."""

    def other(at: Slice) -> Slice:
        index, count = at.slot
        part = training.mesh.tp.index % count
        return replace(at, offset=(part * at.extent[0], *at.offset[1:]))

    params = [p for p in training.flat.parameters() if get_slice(p).slot[1] > 1]
    _start_as(training, params, other)


# --- the pipeline ------------------------------------------------------------------------------


def _sent(training: Training, kind: Kind, change: Callable[[Tensor], Tensor]) -> None:
    channels = training.executor.channels
    send = channels.send

    def wrong(k: Kind, receiver: int, tensor: Tensor) -> Work:
        return send(k, receiver, change(tensor) if k == kind else tensor)

    channels.send = wrong  # type: ignore[method-assign]


def lost_gradient(training: Training) -> None:
    """Stages get a gradient of zero from the next."""
    _sent(training, "B", torch.zeros_like)


def stale_activations(training: Training) -> None:
    """The first microbatch's are sent again and again."""
    first: list[Tensor] = []

    def old(tensor: Tensor) -> Tensor:
        if not first:
            first.append(tensor.clone())
        return first[0]

    _sent(training, "F", old)


def _with_batch(training: Training, change: Callable[[Any], Any]) -> None:
    run = training.executor.run

    def wrong(plan: Any, batch: Any, reducer: Any = None) -> Any:
        return run(plan, change(batch), reducer)

    training.executor.run = wrong  # type: ignore[method-assign]


def swapped_microbatches(training: Training) -> None:
    """The last stage compares a microbatch with the targets of another."""
    if training.has_last_stage:
        _with_batch(training, lambda b: replace(b, targets=b.targets.roll(1, 0)))


def lost_microbatch(training: Training) -> None:
    """The last stage leaves the last microbatch out."""

    def without(batch: Any) -> Any:
        targets = batch.targets.clone()
        targets[-1] = IGNORE
        return replace(batch, targets=targets)

    if training.has_last_stage:
        _with_batch(training, without)


def weight_grads_after_the_reduction(training: Training) -> None:
    """The last W of each stage is counted, but done when replicas are summed already."""
    late: list[tuple[Stage, WeightProduct]] = []
    last = training.plan.num_microbatches - 1

    def put_off(stage: Stage, weight_grad: Callable[[int], None]) -> Callable[[int], None]:
        def wrong(microbatch: int) -> None:
            if microbatch != last:
                weight_grad(microbatch)
                return
            for product in stage._saved.pop(microbatch).weights or []:
                late.append((stage, product))
                for weight in product.weights:
                    stage.sink.ready(weight)

        return wrong

    for stage in training.executor.stages.values():
        stage.weight_grad = put_off(stage, stage.weight_grad)  # type: ignore[method-assign]
    finish = training.reducer.finish

    def finish_first() -> None:
        finish()
        for stage, product in late:
            ready, stage.sink.on_ready = stage.sink.on_ready, None
            with torch.no_grad():
                product.run(stage.sink)
            stage.sink.on_ready = ready
        late.clear()

    training.reducer.finish = finish_first  # type: ignore[method-assign]


# --- tokens, norms and clipping ----------------------------------------------------------------


def mean_of_means(training: Training) -> None:
    """Each replica divides by its own tokens, and all are averaged."""
    mesh, constant = training.mesh, loss_constant(training.cfg)
    run = training.executor.run

    def wrong(plan: Any, batch: Any, reducer: Any = None) -> Any:
        own = (batch.targets != IGNORE).sum().double()
        total = own.clone()
        mesh.dp.all_reduce(total).wait()
        for stage in training.executor.stages.values():
            stage.loss_scale = float(total / (constant * own.clamp(min=1) * mesh.dp.size))
        return run(plan, batch, reducer)

    training.executor.run = wrong  # type: ignore[method-assign]


def ignored_tokens_count(training: Training) -> None:
    _patch(build_module, "count_tokens", lambda batch: torch.tensor(batch.targets.numel()))


def _with_totals(training: Training, change: Callable[[Any], Any]) -> None:
    gradients = training.gradients
    training.gradients = lambda batch: change(gradients(batch))  # type: ignore[method-assign]


def clipped_by_the_local_norm(training: Training) -> None:
    """Each rank clips by the norm of what it counts itself."""

    def wrong(totals: Any) -> Any:
        to_mean = loss_constant(training.cfg) / totals.tokens
        norm = square_sum(training.flat).sqrt() * to_mean
        return replace(totals, factor=to_mean * (1.0 / (norm + 1e-6)).clamp(max=1.0))

    _with_totals(training, wrong)


def not_clipped(training: Training) -> None:
    constant = loss_constant(training.cfg)
    _with_totals(training, lambda t: replace(t, factor=constant / t.tokens))


def loss_of_one_replica(training: Training) -> None:
    """Each replica tells the loss of its own rows, over the tokens of all."""
    dp, run, seen = training.mesh.dp, training.executor.run, [torch.zeros(())]

    def listen(plan: Any, batch: Any, reducer: Any = None) -> Any:
        loss = run(plan, batch, reducer)
        seen[0] = torch.zeros(()) if loss is None else loss
        return loss

    def own(totals: Any) -> Any:
        return replace(totals, loss=seen[0].double() * dp.size / totals.tokens)

    training.executor.run = listen  # type: ignore[method-assign]
    _with_totals(training, own)


def norm_of_a_share(training: Training) -> None:
    """Of the replicas only the first counts its share in the norm."""
    for bucket in training.flat.buckets:
        bucket.counted = bucket.counted and training.mesh.dp.index == 0


def norm_of_all_shares(training: Training) -> None:
    """Every replica counts the gradients of all."""

    def whole(flat: FlatParameters) -> Tensor:
        return torch.stack([b.grad.square().sum() for b in flat.buckets if b.counted]).sum()

    _patch(clip_module, "square_sum", whole)


def shared_kv_counted_twice(training: Training) -> None:
    """Every copy of a key/value head enters the norm."""
    for bucket in training.flat.buckets:
        if all(_is_key_or_value(get_slice(p)) for p in bucket.params):
            bucket.counted = True


def replicas_over_tp_counted_twice(training: Training) -> None:
    """Norms and biases enter the norm once a tp rank."""
    for bucket in training.flat.buckets:
        if all(get_slice(p).tied != "copy" for p in bucket.params):
            bucket.counted = True


def tied_copy_counted_twice(training: Training) -> None:
    for bucket in training.flat.buckets:
        if bucket.late == "tied":
            bucket.counted = True


# --- the optimizer and ZeRO-1 ------------------------------------------------------------------


def no_gather(training: Training) -> None:
    """Replicas go on with the old weights outside their own share."""
    training.flat.zero1 = False


def a_stale_bucket(training: Training) -> None:
    """One bucket, that of the last use, is not gathered."""
    training.flat._by_use.pop()


def share_of_the_local_sum(training: Training) -> None:
    """A replica updates its share from its own gradients, as if they were summed."""
    axis = training.mesh.dp
    for bucket in training.flat.buckets[:1]:
        reducer = training.reducer
        summed = reducer._sum_replicas

        def wrong(b: Any, first: Any = bucket, summed: Any = summed) -> Work:
            if b is not first:
                return summed(b)  # type: ignore[no-any-return]
            return _deaf(axis).reduce_scatter(b.share(b.grad), b.grad.clone())

        reducer._sum_replicas = wrong  # type: ignore[method-assign]


def decay_of_norms(training: Training) -> None:
    for group in training.optimizer.inner.param_groups:
        group["weight_decay"] = training.cfg.optim.weight_decay


def missed_update(training: Training) -> None:
    """The last replica misses the first update."""
    step, calls = training.optimizer.inner.step, [0]

    def wrong() -> None:
        calls[0] += 1
        if calls[0] > 1 or training.mesh.dp.index < training.mesh.dp.size - 1:
            step()

    training.optimizer.inner.step = wrong  # type: ignore[method-assign]


# --- masks, positions, documents, recompute ----------------------------------------------------


class _Forgetful(Layout):
    """A layout that takes each part of a cut sequence for its beginning."""

    def first_place(self, x: Tensor) -> int:
        return 0


def _forgetful(kept: Layout) -> Layout:
    return _Forgetful(kept.tp, kept.sequence_parallel, kept.dtype, kept.device, kept.sink)


def masks_by_local_position(training: Training) -> None:
    for gpt in training.gpt.values():
        gpt.layout = _forgetful(gpt.layout)
        for block in gpt.blocks:
            assert isinstance(block, Block)
            block.layout = gpt.layout


def positions_by_local_position(training: Training) -> None:
    """Learned positions start anew in each part of the sequence."""
    for gpt in training.gpt.values():
        if gpt.positions is not None:
            gpt.positions.layout = _forgetful(gpt.positions.layout)


def rotation_by_local_position(training: Training) -> None:
    """Rotary positions start anew in each part of the sequence."""
    rope, size = gpt_module.rope, training.mesh.tp.size

    def wrong(cfg: Any, places: Tensor, layout: Layout) -> Any:
        cos, sin = rope(cfg, places[: len(places) // size], layout)
        return torch.cat([cos] * size), torch.cat([sin] * size)

    _patch(gpt_module, "rope", wrong)


def _with_samples(training: Training, change: Callable[[Tensor], Tensor]) -> None:
    def other(batch: Any) -> Any:
        return batch if batch.samples is None else replace(batch, samples=change(batch.samples))

    _with_batch(training, other)


def masks_by_local_sample(training: Training) -> None:
    """Each microbatch counts its rows from 0."""
    _with_samples(training, lambda s: torch.arange(s.shape[1]).expand_as(s))


def own_mask_a_rank(training: Training) -> None:
    """Ranks that hold the same features drop others of them, as rank-local generators would."""
    _with_samples(training, lambda s: s + 1000 * training.mesh.tp.index)


def the_same_mask_each_step(training: Training) -> None:
    _with_batch(training, lambda b: replace(b, step=0))


def another_mask_in_recompute(training: Training) -> None:
    """What is computed in a backward pass draws anew."""
    keys = Draw.keys

    def wrong(self: Draw, name: str) -> Tensor:
        again = torch._C._current_graph_task_id() != -1
        return keys(self, f"{name} again" if again else name)

    _patch(Draw, "keys", wrong)


def across_documents(training: Training) -> None:
    """Attention sees the whole row; positions start anew."""

    def wrong(starts: Tensor, dtype: torch.dtype) -> Tensor:
        return document_mask(torch.zeros_like(starts), dtype)

    _patch(gpt_module, "document_mask", wrong)


def positions_go_on(training: Training) -> None:
    """Not seen by rotary positions: within a document they only have distances."""
    _patch(gpt_module, "places", lambda starts: places(torch.zeros_like(starts)))


def gradient_of_one_input(training: Training) -> None:
    """A recomputed attention hands back the gradient of its queries only."""
    backward = _Recompute.backward

    def wrong(ctx: Any, grad: Tensor) -> Any:
        _, first, *rest = backward(ctx, grad)
        return None, first, *(None if r is None else torch.zeros_like(r) for r in rest)

    _patch(_Recompute, "backward", staticmethod(wrong))


# --- evaluation --------------------------------------------------------------------------------


def dropout_in_evaluation(training: Training) -> None:
    run = training.executor.run

    def wrong(plan: Any, batch: Any, reducer: Any = None) -> Any:
        if batch.samples is None:
            batch = replace(batch, samples=torch.zeros(batch.tokens.shape[:2], dtype=torch.int64))
        return run(plan, batch, reducer)

    training.executor.run = wrong  # type: ignore[method-assign]


def gradients_of_an_evaluation(training: Training) -> None:
    """An evaluation leaves gradients, to which the next step adds."""
    losses, zero, reducer = training.losses, training.reducer.zero, training.reducer

    def keep(num_microbatches: int) -> None:
        kept = [b.grad.clone() for b in training.flat.buckets]
        zero(num_microbatches)
        # Once they have been summed over replicas, each keeps its part of them.
        for bucket, grad in zip(training.flat.buckets, kept, strict=True):
            bucket.grad.copy_(grad / training.mesh.dp.size)
        reducer.zero = zero  # type: ignore[method-assign]

    def wrong(batch: Any) -> Tensor:
        training.gradients(batch)
        reducer.zero = keep  # type: ignore[method-assign]
        return losses(batch)

    training.losses = wrong  # type: ignore[method-assign]


def an_evaluation_is_a_step(training: Training) -> None:
    """An evaluation updates the moments (and, with them, the weights) from what is in memory."""
    losses = training.losses

    def wrong(batch: Any) -> Tensor:
        found = losses(batch)
        one = torch.ones((), dtype=torch.float64)
        training.optimizer.step(1e-3, one, one)
        training.flat.current()
        return found

    training.losses = wrong  # type: ignore[method-assign]


def evaluation_of_a_part(training: Training) -> None:
    """An evaluation is the loss of this replica's rows."""
    losses = training.losses

    def wrong(batch: Any) -> Tensor:
        world = training.mesh.world
        training.mesh.world = training.mesh.pp  # the last stage's own sum, told along the pipeline
        try:
            return losses(batch)
        finally:
            training.mesh.world = world

    training.losses = wrong  # type: ignore[method-assign]
