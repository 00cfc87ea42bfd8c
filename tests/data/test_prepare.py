from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.config import DataConfig
from data.dataset import TokenDataset
from data.files import hash_file
from data.manifest import verify
from data.prepare import EMBEDDED, EMBEDDED_PATH, ensure_prepared, prepare, prepare_default
from data.sources import DatasetSource
from data.split import Packing, split_texts
from data.tokenizer import Tokenizer, train_tokenizer
from megalite.errors import ConfigError
from tests.data.shards import SOURCE, TEXTS, Listed

ROOT = Path(__file__).resolve().parents[2]
NOTHING_HELD = Packing(val_fraction=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "a.model"
    train_tokenizer(TEXTS, 300, path)
    return path


def texts_of(directory: Path, split: str) -> list[str]:
    """The documents as they can be read back from shards."""
    dataset = TokenDataset.open(directory, split)
    tokenizer = Tokenizer.load(dataset.tokenizer_path)
    stream, offsets = dataset.tokens(0, dataset.num_tokens), dataset.documents()
    assert (stream[offsets[1:] - 1] == tokenizer.eod).all()
    assert (stream == tokenizer.eod).sum() == dataset.split.num_documents == len(offsets) - 1
    bounds = zip(offsets[:-1], offsets[1:], strict=True)
    return [tokenizer.decode(stream[start : stop - 1]) for start, stop in bounds]


def contents(directory: Path) -> dict[str, str]:
    return {path.name: hash_file(path) for path in sorted(directory.iterdir())}


def test_documents_come_back_from_the_shards(model: Path, tmp_path: Path) -> None:
    packing = Packing(val_fraction=0.1, shard_tokens=100)
    manifest = prepare(SOURCE, tmp_path / "a", tokenizer=model, packing=packing)
    train, val = (texts_of(tmp_path / "a", name) for name in ("train", "val"))
    assert len(val) == 4 and sorted(train + val) == sorted(TEXTS)
    assert [t for t in TEXTS if t in train] == train
    assert manifest.splits["val"].utf8_bytes == len("".join(val).encode())
    assert manifest.splits["train"].utf8_bytes == len("".join(train).encode())
    sizes = [s.bytes for s in manifest.splits["train"].shards]
    assert len(sizes) > 5 and set(sizes[:-1]) == {200} and 0 < sizes[-1] <= 200
    assert manifest == verify(tmp_path / "a")


def test_three_documents_have_three_borders(model: Path, tmp_path: Path) -> None:
    source = Listed(("a b c", "x\n\ny", "z"))
    manifest = prepare(source, tmp_path / "a", tokenizer=model, packing=NOTHING_HELD)
    assert texts_of(tmp_path / "a", "train") == ["a b c", "x\n\ny", "z"]
    assert manifest.held_out == "nothing"


def test_texts_that_are_missing_or_empty_are_counted(model: Path, tmp_path: Path) -> None:
    source = Listed(("a", None, "", "b"))
    manifest = prepare(source, tmp_path / "a", tokenizer=model, packing=NOTHING_HELD)
    assert texts_of(tmp_path / "a", "train") == ["a", "b"]
    assert manifest.skipped_documents == 2


def test_the_bytes_of_a_file_are_those_of_its_texts(model: Path, tmp_path: Path) -> None:
    text = "\u00e9\u4e2d \U0001f600 \u2581"
    manifest = prepare(Listed((text,)), tmp_path / "a", tokenizer=model, packing=NOTHING_HELD)
    assert manifest.splits["train"].utf8_bytes == len(text.encode())
    assert texts_of(tmp_path / "a", "train") == [text]


def held(count: int, packing: Packing) -> list[int]:
    source = Listed(tuple(str(i) for i in range(count))).open(Path())
    return [int(text) for split, text in split_texts(source, packing) if split == "val"]


@given(count=st.integers(2, 500), fraction=st.floats(0.001, 0.5), seed=st.integers(0, 99))
def test_the_held_out_share_is_exact_and_follows_the_seed(
    count: int, fraction: float, seed: int
) -> None:
    packing = Packing(val_fraction=fraction, seed=seed)
    assert len(held(count, packing)) == max(1, round(count * fraction))
    assert held(count, packing) == held(count, packing)


def test_another_seed_holds_out_other_documents() -> None:
    assert held(500, Packing(0.1, seed=0)) != held(500, Packing(0.1, seed=1))


@pytest.mark.parametrize(
    ("text", "tail"),
    [
        ("one\ntwo\nthree\nfour\n", "four\n"),
        ("one line, and a long one\n", " long one\n"),
        ("one\ntwo without an end", "ut an end"),
        ("no line", "ine"),
    ],
)
def test_a_single_document_is_cut_at_a_line(text: str, tail: str) -> None:
    parts = dict(split_texts(Listed((text,)).open(Path()), Packing(val_fraction=0.4)))
    assert parts["train"] + parts["val"] == text
    assert parts["val"] == tail


def test_a_corpus_without_text_is_refused_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    for source in (Listed(()), Listed((None, ""))):
        with pytest.raises(ConfigError, match="no text is left for train"):
            prepare(source, tmp_path / "a", tokenizer=model, packing=NOTHING_HELD)
    with pytest.raises(ConfigError, match="no text is left for val"):
        prepare(Listed(("", "a")), tmp_path / "a", tokenizer=model, packing=Packing(0.5, seed=1))
    assert [p.name for p in tmp_path.iterdir()] == [".a.lock"]


def test_settings_that_cannot_be_are_refused() -> None:
    bad = {"val_fraction": 0.6, "shard_tokens": 0, "num_workers": -1}
    for name, value in bad.items():
        with pytest.raises(ConfigError, match=str(value)):
            Packing(**{name: value})  # type: ignore[arg-type]


def test_many_processes_write_what_one_writes(model: Path, tmp_path: Path) -> None:
    texts = tuple(f"{text} {'word ' * 3000}" for text in TEXTS) * 3
    for name, workers in (("one", 1), ("two", 2)):
        packing = Packing(0.1, shard_tokens=100_000, num_workers=workers)
        prepare(Listed(texts), tmp_path / name, tokenizer=model, packing=packing)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert len(contents(tmp_path / "one")) > 4


def test_an_equal_preparation_is_reused_and_another_refused(model: Path, tmp_path: Path) -> None:
    said: list[str] = []
    packing = Packing(val_fraction=0.1)
    prepare(SOURCE, tmp_path / "a", tokenizer=model, packing=packing)
    before = (tmp_path / "a" / "train_00000.bin").stat()
    prepare(SOURCE, tmp_path / "a", tokenizer=model, packing=packing, say=said.append)
    assert said == [f"{tmp_path / 'a'} is prepared already"]
    assert (tmp_path / "a" / "train_00000.bin").stat() == before
    with pytest.raises(ConfigError, match=r"--out: .*made otherwise: seed '0' -> '1'. Remove it"):
        prepare(SOURCE, tmp_path / "a", tokenizer=model, packing=Packing(0.1, seed=1))
    with pytest.raises(ConfigError, match="source 'a list' -> 'another'"):
        prepare(Listed(("x",), "another"), tmp_path / "a", tokenizer=model, packing=packing)


def test_a_directory_or_a_file_of_something_else_is_left_alone(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    prepare(SOURCE, tmp_path / "a", tokenizer=model, packing=NOTHING_HELD)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").write_text("x")
    (tmp_path / "c").write_text("x")
    for name in "bc":
        with pytest.raises(ConfigError, match="holds no prepared shards"):
            prepare(SOURCE, tmp_path / name, tokenizer=model, packing=NOTHING_HELD)
    assert (tmp_path / "b" / "mine").read_text() == (tmp_path / "c").read_text() == "x"
    with pytest.raises(ConfigError, match="--out: .* cannot be made"):
        prepare(SOURCE, tmp_path / "c" / "d", tokenizer=model, packing=NOTHING_HELD)


def test_the_tokenizer_is_trained_on_what_is_not_held_out(tmp_path: Path) -> None:
    words = np.random.default_rng(0).integers(97, 123, (40, 300)).astype(np.uint8)
    texts = [w.tobytes().decode() for w in words]
    source, packing = Listed(tuple(texts)), Packing(val_fraction=0.1)
    manifest = prepare(source, tmp_path / "a", tokenizer=300, packing=packing)
    train = texts_of(tmp_path / "a", "train")
    train_tokenizer(train, 300, tmp_path / "b.model")
    assert manifest.tokenizer.xxh3_128 == hash_file(tmp_path / "b.model")
    train_tokenizer(texts, 300, tmp_path / "c.model")
    assert manifest.tokenizer.xxh3_128 != hash_file(tmp_path / "c.model")


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(97, 123, 9))) for _ in range(9000)]
    train_tokenizer([" ".join(words * 2)], 66_000, tmp_path / "a.model")
    source = Listed((words[0],))
    manifest = prepare(source, tmp_path / "a", tokenizer=tmp_path / "a.model", packing=NOTHING_HELD)
    assert manifest.dtype == "uint32"
    assert texts_of(tmp_path / "a", "train") == [words[0]]


