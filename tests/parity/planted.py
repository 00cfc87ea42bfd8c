"""Every planted fault, with a layout where it must be seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.parity import faults
from tests.parity.groups import TOLERANCE, Job, run_all
from tests.parity.harness import (
    Fault,
    apart,
    differences,
    join,
    one_process,
)
from tests.parity.matrix import Case

SEEN = 1e3  # times its tolerance a figure must move
_SP: dict[str, Any] = {"sequence_parallel": True}
_LLAMA: dict[str, Any] = {"family": "llama", "tied": False, "kv_heads": 2}
_V2: dict[str, Any] = {"schedule": "interleaved_1f1b", "virtual_stages": 2}
_ZB_V: dict[str, Any] = {"schedule": "zb_v", "virtual_stages": 2}
_DROP: dict[str, Any] = {"dropout": 0.1}

FAULTS: list[tuple[Fault, Case]] = [
    (faults.no_dp_sum, Case(dp=3)),
    (faults.averaged_over_dp, Case(dp=2)),
    (faults.no_partial_sum, Case(tp=4, **_SP, **_LLAMA)),
    (faults.no_norm_grad_sum, Case(tp=2, pp=2, **_SP)),
    (faults.no_shared_kv_sum, Case(tp=4, kv_heads=1)),
    (faults.no_tie_sum, Case(pp=2, dp=2, zero1=True)),
    (faults.tie_summed_twice, Case(pp=3, recompute="full")),
    (faults.no_input_grad_sum, Case(tp=2, **_SP, recompute="selective")),
    (faults.no_head_input_grad_sum, Case(tp=2, vocab_size=257)),
    (faults.no_output_sum, Case(tp=2, pp=2, schedule="gpipe")),
    (faults.doubled_bias, Case(tp=2, **_SP)),
    (faults.bias_before_the_sum, Case(tp=4)),
    (faults.padding_in_the_softmax, Case(tp=4, **_LLAMA, vocab_size=257)),
    (faults.maximum_of_a_part, Case(tp=2)),
    (faults.foreign_tokens_are_looked_up, Case(tp=2, dp=2)),
    (faults.weights_by_local_index, Case(tp=2, **_LLAMA)),
    (faults.weights_by_local_layer, Case(pp=2, **_ZB_V)),
    (faults.wrong_kv_head, Case(tp=4, kv_heads=2)),
    (faults.lost_gradient, Case(pp=2, **_V2)),
    (faults.stale_activations, Case(pp=3, **_LLAMA)),
    (faults.swapped_microbatches, Case(pp=2, dp=2)),
    (faults.lost_microbatch, Case(pp=2, schedule="zb_h1")),
    (faults.weight_grads_after_the_reduction, Case(pp=2, dp=2, schedule="zb_h1", tied=False)),
    (faults.mean_of_means, Case(dp=2, batch="blank")),
    (faults.ignored_tokens_count, Case(pp=2)),
    (faults.clipped_by_the_local_norm, Case(tp=2, **_LLAMA)),
    (faults.not_clipped, Case(dp=2)),
    (faults.loss_of_one_replica, Case(dp=3, **_LLAMA)),
    (faults.norm_of_a_share, Case(dp=2, zero1=True)),
    (faults.norm_of_all_shares, Case(dp=3)),
    (faults.shared_kv_counted_twice, Case(tp=4, kv_heads=1, family="llama")),
    (faults.replicas_over_tp_counted_twice, Case(tp=2)),
    (faults.tied_copy_counted_twice, Case(pp=2, **_V2)),
    (faults.no_gather, Case(dp=2, zero1=True, **_LLAMA)),
    (faults.a_stale_bucket, Case(dp=3, zero1=True)),
    (faults.share_of_the_local_sum, Case(dp=2, zero1=True, tp=2)),
    (faults.decay_of_norms, Case(pp=2)),
    (faults.missed_update, Case(dp=2)),
    (faults.masks_by_local_position, Case(tp=2, **_SP, **_DROP, **_LLAMA)),
    (faults.positions_by_local_position, Case(tp=2, **_SP)),
    (faults.rotation_by_local_position, Case(tp=2, **_SP, **_LLAMA)),
    (faults.masks_by_local_sample, Case(dp=2, **_DROP)),
    (faults.own_mask_a_rank, Case(tp=2, **_DROP)),
    (faults.the_same_mask_each_step, Case(pp=2, **_DROP)),
    (faults.another_mask_in_recompute, Case(pp=2, schedule="zb_h1", recompute="full", **_DROP)),
    (faults.across_documents, Case(pp=2, documents=True)),
    (faults.positions_go_on, Case(tp=2, **_SP, documents=True)),
    (faults.gradient_of_one_input, Case(tp=2, recompute="selective", **_LLAMA)),
    (faults.dropout_in_evaluation, Case(dp=2, **_DROP)),
    (faults.gradients_of_an_evaluation, Case(dp=2)),
    (faults.an_evaluation_is_a_step, Case(pp=2, **_LLAMA)),
    (faults.evaluation_of_a_part, Case(dp=2, **_LLAMA)),
]


@dataclass(frozen=True)
class Sight:
    """The figure that moved most, in multiples of its tolerance, of a run with a fault and of
    the same without."""

    fault: str
    case: Case
    figure: str
    where: str
    size: float
    times: float
    clean: float

    def __str__(self) -> str:
        at = f"{self.figure} at {self.where} by {self.size:.1e}"
        return f"{self.fault:34}{at:58}{self.case.ranks} ranks: {self.case}"


def _figures(ranks: list[dict[str, Any]], case: Case) -> dict[str, tuple[float, str]]:
    """As ``differences``, with the worst of what ranks report."""
    expected = one_process(case.cfg())
    found = differences(join(ranks, agreed=False), expected)
    for key, own in (("losses", "loss"), ("norms", "norm"), ("evaluated", "eval")):
        found[own] = max(apart(rank[key], getattr(expected, key)) for rank in ranks)
    return found


def look(chosen: Sequence[tuple[Fault, Case]]) -> list[Sight]:
    """Run faults of equally many ranks, beside their layouts as they should be."""
    cases = list(dict.fromkeys(case for _, case in chosen))
    jobs: list[Job] = [(str(case), case.cfg(), None) for case in cases]
    jobs += [(f"{case}, {fault.__name__}", case.cfg(), fault) for fault, case in chosen]
    runs, found = run_all(chosen[0][1].ranks, jobs), []
    clean = {case: _figures(run, case) for case, run in zip(cases, runs, strict=False)}
    for (fault, case), run in zip(chosen, runs[len(cases) :], strict=True):
        broken = _figures(run, case)
        # The initial weights must be equal to the bit: any difference is seen.
        times = {k: size / (TOLERANCE[k] or 1e-12) for k, (size, _) in broken.items()}
        most = max(times, key=times.__getitem__)
        size, where = broken[most]
        off = max(s / (TOLERANCE[k] or 1e-12) for k, (s, _) in clean[case].items())
        found.append(Sight(fault.__name__, case, most, where, size, times[most], off))
    return found
