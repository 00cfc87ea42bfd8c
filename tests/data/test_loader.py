from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.dataset import Mixture, TokenDataset
from data.loader import BatchShape, EvalLoader, TokenLoader
from megalite.tensor_parallel.cross_entropy import IGNORE
from tests.data.shards import EOD, counting_shards

SEQ = 4


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return counting_shards(tmp_path_factory.mktemp("loader") / "a", 401)


def ids(dataset: TokenDataset, step: int, *, gbs: int, mbs: int, dp: int) -> list[int]:
    """The windows of a global batch by row, gathered from all dp ranks and microbatches."""
    rows: dict[int, int] = {}
    for rank in range(dp):
        with TokenLoader(
            dataset,
            seq_length=SEQ,
            global_batch_size=gbs,
            micro_batch_size=mbs,
            dp_index=rank,
            dp_size=dp,
            seed=3,
        ) as loader:
            inputs, targets = loader.batch(step)
            numbers = loader.sample_ids(step)
        assert inputs.shape == targets.shape == (*numbers.shape, SEQ)
        for number, row, target in zip(
            numbers.reshape(-1), inputs.view(-1, SEQ), targets.view(-1, SEQ), strict=True
        ):
            if number < 0:
                assert row.eq(0).all() and target.eq(IGNORE).all()
            else:
                assert int(number) not in rows
                rows[int(number)] = int(row[0] - 2) // SEQ
    assert sorted(rows) == list(range(step * gbs, (step + 1) * gbs))
    return [rows[n] for n in sorted(rows)]


@pytest.mark.parametrize("gbs", [8, 7, 1])
def test_the_global_batch_does_not_depend_on_the_layout(dataset: TokenDataset, gbs: int) -> None:
    for step in (0, 3):
        serial = ids(dataset, step, gbs=gbs, mbs=1, dp=1)
        for mbs, dp in [(2, 1), (1, 2), (2, 2), (1, 4), (4, 4), (3, 8), (1, 3)]:
            assert ids(dataset, step, gbs=gbs, mbs=mbs, dp=dp) == serial
    assert ids(dataset, 0, gbs=gbs, mbs=1, dp=1) != ids(dataset, 1, gbs=gbs, mbs=1, dp=1)


def test_rows_belong_to_microbatches_and_ranks_by_the_rule() -> None:
    shape = [BatchShape(SEQ, 10, 2, rank, 2) for rank in range(2)]
    assert shape[0].rows().tolist() == [[0, 1], [4, 5], [8, 9]]
    assert shape[1].rows().tolist() == [[2, 3], [6, 7], [-1, -1]]


