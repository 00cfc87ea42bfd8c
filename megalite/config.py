"""YAML and flags to nested frozen dataclasses: one dictionary of texts, validated once.

A configuration is a dataclass of sections, each a dataclass of plain fields: ``bool``, ``int``,
``float``, ``str``, a ``Literal`` of words, a tuple of these, or a union of such types. Every value
is read from its text, whether it stood in YAML or in a flag, so both obey the same rules.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
import yaml

from megalite.errors import ConfigError

T = TypeVar("T")
Value = bool | int | float | str | tuple[Any, ...]
Presets = Mapping[str, Callable[[str], Mapping[str, Value]]]

_TYRO = (tyro.conf.FlagConversionOff,)
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
_NUMBER = re.compile(r"[+-]?(\d+(_\d+)*\.?(\d+(_\d+)*)?|\.\d+(_\d+)*)([eE][+-]?\d+)?", re.ASCII)
_DASHED = re.compile(r"-(?![\d.])")
_WHOLE = re.compile(r"[+-]?\d+(_\d+)*", re.ASCII)


@dataclass(frozen=True)
class _Given:
    """What the user wrote for one field: its words, and where they stood."""

    words: tuple[str, ...]
    where: str


def load(
    cls: type[T],
    yaml_path: str | Path | None,
    flags: Sequence[str],
    presets: Presets | None = None,
    console: bool = True,
) -> T:
    """Build ``cls`` from, in rising precedence: its defaults, presets, a YAML file, flags.

    Args:
        cls: a dataclass whose fields are dataclasses ("sections") of plain fields.
        yaml_path: a mapping of sections, or None.
        flags: ``--section.field value ...`` or ``--section.field=value``; hyphens count as
            underscores. ``--help`` prints the fields and raises SystemExit(0).
        presets: by the dotted name of a field whose value stands for those of other fields: the
            function from it to them.
        console: whether ``--help`` prints.
    Raises:
        ConfigError: for the first key that does not exist, value that does not fit its type, or
            preset that was asked for by a flag and contradicts the file.
    """
    known = field_types(cls)
    if any(flag in ("-h", "--help") for flag in flags):
        tyro.cli(cls, args=["--help"], config=_TYRO, console_outputs=console)
    in_file = {} if yaml_path is None else _values(_read_yaml(yaml_path, known), known)
    in_flags = _values(_read_flags(flags, known), known)
    filled: dict[str, Value] = {}
    given = {**in_file, **in_flags}
    for name, expand in (presets or {}).items():
        if name in given:
            filled |= expand(str(given[name]))
        if name in in_flags and in_flags[name] != in_file.get(name):
            _refuse_hidden(name, in_flags, filled, in_file)
    argv = _argv({**filled, **given})
    try:
        return tyro.cli(cls, args=argv, config=_TYRO, console_outputs=False)
    except SystemExit as error:
        raise ConfigError("--config", f"not accepted: {' '.join(argv)}", "See --help") from error


def _refuse_hidden(
    name: str,
    in_flags: Mapping[str, Value],
    filled: Mapping[str, Value],
    in_file: Mapping[str, Value],
) -> None:
    hidden = [n for n in filled if n in in_file and n not in in_flags and in_file[n] != filled[n]]
    if hidden:
        raise ConfigError(
            name,
            f"{in_flags[name]} as a flag is overridden by the file's "
            + ", ".join(f"{n}={in_file[n]}" for n in hidden),
            "Take these out of the file, or give them as flags too",
        )


def field_types(cls: type[Any]) -> dict[str, Any]:
    """The type of every field of every section, by dotted name, in the order of definition."""
    found: dict[str, Any] = {}
    for section, kind in get_type_hints(cls).items():
        assert is_dataclass(kind), f"{section} is not a section"
        found.update({f"{section}.{name}": hint for name, hint in get_type_hints(kind).items()})
    return found


def values_of(config: Any) -> dict[str, Value]:
    """Every field's value by dotted name."""
    return {
        f"{section.name}.{field.name}": getattr(getattr(config, section.name), field.name)
        for section in fields(config)
        for field in fields(getattr(config, section.name))
    }


def differences(a: T, b: T) -> list[tuple[str, Value, Value]]:
    """The fields in which two configurations of one class differ: (name, in a, in b)."""
    left, right = values_of(a), values_of(b)
    return [(name, left[name], right[name]) for name in left if left[name] != right[name]]


def to_yaml(config: Any) -> str:
    """Every field, as YAML that ``load`` reads back to an equal configuration."""
    nested: dict[str, dict[str, Any]] = {}
    for name, value in values_of(config).items():
        section, field = name.split(".")
        nested.setdefault(section, {})[field] = value
    return yaml.dump(nested, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)


