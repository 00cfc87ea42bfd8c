from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.dataset import Mixture, TokenDataset, check_tokenizer
from data.files import hash_ends, hash_file
from data.manifest import MANIFEST, File, verify
from data.tokenizer import Tokenizer, train_tokenizer
from megalite.errors import ConfigError
from tests.data.shards import EOD, counting_shards, write_shards


def test_three_documents_have_three_borders_and_windows_lose_only_a_tail(tmp_path: Path) -> None:
    documents = [list(range(10, 15)), list(range(20, 37)), [40]]
    dataset = write_shards(tmp_path / "a", documents)
    stream = dataset.tokens(0, dataset.num_tokens)
    assert (stream == EOD).sum() == 3
    assert dataset.documents().tolist() == [0, 6, 24, 26]
    for start, document in zip(dataset.documents(), documents, strict=False):
        assert stream[start : start + len(document)].tolist() == document

    samples = [dataset.sample(i, 4) for i in range(dataset.num_samples(4))]
    joined = np.concatenate([samples[0][:1], *(s[1:] for s in samples)])
    assert dataset.num_samples(4) == 6 and dataset.num_dropped(4) == 1
    assert joined.tolist() == stream[: len(stream) - 1].tolist()


@given(tokens=st.integers(1, 60), shard=st.integers(1, 20), seq=st.integers(1, 30))
def test_windows_cross_shards_and_rebuild_the_stream(
    tmp_path_factory: pytest.TempPathFactory, tokens: int, shard: int, seq: int
) -> None:
    directory = tmp_path_factory.mktemp("shards") / "a"
    dataset = counting_shards(directory, tokens, shard_tokens=shard)
    assert len(dataset.split.shards) == -(-tokens // shard)
    stream = [*range(2, tokens + 1), EOD]
    assert dataset.tokens(0, tokens).tolist() == stream
    windows = [dataset.sample(i, seq).tolist() for i in range(dataset.num_samples(seq))]
    assert windows == [stream[i * seq : (i + 1) * seq + 1] for i in range(len(windows))]
    covered = len(windows) * seq + 1 if windows else 0
    assert covered + dataset.num_dropped(seq) == tokens and dataset.num_dropped(seq) <= seq
    shutil.rmtree(directory)


@pytest.mark.parametrize("i", [-1, 2])
def test_a_sample_that_is_not_there_is_an_error(i: int, tmp_path: Path) -> None:
    with pytest.raises(IndexError, match="of 2"):
        counting_shards(tmp_path / "a", 9).sample(i, 4)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 10)])
def test_tokens_outside_the_stream_are_an_error(start: int, stop: int, tmp_path: Path) -> None:
    with pytest.raises(IndexError, match="of 9"):
        counting_shards(tmp_path / "a", 9).tokens(start, stop)