@given(gbs=st.integers(1, 40), mbs=st.integers(1, 6), dp=st.integers(1, 6))
def test_each_row_is_read_by_one_rank_once(gbs: int, mbs: int, dp: int) -> None:
    rows = [BatchShape(SEQ, gbs, mbs, rank, dp).rows().reshape(-1).tolist() for rank in range(dp)]
    assert sorted(r for rank in rows for r in rank if r >= 0) == list(range(gbs))
    for rank, mine in enumerate(rows):
        for place, row in enumerate(mine):
            assert row < 0 or (row // mbs) % dp == rank and row // (mbs * dp) == place // mbs


def test_targets_are_the_next_tokens(dataset: TokenDataset) -> None:
    with TokenLoader(
        dataset, seq_length=SEQ, global_batch_size=6, micro_batch_size=2, seed=1
    ) as loader:
        for step in range(3):
            inputs, targets = loader.batch(step)
            assert inputs.dtype == targets.dtype == torch.int64
            last = targets == EOD
            assert torch.equal(targets[~last], inputs[~last] + 1)
            assert torch.equal(targets[..., :-1], inputs[..., 1:])


def stream(dataset: TokenDataset, steps: range, dp: int = 1) -> list[int]:
    return [i for step in steps for i in ids(dataset, step, gbs=8, mbs=1, dp=dp)]


def test_a_resumed_run_reads_what_the_uninterrupted_one_reads(dataset: TokenDataset) -> None:
    whole = stream(dataset, range(6), dp=2)
    assert stream(dataset, range(3), dp=2) + stream(dataset, range(3, 6), dp=2) == whole
    for dp in (1, 3, 8):
        assert stream(dataset, range(3, 6), dp=dp) == whole[24:]


def test_epochs_are_whole_over_a_resume_in_the_middle(dataset: TokenDataset) -> None:
    # 100 windows, 8 a step: 2.5 epochs are 31 steps; the resume is at step 5, 0.4 epochs.
    read = stream(dataset, range(5)) + stream(dataset, range(5, 32), dp=2)
    assert sorted(read[:100]) == sorted(read[100:200]) == list(range(100))
    assert len(set(read[200:256])) == 56


def test_an_epoch_may_end_with_a_step_or_inside_one(tmp_path: Path) -> None:
    ten = counting_shards(tmp_path / "a", 41)
    for gbs in (5, 4, 25):
        read = [i for step in range(30 // gbs + 1) for i in ids(ten, step, gbs=gbs, mbs=1, dp=1)]
        epochs = [read[10 * e : 10 * e + 10] for e in range(3)]
        assert all(sorted(epoch) == list(range(10)) for epoch in epochs)


def test_a_late_step_is_read_at_once_and_in_any_order(dataset: TokenDataset) -> None:
    late = ids(dataset, 10**12, gbs=8, mbs=1, dp=1)
    assert len(set(late)) == 8
    with TokenLoader(dataset, seq_length=SEQ, global_batch_size=8, micro_batch_size=8) as loader:
        forward = [loader.batch(step)[0] for step in (0, 1, 2, 0)]
    assert torch.equal(forward[0], forward[3]) and not torch.equal(forward[0], forward[1])


def test_a_failure_of_the_thread_reaches_the_caller_and_the_thread_ends(
    dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = Mixture([dataset])
    loader = TokenLoader(mixture, seq_length=SEQ, global_batch_size=2, micro_batch_size=1)
    loader.batch(0)
    loader.batch(1)

    def fail(*_: object) -> None:
        raise OSError("the disk has gone")

    monkeypatch.setattr(mixture, "samples", fail)
    with pytest.raises(OSError, match="the disk has gone"):
        loader.batch(7)
    monkeypatch.undo()
    assert loader.batch(7)[0].shape == (2, 1, SEQ)
    loader.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("loader")]


def test_a_failure_while_reading_ahead_is_raised_with_its_step(
    dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = Mixture([dataset])
    read, real = [], mixture.samples

    def fail_at_step_1(g, seq, seed):  # type: ignore[no-untyped-def]
        read.append(int(g[0]))
        if g[0] == 2:
            raise OSError("a bad sector")
        return real(g, seq, seed)

    monkeypatch.setattr(mixture, "samples", fail_at_step_1)
    with TokenLoader(mixture, seq_length=SEQ, global_batch_size=2, micro_batch_size=1) as loader:
        loader.batch(0)
        with pytest.raises(OSError, match="a bad sector"):
            loader.batch(1)
    assert read == [0, 2]


@given(
    tokens=st.integers(1, 70),
    seq=st.integers(1, 9),
    gbs=st.integers(1, 5),
    mbs=st.integers(1, 3),
    dp=st.integers(1, 3),
)
def test_each_held_out_token_is_a_target_exactly_once(
    tmp_path_factory: pytest.TempPathFactory, tokens: int, seq: int, gbs: int, mbs: int, dp: int
) -> None:
    dataset = counting_shards(tmp_path_factory.mktemp("eval") / "a", tokens, shard_tokens=17)
    seen: list[int] = []
    for rank in range(dp):
        loader = EvalLoader(
            dataset,
            seq_length=seq,
            global_batch_size=gbs,
            micro_batch_size=mbs,
            dp_index=rank,
            dp_size=dp,
        )
        for i in range(loader.num_batches):
            inputs, targets = loader.batch(i)
            assert inputs.shape == (loader.shape.num_microbatches, mbs, seq)
            kept = targets != IGNORE
            assert inputs[~kept].eq(0).all()
            # The token before 2 is the border that stands for the start.
            before = torch.where(targets == 2, EOD, targets - 1)
            before[targets == EOD] = tokens if tokens > 1 else EOD
            assert torch.equal(inputs[kept], before[kept])
            seen += targets[kept].tolist()
    assert sorted(seen) == sorted([*range(2, tokens + 1), EOD])
    assert (loader.num_tokens, loader.utf8_bytes) == (tokens, dataset.utf8_bytes)


def test_a_part_of_the_held_out_text_counts_its_share_of_bytes(dataset: TokenDataset) -> None:
    loader = EvalLoader(
        dataset, seq_length=SEQ, global_batch_size=5, micro_batch_size=1, max_batches=3
    )
    assert (loader.num_batches, loader.num_tokens) == (3, 60)
    assert loader.utf8_bytes == 3 * 60
    kept = sum(int((loader.batch(i)[1] != IGNORE).sum()) for i in range(3))
    assert kept == loader.num_tokens
    with pytest.raises(IndexError):
        loader.batch(3)
