"""Faults that are planted in one place are found there, in any layout, beside one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest

from launch.compare import RunsCompared, compare_runs
from megalite.mesh import Mesh
from model.config import GPTConfig
from tests.comparison import planted
from tests.comparison.planted import Fault, body, record_steps
from tests.parity.faults import no_dp_sum, no_partial_sum, no_tie_sum
from tests.parity.harness import GPT2, LLAMA, config
from tests.ranks import run_ranks

SP = {"sequence_parallel": True}
V = {"virtual_stages": 2}
V2 = {"schedule": "interleaved_1f1b", **V}


class Case(NamedTuple):
    """A fault, and where it must be found: the tensor, what computed it, and the ranks that did.

    ``odd``: only some ranks' copies are wrong, so that the run itself shows which.
    """

    fault: Fault
    ranks: int
    layout: dict[str, Any]
    phase: str
    name: str
    computed_by: str
    stage: int
    guilty: tuple[int, ...]
    odd: bool = False
    role: str = "made"
    model: GPTConfig = GPT2


CASES = [
    Case(planted.scaled_attention, 4, {"tp": 2, "pp": 2}, "forward", "layers.2.attention",
         "layers.2.attention", 1, (3,), odd=True),
    Case(planted.scaled_attention, 4, {"tp": 2, "pp": 2, **SP, **V, "schedule": "zb_v"},
         "forward", "layers.2.attention", "layers.2.attention", 2, (2, 3)),
    Case(planted.wrong_bias, 2, {"tp": 2}, "forward", "layers.1.mlp", "layers.1.mlp", 0, (0,),
         odd=True),
    Case(planted.wrong_norm, 4, {"tp": 2, "pp": 2}, "forward", "final_norm", "final_norm", 1, (3,),
         odd=True, model=LLAMA),
    Case(planted.not_a_number, 2, {"pp": 2}, "forward", "layers.3.mlp", "layers.3.mlp", 1, (1,)),
    Case(planted.dropped_microbatch, 4, {"pp": 2}, "forward", "loss", "loss", 1, (2,)),
    Case(planted.swapped_rows, 2, {"pp": 2, "schedule": "gpipe"}, "forward", "embedding",
         "embedding", 0, (0,)),
    Case(planted.spoiled_message, 2, {"pp": 2}, "forward", "layers.1", "layers.1", 1, (1,),
         role="received"),
    Case(planted.spoiled_gradient_message, 4, {"pp": 2, "tp": 2, **SP}, "backward", "layers.1",
         "layers.1", 0, (0, 1), role="received"),
    Case(planted.scaled_input_grad, 4, {"pp": 4}, "backward", "layers.1.mlp_norm",
         "layers.1.mlp", 1, (1,)),
    Case(planted.scaled_input_grad, 2, {"pp": 2, "schedule": "zb_h1"}, "backward",
         "layers.1.mlp_norm", "layers.1.mlp", 0, (0,)),
    Case(planted.no_input_sum_in_one_layer, 4, {"tp": 2, "pp": 2, **V2}, "backward",
         "layers.2.attention_norm", "layers.2.attention", 2, (0, 1)),
    Case(planted.lost_weight_grad, 4, {"tp": 2, "pp": 2}, "gradient", "layers.3.mlp.up.weight",
         "layers.3.mlp.up.weight", 1, (2, 3)),
    Case(planted.lost_weight_grad, 2, {"schedule": "zb_h1"}, "gradient",
         "layers.3.mlp.up.weight", "layers.3.mlp.up.weight", 0, (0,)),
    Case(planted.doubled_norm_grad, 2, {"tp": 2, **SP}, "gradient", "layers.0.mlp_norm.weight",
         "layers.0.mlp_norm.weight", 0, (0,)),
    Case(planted.wrong_update, 2, {}, "weight", "layers.1.attention.v.weight",
         "layers.1.attention.v.weight", 0, (1,), odd=True),
    Case(planted.wrong_update, 4, {"tp": 2}, "weight", "layers.1.attention.v.weight",
         "layers.1.attention.v.weight", 0, (2,), odd=True),
    Case(no_tie_sum, 2, {"pp": 2}, "gradient", "embedding.tokens.weight",
         "embedding.tokens.weight", 0, (0, 1)),
    Case(no_partial_sum, 4, {"tp": 4}, "gradient", "layers.0.attention.k.weight",
         "layers.0.attention.k.weight", 0, (0, 1, 2, 3), model=LLAMA),
    Case(no_dp_sum, 2, {}, "gradient", "embedding.positions.weight",
         "embedding.positions.weight", 0, (0, 1)),
]  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    """The record of one process, by model."""
    with TemporaryDirectory(prefix="record-") as folder:

        @cache
        def of(model: GPTConfig) -> Path:
            out = Path(folder, "llama" if model == LLAMA else "gpt2")
            record_steps(Mesh.single(), config(model), out)
            return out

        yield of


def compared(case: Case, out: Path, alone: Path, steps: int = 1) -> RunsCompared:
    cfg = config(case.model, **case.layout)
    cfg = replace(cfg, train=replace(cfg.train, steps=steps))
    run_ranks(case.ranks, body, [(cfg, out, case.fault)])
    return compare_runs(alone, out)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.fault.__name__}-{c.ranks}")
def test_a_planted_fault_is_found_where_it_is(case: Case, tmp_path: Path, alone: Any) -> None:
    runs = compared(case, tmp_path / "b", alone(case.model))
    first = runs.found.first
    assert first is not None, f"{case.fault.__name__} went unseen"
    assert first.step == 1 and first.phase == case.phase, runs.text()
    assert (first.name, first.role) == (case.name, case.role), runs.text()
    assert first.computed_by == case.computed_by, runs.text()
    assert first.b is not None and first.a is not None, runs.text()
    assert (first.b.stage, first.b.ranks) == (case.stage, case.guilty), runs.text()
    assert (first.b.deviates, first.a.deviates) == (case.odd, False), runs.text()
    assert first.a.ranks == (0,)
    before = runs.found.before
    assert before is None or before.relative < 1e-12


def test_the_sample_and_its_microbatch_in_either_run_are_named(tmp_path: Path, alone: Any) -> None:
    def found(fault: Fault, ranks: int, layout: dict[str, Any]) -> Any:
        (case,) = [c for c in CASES if c.fault is fault and c.ranks == ranks]
        return compared(case, tmp_path / fault.__name__, alone(GPT2)).found.first

    # 6 rows, 2 a microbatch: rows 2 and 3 are microbatch 1 of one replica.
    swapped = found(planted.swapped_rows, 2, {})
    assert swapped.sample in (2, 3) and swapped.num_apart == 2 and swapped.num_samples == 6
    assert (swapped.a.microbatch, swapped.b.microbatch) == (1, 1)
    # Of two replicas, rows 4 and 5 are microbatch 1 of the first.
    dropped = found(planted.dropped_microbatch, 4, {})
    assert dropped.sample in (4, 5) and dropped.num_apart == 2
    assert (dropped.a.microbatch, dropped.b.microbatch) == (2, 1)


def test_an_error_of_one_stage_is_not_mistaken_for_one_of_the_stage_that_shows_it(
    tmp_path: Path, alone: Any
) -> None:
    """The gradient is wrong in stage 1; the next step's loss, in stage 3, only shows it."""
    (case,) = [c for c in CASES if c.fault is planted.scaled_input_grad and c.ranks == 4]
    runs = compared(case, tmp_path / "b", alone(GPT2), steps=2)
    first = runs.found.first
    assert first is not None and first.a is not None and first.b is not None
    assert first.b.stage == 1 and first.name.startswith("layers.1.")
    assert "computed by the backward pass of layers.1.mlp" in runs.text()
    assert {d.phase for d in runs.found.after} >= {"backward", "gradient"}
    assert runs.found.by_step[2]["forward"] > 1e-12 > runs.found.by_step[1]["forward"]