def refused(directory: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        TokenDataset.open(directory)
    assert caught.value.field == "data.path"
    return str(caught.value)


def test_a_directory_without_shards_is_refused(tmp_path: Path) -> None:
    assert "no prepared shards" in refused(tmp_path / "none")
    assert "no prepared shards" in refused(tmp_path)


@pytest.mark.parametrize("name", ["train_00001.bin", "train_documents.bin", "tokenizer.model"])
def test_a_truncated_a_grown_and_a_missing_file_are_named(name: str, tmp_path: Path) -> None:
    counting_shards(tmp_path / "a", 40, shard_tokens=20)
    whole = (tmp_path / "a" / name).read_bytes()
    for content in (whole[:-2], whole + b"\0\0"):
        (tmp_path / "a" / name).write_bytes(content)
        assert name in refused(tmp_path / "a")
    (tmp_path / "a" / name).unlink()
    assert name in refused(tmp_path / "a")
    (tmp_path / "a" / name).write_bytes(whole)
    assert TokenDataset.open(tmp_path / "a").num_tokens == 40


def test_two_shards_of_one_size_cannot_change_places(tmp_path: Path) -> None:
    counting_shards(tmp_path / "a", 40, shard_tokens=20)
    first, second = (tmp_path / "a" / f"train_0000{i}.bin" for i in range(2))
    spare = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(spare)
    assert "train_00000.bin: it is another file" in refused(tmp_path / "a")


def test_a_flipped_bit_in_the_middle_is_found_by_verify(tmp_path: Path) -> None:
    counting_shards(tmp_path / "a", 20_000)
    verify(tmp_path / "a")
    with open(tmp_path / "a" / "train_00000.bin", "r+b") as file:
        file.seek(20_000)
        file.write(b"\xff")
    TokenDataset.open(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"train_00000.bin: its content is not what was written"):
        verify(tmp_path / "a")


def test_an_edited_a_foreign_and_a_torn_manifest_are_refused(tmp_path: Path) -> None:
    counting_shards(tmp_path / "a", 40)
    path = tmp_path / "a" / MANIFEST
    whole = path.read_text()
    edits = {
        whole.replace('"vocab_size": 65536', '"vocab_size": 65535'): "its own hash",
        whole.replace('"version": 1', '"version": 2'): "version 2, this program reads 1",
        whole.replace("megalite-tokens", "other"): "another format",
        whole[: len(whole) // 2]: "damaged",
        "[]": "damaged",
        "{}": "damaged",
        "\x00\xff": "damaged",
    }
    for content, problem in edits.items():
        assert content != whole
        path.write_text(content)
        assert problem in refused(tmp_path / "a")
    path.write_text(whole)
    assert json.loads(whole)["format"] == "megalite-tokens"
    TokenDataset.open(tmp_path / "a")


def read_so_far() -> int:
    """Bytes that this process has read."""
    line = Path("/proc/self/io").read_text().splitlines()[0]
    return int(line.removeprefix("rchar: "))


def test_opening_a_billion_tokens_reads_none_of_them(tmp_path: Path) -> None:
    small = counting_shards(tmp_path / "a", 40)
    shards = []
    for number in range(10):
        path = tmp_path / "a" / f"train_{number:05d}.bin"
        path.write_bytes(b"")
        os.truncate(path, 200_000_000)
        shards.append(File(path.name, 200_000_000, "not hashed", hash_ends(path)))
    split = replace(small.split, shards=tuple(shards), num_tokens=10**9)
    replace(small.manifest, splits={"train": split}).write(tmp_path / "a")
    before = read_so_far()
    dataset = TokenDataset.open(tmp_path / "a")
    assert dataset.sample(dataset.num_samples(1024) - 1, 1024).tolist() == [0] * 1025
    assert read_so_far() - before < 200_000
    # The count can fail: hashing one shard reads all of it.
    hash_file(tmp_path / "a" / "train_00000.bin")
    assert read_so_far() - before > 200_000_000


def test_a_split_that_is_not_held_is_refused(tmp_path: Path) -> None:
    counting_shards(tmp_path / "a", 40)
    with pytest.raises(ConfigError, match="holds no split 'val', only train"):
        TokenDataset.open(tmp_path / "a", "val")


def test_only_the_tokenizer_that_made_the_shards_is_taken(tmp_path: Path) -> None:
    for name, text in (("a", "the first words of all\n"), ("b", "some other words instead\n")):
        train_tokenizer([text * 5], 280, tmp_path / name)
    dataset = write_shards(tmp_path / "d", [[5]], model=(tmp_path / "a").read_bytes())
    check_tokenizer(dataset, Tokenizer.load(dataset.tokenizer_path))
    check_tokenizer(dataset, Tokenizer.load(tmp_path / "a"))
    with pytest.raises(ConfigError, match="data.tokenizer: .*another tokenizer"):
        check_tokenizer(dataset, Tokenizer.load(tmp_path / "b"))


def test_a_window_longer_than_the_corpus_is_refused(tmp_path: Path) -> None:
    mixture = Mixture([counting_shards(tmp_path / "a", 9)])
    mixture.check(8)
    with pytest.raises(ConfigError, match=r"model.seq_length: .* has 9 tokens, fewer than the 10"):
        mixture.check(9)


def test_every_epoch_has_each_window_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    mixture = Mixture([counting_shards(tmp_path / "a", 401)])
    epochs = [mixture.locate(np.arange(100 * e, 100 * e + 100), 4, 0)[1].tolist() for e in range(3)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert mixture.locate(np.arange(100), 4, 1)[1].tolist() != epochs[0]


def test_a_corpus_of_one_window_never_ends(tmp_path: Path) -> None:
    mixture = Mixture([counting_shards(tmp_path / "a", 6)])
    assert mixture.samples(np.array([0, 1, 10**12]), 4, 0)[:, 0].tolist() == [2, 2, 2]


@pytest.mark.parametrize("weights", [(0.001, 0.999), (1.0, 0.0)])
def test_a_mixture_of_extreme_weights_gives_what_is_expected(
    weights: tuple[float, float], tmp_path: Path
) -> None:
    sets = [counting_shards(tmp_path / name, 50) for name in "ab"]
    source, window = Mixture(sets, weights).locate(np.arange(1000), 4, 0)
    for number, weight in enumerate(weights):
        counts = np.cumsum(source == number)
        assert np.abs(counts - weight * np.arange(1, 1001)).max() < 1
    assert set(window.tolist()) == set(range(12))


def test_the_data_sets_of_a_mixture_are_shuffled_apart(tmp_path: Path) -> None:
    sets = [counting_shards(tmp_path / name, 401) for name in "ab"]
    source, window = Mixture(sets, (1, 1)).locate(np.arange(200), 4, 0)
    first, second = window[source == 0].tolist(), window[source == 1].tolist()
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second


def test_a_mixture_of_two_tokenizers_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", [[5]])
    write_shards(tmp_path / "b", [[5]], model=b"another tokenizer")
    with pytest.raises(ConfigError, match="different tokenizers"):
        Mixture.open([(1.0, str(tmp_path / "a")), (1.0, str(tmp_path / "b"))])


def test_no_source_is_refused() -> None:
    with pytest.raises(ConfigError, match="data.path: no prepared shards are named"):
        Mixture.open([])
