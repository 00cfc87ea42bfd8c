"""The files of a record: written by ranks, read while the run lives, refused where they are bad."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megalite.comparison.compare import compare, tolerance_of
from megalite.comparison.record import (
    FOLDER,
    MADE,
    Entry,
    Origin,
    Records,
    file_of,
    head_line,
    step_line,
)
from megalite.comparison.text import describe
from megalite.errors import ConfigError
from megalite.metrics import Lines, cut_back

PLACES = ("embedding", "layers.0", "loss")


def entry(name: str = "embedding", cut: Sequence[int] = (0, 8), samples: int = 4) -> Entry:
    rows = tuple(range(samples))
    start, size = cut
    return Entry("forward", name, MADE, 0, 0, rows, (8, 2), (start, 0), (size, 2), True)


def words(rows: int, scale: float = 1.0, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    numbers = np.abs(draw.normal(size=(rows, 5))) * scale
    return numbers.view(np.int64)


def write(
    run: Path,
    steps: Sequence[int],
    *,
    ranks: int = 1,
    entries: Sequence[Entry] = (entry(),),
    scale: float = 1.0,
    scales: Sequence[float] = (),
    num_samples: int = 4,
    places: tuple[str, ...] = PLACES,
) -> Path:
    (run / FOLDER).mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        origin = Origin(rank, ranks, 0, 0, rank, "tp", "fp32", num_samples, places)
        lines = Lines(file_of(run / FOLDER, rank))
        lines.add(head_line(steps[0], origin, entries))
        for step in steps:
            each = zip(entries, scales or [scale] * len(entries), strict=True)
            made = [words(len(e.samples), by, seed=step + 10 * n) for n, (e, by) in enumerate(each)]
            lines.add(step_line(step, np.concatenate(made)))
        lines.close()
    return run


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    records = Records(write(tmp_path, [1, 2], ranks=2))
    assert records.steps == [1, 2]
    ranks = records.load(2)
    assert [r.origin.rank for r in ranks] == [0, 1] and ranks[0].entries == (entry(),)
    want = words(4, seed=2)
    assert np.array_equal(ranks[1].numbers.view(np.int64), want[:, :4])
    assert np.array_equal(ranks[1].hashes, want[:, 4].view(np.uint64))


def test_a_run_that_lives_is_read_as_far_as_all_ranks_are(tmp_path: Path) -> None:
    write(tmp_path, [1, 2, 3], ranks=2)
    path = file_of(tmp_path / FOLDER, 1)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:50])
    assert Records(tmp_path).steps == [1, 2]
    path.write_bytes(lines[0])
    with pytest.raises(ConfigError, match="no step that all.*: step 1 stands 0 times.*rank 1"):
        Records(tmp_path)


def test_a_record_that_is_cut_back_goes_on_in_another_layout(tmp_path: Path) -> None:
    write(tmp_path, [1, 2, 3], ranks=2)
    for rank in range(2):
        cut_back(file_of(tmp_path / FOLDER, rank), 2)
    write(tmp_path, [3, 4])
    records = Records(tmp_path)
    assert records.steps == [1, 2, 3, 4]
    assert [len(records.load(step)) for step in records.steps] == [2, 2, 1, 1]
    cut_back(file_of(tmp_path / FOLDER, 0), 0)
    assert file_of(tmp_path / FOLDER, 0).read_bytes() == b""


@pytest.mark.parametrize("how", ["text", "no head", "version", "words", "short", "origin"])
def test_a_file_that_is_no_record_is_named(how: str, tmp_path: Path) -> None:
    write(tmp_path, [1])
    path = file_of(tmp_path / FOLDER, 0)
    head, step = (json.loads(line) for line in path.read_text().splitlines())
    match how:
        case "text":
            step = ["no record"]
        case "no head":
            head = step
        case "version":
            head["version"] = 0
        case "words":
            step["words"] = "not base64!"
        case "short":
            step["words"] = step["words"][:40]
        case "origin":
            del head["origin"]["places"]
    path.write_text(f"{json.dumps(head)}\n{json.dumps(step)}\n")
    with pytest.raises(ConfigError, match="rank_00000.jsonl cannot be read"):
        records = Records(tmp_path)
        records.load(1)


def test_runs_that_have_nothing_in_common_are_refused(tmp_path: Path) -> None:
    a = Records(write(tmp_path / "a", [1, 2]))
    with pytest.raises(ConfigError, match=r"no step is in both.*steps 1 to 2.*steps 5 to 6"):
        compare(a, Records(write(tmp_path / "b", [5, 6])))
    with pytest.raises(ConfigError, match="other models"):
        compare(a, Records(write(tmp_path / "c", [1], places=("embedding", "loss"))))
    with pytest.raises(ConfigError, match="global_batch_size"):
        compare(a, Records(write(tmp_path / "d", [1], num_samples=8)))
    wide = entry()._replace(shape=(16, 2), extent=(16, 2))
    with pytest.raises(ConfigError, match=r"\(8, 2\).*\(16, 2\)"):
        compare(a, Records(write(tmp_path / "e", [1], entries=[wide])))
    half = entry(cut=(0, 4))
    with pytest.raises(ConfigError, match="in part only"):
        compare(a, Records(write(tmp_path / "f", [1], entries=[half])))
    with pytest.raises(ConfigError, match="has no record"):
        Records(tmp_path / "nowhere")


def test_a_tensor_or_a_sample_that_one_run_lacks_is_where_they_part(tmp_path: Path) -> None:
    both = [entry(), entry("layers.0")]
    a = Records(write(tmp_path / "a", [1], entries=both))
    first = compare(a, Records(write(tmp_path / "b", [1]))).first
    assert first is not None and (first.name, first.missing) == ("layers.0", "b")
    fewer = entry(samples=3)
    first = compare(Records(write(tmp_path / "c", [1])),
                    Records(write(tmp_path / "d", [1], entries=[fewer]))).first  # fmt: skip
    assert first is not None and (first.sample, first.num_apart) == (3, 1)


def test_rounding_may_grow_from_step_to_step_but_not_at_once(tmp_path: Path) -> None:
    def run(name: str, scales: dict[int, float]) -> Records:
        for step, scale in scales.items():
            write(tmp_path / name, [step], scale=scale)
        return Records(tmp_path / name)

    a = run("a", dict.fromkeys(range(1, 7), 1.0))
    grown = {step: 1 + 1e-6 * 5**step for step in range(1, 7)}  # from 5e-6 to 0.016
    drifting = compare(a, run("b", grown))
    assert drifting.first is None and drifting.drifts and not drifting.agrees
    hard = compare(a, Records(tmp_path / "b"), tolerance_of(["fp32"])).first
    assert hard is not None and hard.step == 4
    first = compare(a, run("c", {**grown, 5: 1.1})).first
    assert first is not None and first.step == 5
    assert compare(a, a).first is None and not compare(a, a).drifts


def test_updates_do_not_excuse_each_other(tmp_path: Path) -> None:
    """No weight of a step leads to another: many that are a little off are a fault."""
    weights = [entry(f"w{n}", samples=1)._replace(phase="weight") for n in range(3)]
    entries, places = [entry(), *weights], (*PLACES, "w0", "w1", "w2")
    limit = tolerance_of(["fp32"])

    def run(name: str, sizes: Sequence[float]) -> Records:
        scales = [1.0, *(1 + size * limit for size in sizes)]
        return Records(write(tmp_path / name, [1], entries=entries, scales=scales, places=places))

    a = run("a", (0, 0, 0))
    assert compare(a, run("b", (0.1, 0.3, 0.5))).agrees
    first = compare(a, run("c", (0.1, 0.3, 2.5))).first
    assert first is not None and (first.step, first.name) == (1, "w2")


def test_steps_that_one_run_has_alone_are_told(tmp_path: Path) -> None:
    a = Records(write(tmp_path / "a", [1, 2, 3, 4]))
    b = Records(write(tmp_path / "b", [1, 2, 5]))
    found = compare(a, b)
    assert found.agrees and found.alone == ((3, 4), (5,))
    text = describe(found)
    assert "Not compared: 2 steps of A (3, 4), which the other run has not recorded" in text
    assert "Not compared: 1 step of B (5)" in text
    assert "Not compared" not in describe(compare(a, a))


def test_a_hole_is_damage_and_names_its_rank(tmp_path: Path) -> None:
    write(tmp_path, [1, 2, 3], ranks=2)
    path = file_of(tmp_path / FOLDER, 1)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[3:]))
    with pytest.raises(ConfigError, match="a hole: step 2 stands 0 times in the files of rank 1"):
        Records(tmp_path)
    path.write_bytes(b"".join(lines[:3] + lines[2:]))
    with pytest.raises(ConfigError, match="a hole: step 2 stands 2 times in the files of rank 1"):
        Records(tmp_path)


def test_every_bit_counts_if_asked(tmp_path: Path) -> None:
    a = Records(write(tmp_path / "a", [1, 2]))
    b = Records(write(tmp_path / "b", [1, 2], scale=1 + 2**-52))
    found = compare(a, b)
    assert found.first is None and found.same_bits == 0
    exact = compare(a, b, exact=True).first
    assert exact is not None and exact.step == 1 and exact.num_apart > 0
    assert compare(a, a, exact=True).first is None