def suggest(word: str, known: Sequence[str]) -> str:
    """Advice for a word that is not among the known ones: the nearest, and all of them."""
    lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.7)
    guess = f"Did you mean {lower[near[0]]}? " if near else ""
    return f"{guess}Use one of {', '.join(known)}"


class _Dumper(yaml.SafeDumper):
    """A line a field."""


_Dumper.add_representer(
    tuple, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, True)
)


# --- from YAML and flags to words ---


class _Loader(yaml.SafeLoader):
    """Scalars stay as written (except null) and a key may stand only once."""

    yaml_implicit_resolvers = {
        first: [r for r in resolvers if r[0] == "tag:yaml.org,2002:null"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            name, line = _normal(key.value), key.start_mark.line + 1
            if name in seen:
                raise ConfigError(
                    name,
                    f"stands twice in {key.start_mark.name}, in lines {seen[name]} and {line}",
                    "Leave one of them out",
                )
            seen[name] = line
        return super().construct_mapping(node, deep)


def _load_yaml(path: str | Path) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return yaml.load(file, _Loader)  # noqa: S506 - a SafeLoader
    except FileNotFoundError as error:
        raise ConfigError(
            "--config", f"there is no file {path}", "Give the path of a YAML file"
        ) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        text = " ".join(str(error).split())
        raise ConfigError("--config", f"{path} cannot be read: {text}", "Correct it") from error


def _read_yaml(path: str | Path, known: Mapping[str, Any]) -> dict[str, _Given]:
    tree = _load_yaml(path)
    sections = _sections(known)
    if not isinstance(tree, dict) or not tree:
        raise ConfigError(
            "--config",
            f"{path} holds no sections",
            f"Write sections ({', '.join(sections)}) with fields",
        )
    found: dict[str, _Given] = {}
    for key, content in tree.items():
        section = _normal(key)
        if section not in sections:
            raise _unknown(_deepest(section, content), known, str(path))
        if content is not None and not isinstance(content, dict):
            raise ConfigError(
                section,
                f"{path} holds {content!r} in place of fields",
                f"Nest fields below it: {', '.join(sections[section])}",
            )
        for field, value in (content or {}).items():
            name = f"{section}.{_normal(field)}"
            if name not in known:
                raise _unknown(_deepest(name, value), known, str(path))
            found[name] = _Given(_words(name, value, known[name]), str(path))
    return found


def _deepest(name: str, content: Any) -> str:
    """The dotted name of the first leaf below a key, which says best what was meant."""
    for _ in range(4):
        if not isinstance(content, dict) or not content:
            break
        key, content = next(iter(content.items()))
        name = f"{name}.{_normal(key)}"
    return name


def _words(name: str, value: Any, hint: Any) -> tuple[str, ...]:
    if hint == tuple[str, ...] and isinstance(value, dict):
        value = [_entry(name, key, content) for key, content in value.items()]
    items = value if isinstance(value, list) and _takes_many(hint) else [value]
    if any(item is None for item in items):
        raise ConfigError(name, "has no value (null)", f"Leave it out, or give {accepts(hint)}")
    for item in items:
        if not isinstance(item, str):
            kind = "fields" if isinstance(item, dict) else "a list"
            raise ConfigError(name, f"holds {kind}: {item!r}", f"It takes {accepts(hint)}")
    return tuple(items)


def _entry(name: str, key: object, content: Any) -> str:
    """A mapping of mappings is a list of texts: ``{100: {tp: 2}}`` is ``["100:tp=2"]``."""
    if not isinstance(content, dict) or not content:
        raise ConfigError(name, f"{key} holds {content!r}", "Nest fields with values below it")
    values = {k: ",".join(map(str, v)) if isinstance(v, list) else v for k, v in content.items()}
    return f"{key}:" + ",".join(f"{_normal(k)}={v}" for k, v in values.items())


def _read_flags(flags: Sequence[str], known: Mapping[str, Any]) -> dict[str, _Given]:
    found: dict[str, _Given] = {}
    for flag, words in _split_flags(flags):
        name = _normal(flag[2:])
        if name not in known:
            raise _unknown(name, known, "the flags")
        hint = known[name]
        if not words:
            raise ConfigError(name, f"{flag} has no value", f"It takes {accepts(hint)}")
        if len(words) > 1 and not _takes_many(hint):
            raise ConfigError(
                name,
                f"{flag} has {len(words)} values: {' '.join(words)}",
                f"It takes {accepts(hint)}",
            )
        # The last one wins, as everywhere: scripts add flags to override their own.
        found[name] = _Given(words, "the flags")
    return found


def _split_flags(flags: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    flag, words = "", list[str]()
    for word in flags:
        if word.startswith("--") and word != "--":
            if flag:
                yield flag, tuple(words)
            flag, equals, value = word.partition("=")
            words = [value] if equals else []
        elif not flag or re.match(r"-([A-Za-z]|-$)", word):
            raise ConfigError(
                "flags",
                f"{word!r} belongs to no setting",
                "Write --section.field value, or --section.field=-value for a value with a dash",
            )
        else:
            words.append(word)
    if flag:
        yield flag, tuple(words)


def _normal(name: object) -> str:
    return str(name).replace("-", "_")


def _sections(known: Mapping[str, Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in known:
        section, field = name.split(".")
        found.setdefault(section, []).append(field)
    return found


def _unknown(name: str, known: Mapping[str, Any], where: str) -> ConfigError:
    """The error for a name that does not exist, with the nearest names that do."""
    section, _, field = name.rpartition(".")
    sections = _sections(known)
    inside = [f"{section}.{f}" for f in sections.get(section, [])]
    near = [k for k in known if k.split(".")[1] == field]
    if name in sections:
        advice = f"{name} is a section; name a field, such as {name}.{sections[name][0]}"
        return ConfigError(name, f"no such setting (in {where})", advice)
    for choice in (inside, [*known, *sections]):
        near = near or difflib.get_close_matches(name, choice, n=3, cutoff=0.75)
    if near:
        fix = f"Did you mean {' or '.join(near)}?"
    elif inside:
        fix = f"{section} has {', '.join(sections[section])}"
    else:
        fix = f"The sections are {', '.join(sections)}"
    return ConfigError(name or "--", f"no such setting (in {where})", fix)


# --- from words to values ---


def _values(given: Mapping[str, _Given], known: Mapping[str, Any]) -> dict[str, Value]:
    return {name: _parse(name, known[name], value) for name, value in given.items()}


def _parse(name: str, hint: Any, given: _Given) -> Value:
    try:
        return _value(hint, given.words)
    except ValueError as error:
        raise ConfigError(
            name,
            f"got {' '.join(given.words)!r} (in {given.where})",
            f"It takes {accepts(hint)}{error}",
        ) from error


_YAML_LIST = re.compile(r"\[(.*)\]")


def _value(hint: Any, words: tuple[str, ...]) -> Value:
    """The value of a field of type ``hint``; a ValueError carries more of the advice."""
    if get_origin(hint) in (Union, types.UnionType):
        for option in get_args(hint):
            with contextlib.suppress(ValueError):
                return _value(option, words)
        raise ValueError("")
    if get_origin(hint) is tuple:
        items = get_args(hint)
        if len(words) == 1 and str not in items:
            numbers = _YAML_LIST.sub(r"\1", words[0].strip())
            words = tuple(word.strip() for word in numbers.split(","))
        if items[-1] is Ellipsis:
            items = items[:1] * len(words)
        if len(items) != len(words):
            raise ValueError("")
        if any(_DASHED.match(word) for word in words):
            raise ValueError(", none with a dash in front")
        return tuple(_scalar(item, word) for item, word in zip(items, words, strict=True))
    if len(words) != 1:
        raise ValueError("")
    return _scalar(hint, words[0])


def _scalar(hint: Any, word: str) -> Value:
    if get_origin(hint) is Literal:
        options = get_args(hint)
        if word in options:
            return word
        near = difflib.get_close_matches(word.lower(), options, n=1)
        raise ValueError(f"; did you mean {near[0]}?" if near else "")
    if hint is bool:
        if word.lower() in (*_TRUE, *_FALSE):
            return word.lower() in _TRUE
        raise ValueError("")
    if hint is int:
        if _WHOLE.fullmatch(word):
            return int(word)
        if _NUMBER.fullmatch(word) and math.isfinite(float(word)) and float(word).is_integer():
            raise ValueError(f", written out: {int(float(word))}")
        raise ValueError("")
    if hint is float:
        if _NUMBER.fullmatch(word) and math.isfinite(float(word)):
            return float(word)
        raise ValueError("")
    assert hint is str, f"a field of type {hint} cannot be read"
    return word


def _takes_many(hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_takes_many(option) for option in get_args(hint))
    return get_origin(hint) is tuple


def accepts(hint: Any) -> str:
    """What a field of this type takes, in words."""
    if get_origin(hint) in (Union, types.UnionType):
        return ", or ".join(accepts(option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    if get_origin(hint) is tuple:
        items = get_args(hint)
        plural = {int: "whole numbers", float: "numbers", str: "words"}[items[0]]
        return f"one or more {plural}" if items[-1] is Ellipsis else f"{len(items)} {plural}"
    return {
        bool: "True or False",
        int: "a whole number",
        float: "a finite number",
        str: "one text",
    }[hint]


def _argv(values: Mapping[str, Value]) -> list[str]:
    argv: list[str] = []
    for name, value in values.items():
        if isinstance(value, tuple):
            argv += [f"--{name}", *(_text(item) for item in value)]
        else:
            argv.append(f"--{name}={_text(value)}")
    return argv


def _text(value: Value) -> str:
    return repr(value) if isinstance(value, float) else str(value)