def test_a_file_of_another_content_is_prepared_anew(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    source = DatasetSource(str(tmp_path / "a.txt"))
    prepare(source, tmp_path / "a", tokenizer=model, packing=NOTHING_HELD)
    assert texts_of(tmp_path / "a", "train") == ["one\ntwo\n"]
    (tmp_path / "a.txt").write_text("three\n")
    with pytest.raises(ConfigError, match="made otherwise: files"):
        prepare(source, tmp_path / "a", tokenizer=model, packing=NOTHING_HELD)


def test_nodes_with_disks_of_their_own_prepare_the_same(tmp_path: Path) -> None:
    for node in ("node0", "node1"):
        prepare_default(tmp_path / node / EMBEDDED, say=lambda line: None)
    assert contents(tmp_path / "node0" / EMBEDDED) == contents(tmp_path / "node1" / EMBEDDED)
    val = texts_of(tmp_path / "node0" / EMBEDDED, "val")
    assert len(val) == 59 and all(" " in text.partition("\n")[0] for text in val)


def test_only_the_embedded_corpus_is_prepared_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("data.prepare.prepare_default", lambda out, say: asked.append(str(out)))
    monkeypatch.chdir(tmp_path)
    embedded = EMBEDDED_PATH
    # A mistyped path must not be answered with another text than the one that was meant.
    others = ("mine", "typo/embedded", str(tmp_path / "corpora/embedded"), "x:corpora/embedded")
    ensure_prepared(DataConfig(path=(*others, f"0.5:{embedded}")))
    assert asked == [embedded]
    Path(embedded).mkdir(parents=True)
    Path(embedded, "manifest.json").write_text("{}")
    ensure_prepared(DataConfig(path=(embedded,)))
    assert asked == [embedded]


def test_a_place_where_the_embedded_corpus_cannot_be_is_an_error_of_data_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(EMBEDDED_PATH).mkdir(parents=True)
    Path(EMBEDDED_PATH, "mine").write_text("x")
    with pytest.raises(ConfigError, match="data.path: .*embedded exists and holds no prepared"):
        ensure_prepared(DataConfig(path=(EMBEDDED_PATH,)))


SLOW = """
import sys, time
from pathlib import Path
from data.prepare import Packing, prepare
from tests.data.shards import SOURCE

class Slow:
    settings = SOURCE.settings
    def open(self, cache):
        Path(sys.argv[3]).open("a").write("opened\\n")
        (cache.parent / "half a shard").write_text("x")
        time.sleep(float(sys.argv[4]))
        return SOURCE.open(cache)

print("ready", flush=True)
prepare(Slow(), sys.argv[1], tokenizer=sys.argv[2], packing=Packing(0.1))
"""


class Preparers:
    """Processes that prepare one directory through a source that takes its time."""

    def __init__(self, out: Path, model: Path) -> None:
        self.out, self.model = out, model
        self.log = out.parent / "log"
        self.running: list[subprocess.Popen[str]] = []

    def start(self, sleep_s: float) -> subprocess.Popen[str]:
        arguments = [str(a) for a in (self.out, self.model, self.log, sleep_s)]
        process = subprocess.Popen(
            [sys.executable, "-c", SLOW, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        self.running.append(process)
        return process

    def opened(self) -> int:
        return len(self.log.read_text().split()) if self.log.exists() else 0

    def wait_until_opened(self, times: int) -> None:
        limit = time.monotonic() + 60
        while self.opened() < times:
            assert time.monotonic() < limit
            time.sleep(0.02)


@pytest.fixture
def preparers(model: Path, tmp_path: Path) -> Iterator[Preparers]:
    made = Preparers(tmp_path / "a", model)
    yield made
    for process in made.running:
        process.kill()
        process.communicate()


def test_one_of_many_processes_prepares_and_the_others_say_what_they_wait_for(
    preparers: Preparers, model: Path, tmp_path: Path
) -> None:
    first = preparers.start(1.5)
    preparers.wait_until_opened(1)
    others = [preparers.start(0) for _ in range(2)]
    said = [process.communicate(timeout=60)[0] for process in (first, *others)]
    assert [process.returncode for process in preparers.running] == [0, 0, 0]
    assert preparers.opened() == 1
    assert "waiting" not in said[0] and "held out: 4 of 40 documents" in said[0]
    for line in said[1:]:
        assert f"{preparers.out} is prepared already" in line
    prepare(SOURCE, tmp_path / "b", tokenizer=model, packing=Packing(0.1))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_what_a_killed_process_left_is_removed_and_made_anew(
    preparers: Preparers, model: Path, tmp_path: Path
) -> None:
    killed = preparers.start(600)
    preparers.wait_until_opened(1)
    waiting = preparers.start(0)
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == "ready\n"
    expected = f"waiting for another process to prepare {preparers.out} (0 s)\n"
    assert waiting.stdout.readline() == expected
    assert not preparers.out.exists()
    killed.send_signal(signal.SIGKILL)
    assert waiting.wait(timeout=60) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == [".a.lock", "a", "log"]
    prepare(SOURCE, tmp_path / "b", tokenizer=model, packing=Packing(0.1))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


ENDLESS = """
import sys
from data.sources import Documents
from data.prepare import Packing, prepare

class Endless:
    def settings(self):
        return {"source": "no end"}
    def open(self, cache):
        def batches():
            while True:
                yield ["word " * 100_000]
        return Documents(10**9, 0, batches)

if __name__ == "__main__":
    prepare(Endless(), sys.argv[1], tokenizer=sys.argv[2],
            packing=Packing(0, shard_tokens=1000, num_workers=2))
"""


def test_the_workers_of_a_killed_process_end_too(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "a"), str(model)],
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    limit = time.monotonic() + 60
    try:
        while not list(tmp_path.glob(".a.partial/shards/train_00010.bin")):
            assert process.poll() is None and time.monotonic() < limit
            time.sleep(0.05)
        tasks = Path("/proc", str(process.pid), "task").glob("*/children")
        children = [pid for task in tasks for pid in task.read_text().split()]
        assert len(children) >= 2
    finally:
        process.kill()
        process.wait()
    while [pid for pid in children if _runs(pid)]:
        assert time.monotonic() < limit
        time.sleep(0.05)


def _runs(pid: str) -> bool:
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