CLEAN: list[tuple[int, GPTConfig, dict[str, Any]]] = [
    (2, GPT2, {"tp": 2}),
    (2, LLAMA, {}),
    (3, GPT2, {"pp": 3, "partition": (2, 0, 2)}),
    (2, GPT2, {"pp": 2, "partition": (0, 4)}),
    (4, LLAMA, {"tp": 4, **SP}),
    (4, LLAMA, {"pp": 2, **V2}),
    (4, GPT2, {"tp": 2, "pp": 2, **SP, **V, "schedule": "zb_v"}),
    (8, GPT2, {"tp": 2, "pp": 2, **SP, **V2}),
]


@pytest.mark.parametrize("ranks,model,layout", CLEAN)
def test_clean_runs_of_any_layout_agree_and_those_of_one_layout_to_the_bit(
    ranks: int, model: GPTConfig, layout: dict[str, Any], tmp_path: Path, alone: Any
) -> None:
    cfg = config(model, **layout)
    outs = [tmp_path / "b", tmp_path / "again"]
    run_ranks(ranks, body, [(cfg, out, None) for out in outs])
    found = compare_runs(alone(model), outs[0]).found
    assert found.first is None and found.steps == (1, 2, 3)
    assert found.before is not None and 0 < found.before.relative < 1e-12
    assert found.same_bits < found.num_tensors
    again = compare_runs(*outs, exact=True).found
    assert again.first is None and again.same_bits == again.num_tensors > 100


def test_other_microbatches_of_one_process_agree(tmp_path: Path, alone: Any) -> None:
    cfg = config(GPT2)
    cfg = replace(cfg, train=replace(cfg.train, micro_batch_size=4))
    record_steps(Mesh.single(), cfg, tmp_path)
    runs = compare_runs(alone(GPT2), tmp_path)
    assert runs.found.first is None and runs.fields == (), runs.text()


def test_recording_changes_no_number_and_a_run_without_it_has_no_hook(tmp_path: Path) -> None:
    from launch.build import build
    from tests.parity.harness import OPTIM, batch_of

    cfg = config(GPT2)
    losses = record_steps(Mesh.single(), cfg, tmp_path)
    training = build(cfg, Mesh.single())
    plain = [
        float(training.step(batch_of(cfg, step, 0, 1), OPTIM.lr).loss)
        for step in range(cfg.train.steps)
    ]
    assert plain == losses
    for gpt in training.gpt.values():
        for module in gpt.modules():
            hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
            assert {hook.__module__ for hook in hooks} <= {"megalite.resilience.finite"}
    assert [type(s).__name__ for s in training.executor.stages.values()] == ["Stage"]
