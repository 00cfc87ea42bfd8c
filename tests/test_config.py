"""Unknown names, wrong values and precedence, in YAML and in flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megalite.config import (
    Value,
    differences,
    field_types,
    load,
    suggest,
    to_yaml,
    values_of,
)
from megalite.errors import ConfigError


@dataclass(frozen=True)
class Shape:
    size: str = ""
    """A named size."""
    layers: int = 2
    """How many."""
    width: int = 8
    """How wide."""
    norm: Literal["layer", "rms"] = "layer"
    """Which norm."""


@dataclass(frozen=True)
class Run:
    dir: str = "out"
    """Where."""
    trace: bool = False
    """Whether."""
    deep_check: bool = True
    """Whether, too."""
    rate: float = 1e-3
    """How fast."""
    betas: tuple[float, float] = (0.9, 0.95)
    """A pair."""
    paths: tuple[str, ...] = ()
    """Any number."""
    cut: Literal["even", "cost"] | tuple[int, ...] = "even"
    """A rule or a list."""


@dataclass(frozen=True)
class Whole:
    """All of it."""

    shape: Shape = field(default_factory=Shape)
    run: Run = field(default_factory=Run)


SIZES: dict[str, dict[str, Value]] = {
    "small": {"shape.layers": 4, "shape.width": 16},
    "large": {"shape.layers": 40, "shape.width": 160},
}
PRESETS = {"shape.size": lambda name: SIZES[name]}


def of(*flags: str, text: str = "", path: Path | None = None) -> Whole:
    """The configuration of some flags on top of some YAML, which is put at ``path``."""
    if path is not None:
        path.write_text(text)
    return load(Whole, path, flags, PRESETS)


def error(*flags: str, text: str = "", path: Path | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        of(*flags, text=text, path=path)
    return caught.value


def test_without_anything_every_field_has_its_default() -> None:
    assert of() == Whole()


def test_flags_override_the_file_which_overrides_the_preset_which_overrides_defaults(
    tmp_path: Path,
) -> None:
    text = "shape: {size: small, layers: 5}\nrun: {rate: 3e-4, dir: here}"
    got = of("--run.dir", "there", "--shape.norm=rms", text=text, path=tmp_path / "c.yaml")
    assert got.shape == Shape("small", layers=5, width=16, norm="rms")
    assert got.run == Run(dir="there", rate=3e-4)


def test_a_field_given_its_default_still_overrides_the_preset() -> None:
    assert of("--shape.size", "small", "--shape.layers", "2").shape == Shape("small", 2, 16)


def test_a_preset_flag_that_the_file_would_hide_is_refused(tmp_path: Path) -> None:
    text = "shape: {size: small, layers: 5}"
    found = error("--shape.size", "large", text=text, path=tmp_path / "c.yaml")
    assert found.field == "shape.size" and "shape.layers=5" in found.problem
    assert "width" not in found.problem
    same = of("--shape.size", "small", text=text, path=tmp_path / "c.yaml")
    assert same.shape == Shape("small", 5, 16)
    both = of("--shape.size", "large", "--shape.layers=6", text=text, path=tmp_path / "c.yaml")
    assert both.shape == Shape("large", 6, 160)


@pytest.mark.parametrize("text", ["shape: {layers: 3}", "run: {dir: x}", "shape:\nrun: {dir: x}"])
def test_the_file_alone_is_enough(text: str, tmp_path: Path) -> None:
    got = of(text=text, path=tmp_path / "c.yaml")
    assert got in (Whole(shape=Shape(layers=3)), Whole(run=Run(dir="x")))


UNKNOWN = [
    ("shape.layer", "shape.layers"),
    ("shap.layers", "shape.layers"),
    ("shap.width", "shape.width"),
    ("run.layers", "shape.layers"),
    ("layers", "shape.layers"),
    ("run.shape.layers", "shape.layers"),
    ("run.deepcheck", "run.deep_check"),
    ("run.Rate", "run.rate"),
    ("run.zzz", "run has dir, trace"),
    ("zzz", "The sections are shape, run"),
]


@pytest.mark.parametrize(("name", "advice"), UNKNOWN)
def test_an_unknown_flag_names_the_nearest(name: str, advice: str) -> None:
    found = error(f"--{name}", "3")
    assert found.field == name and advice in found.fix


@pytest.mark.parametrize(("name", "advice"), UNKNOWN)
def test_an_unknown_key_of_the_file_names_the_nearest(
    name: str, advice: str, tmp_path: Path
) -> None:
    nested: object = 3
    for part in reversed(name.split(".")):
        nested = {part: nested}
    found = error(text=yaml.safe_dump(nested), path=tmp_path / "c.yaml")
    assert found.field == name and advice in found.fix
    assert "c.yaml" in found.problem


def test_a_dotted_key_of_the_file_is_told_its_place(tmp_path: Path) -> None:
    assert "shape.layers" in error(text="shape.layers: 3", path=tmp_path / "c.yaml").fix


def test_a_section_is_no_field(tmp_path: Path) -> None:
    assert "such as shape.size" in error("--shape", "3").fix
    assert "size, layers" in error(text="shape: 3", path=tmp_path / "c.yaml").fix


def test_hyphens_are_underscores(tmp_path: Path) -> None:
    assert of("--run.deep-check", "no") == of("--run.deep_check", "no") != Whole()
    got = of(text="run: {deep-check: no}", path=tmp_path / "c.yaml")
    assert got == Whole(run=Run(deep_check=False))


BOOLEANS = [name for name, hint in field_types(Whole).items() if hint is bool]


@pytest.mark.parametrize("name", BOOLEANS)
@pytest.mark.parametrize(
    ("word", "value"),
    [(w, True) for w in ("True", "true", "1", "yes", "on", "TRUE")]
    + [(w, False) for w in ("False", "false", "0", "no", "off", "FALSE")],
)
def test_a_boolean_is_what_it_says(name: str, word: str, value: bool, tmp_path: Path) -> None:
    section, key = name.split(".")
    text = f"{section}:\n  {key}: {word}"
    for got in (of(f"--{name}", word), of(f"--{name}={word}")):
        assert values_of(got)[name] is value
    assert values_of(of(text=text, path=tmp_path / "c.yaml"))[name] is value


@pytest.mark.parametrize("name", BOOLEANS)
@pytest.mark.parametrize("word", ["maybe", "2", "", "tru", "None"])
def test_a_boolean_is_nothing_else(name: str, word: str) -> None:
    found = error(f"--{name}={word}")
    assert found.field == name and "True or False" in found.fix and repr(word) in found.problem


def test_a_boolean_needs_its_word() -> None:
    assert "True or False" in error("--run.trace").fix
    assert "True or False" in error("--run.trace", "--run.dir", "x").fix


@pytest.mark.parametrize("word", ["nan", "inf", "-inf", "1e999", "x", "", "1,5", "--"])
def test_a_number_is_finite(word: str) -> None:
    found = error(f"--run.rate={word}")
    assert found.field == "run.rate" and "finite number" in found.fix


@pytest.mark.parametrize(
    ("word", "value"),
    [("3e-4", 3e-4), ("-1.5E+3", -1500.0), (".5", 0.5), ("2", 2.0), ("1_0", 10.0)],
)
def test_a_number_is_read_alike_from_flag_and_file(word: str, value: float, tmp_path: Path) -> None:
    assert of("--run.rate", word).run.rate == value
    assert of(text=f"run: {{rate: {word}}}", path=tmp_path / "c.yaml").run.rate == value


@pytest.mark.parametrize("word", ["1.5", "0x10", "x", "", "1e-3", "1__0", "٣", "1 2"])
def test_a_whole_number_is_written_as_one(word: str) -> None:
    found = error(f"--shape.layers={word}")
    assert found.field == "shape.layers" and found.fix == "It takes a whole number"


def test_a_whole_number_in_scientific_notation_is_shown_written_out() -> None:
    assert error("--shape.layers", "1e3").fix.endswith("written out: 1000")
    assert of("--shape.layers", "2_000").shape.layers == 2000
    assert of("--shape.layers", "-3").shape.layers == -3


def test_what_is_no_choice_is_told_the_choices() -> None:
    assert error("--shape.norm", "RMS").fix == "It takes one of layer, rms; did you mean rms?"


def test_tuples_are_several_words_or_numbers_with_commas(tmp_path: Path) -> None:
    want = Whole(run=Run(betas=(0.8, 0.9), paths=("a,b", "c"), cut=(1, 2)))
    flags = ["--run.paths", "a,b", "c", "--run.betas=0.8,0.9", "--run.cut", "1", "2"]
    assert of(*flags) == want
    assert of("--run.paths", "a,b", "c", "--run.betas", "[0.8, 0.9]", "--run.cut=[1,2]") == want
    assert of("--run.paths", "[a,b]").run.paths == ("[a,b]",)  # a name, not numbers
    text = "run: {betas: '0.8, 0.9', paths: ['a,b', c], cut: [1, 2]}"
    assert of(text=text, path=tmp_path / "c.yaml") == want
    assert of(text="run: {paths: only}", path=tmp_path / "c.yaml").run.paths == ("only",)


@pytest.mark.parametrize(
    "flags",
    [
        ["--run.betas", "0.9"],
        ["--run.betas", "1", "2", "3"],
        ["--run.betas", "0.9", "x"],
        ["--run.cut", "odd"],
        ["--run.cut", "1", "even"],
        ["--run.dir", "a", "b"],
        ["--run.paths=-x"],
    ],
)
def test_a_tuple_of_the_wrong_length_or_kind_is_refused(flags: list[str]) -> None:
    assert error(*flags).field == flags[0][2:].partition("=")[0]


def test_the_last_of_a_flag_wins() -> None:
    assert of("--shape.layers", "3", "--shape.layers=4").shape.layers == 4
    assert of("--run.deep-check", "yes", "--run.deep_check=False").run.deep_check is False


@pytest.mark.parametrize("flags", [["x"], ["--"], ["--run.dir", "x", "-shape.layers", "3"], ["-x"]])
def test_what_belongs_to_no_flag_is_refused(flags: list[str]) -> None:
    assert error(*flags).field == "flags"


def test_a_value_may_look_like_a_flag_after_an_equals_sign() -> None:
    assert of("--run.dir=--x").run.dir == "--x"
    assert of("--run.dir=a=b").run.dir == "a=b"


BAD_FILES = [
    ("", "no sections"),
    ("- shape", "no sections"),
    ("shape: [1]", "in place of fields"),
    ("shape: {layers: 3", "cannot be read"),
    ("shape: {layers: *x}", "cannot be read"),
    ("a: 1\n---\nb: 2", "cannot be read"),
    ("? [a]\n: 3", "cannot be read"),
    ("shape: {layers: !!python/name:os.system ''}", "cannot be read"),
    ("shape: {layers: 3, layers: 4}", "stands twice"),
    ("shape: {layers: 3}\nshape: {width: 4}", "stands twice"),
    ("run: {deep-check: no, deep_check: no}", "stands twice"),
    ("shape: {layers: }", "no value (null)"),
    ("run: {paths: [a, ~]}", "no value (null)"),
    ("shape: {layers: {a: 1}}", "holds fields"),
    ("shape: {layers: [1]}", "holds a list"),
    ("run: {betas: [0.9, [0.9]]}", "holds a list"),
    ("run: {trace: maybe}", "got 'maybe'"),
    ("run: {rate: .inf}", "got '.inf'"),
]


@pytest.mark.parametrize(("text", "problem"), BAD_FILES)
def test_a_bad_file_is_one_error(text: str, problem: str, tmp_path: Path) -> None:
    assert problem in error(text=text, path=tmp_path / "c.yaml").problem


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config: .*nothing\.yaml"):
        load(Whole, tmp_path / "nothing.yaml", [])
    with pytest.raises(ConfigError, match="--config: .*cannot be read"):
        load(Whole, tmp_path, [])
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ConfigError, match="--config: .*cannot be read"):
        load(Whole, tmp_path / "binary", [])


def test_text_is_taken_as_written_in_the_file(tmp_path: Path) -> None:
    for word in ("on", "010", "1:30", "3e-4", "2020-01-01", "'null'", "'~'"):
        got = of(text=f"run:\n  dir: {word}", path=tmp_path / "c.yaml")
        assert got.run.dir == word.strip("'")


def test_help_names_every_field_once_and_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        of("--run.dir", "x", "--help")
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert text.count("--run.deep-check") == 1 and "Whether, too." in text
    with pytest.raises(SystemExit):
        load(Whole, None, ["-h"], console=False)
    assert capsys.readouterr().out == ""


TEXTS = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1).filter(
    lambda text: text[0] != "-"
)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
CONFIGS: st.SearchStrategy[Whole] = st.builds(
    Whole,
    shape=st.builds(Shape, layers=st.integers(), norm=st.sampled_from(["layer", "rms"])),
    run=st.builds(
        Run,
        dir=st.text(st.characters(exclude_categories=["C"]) | st.just("-")),
        trace=st.booleans(),
        rate=FINITE,
        betas=st.tuples(FINITE, FINITE),
        paths=st.lists(TEXTS).map(tuple),
        cut=st.lists(st.integers(), min_size=1).map(tuple) | st.just("cost"),
    ),
)


@given(CONFIGS)
def test_yaml_reads_back_to_an_equal_configuration(
    tmp_path_factory: pytest.TempPathFactory, config: Whole
) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    got = load(Whole, path, [])
    assert got == config and differences(got, config) == []
    assert {type(v) for v in values_of(got).values()} <= {bool, int, float, str, tuple}


def test_yaml_has_a_line_a_field() -> None:
    text = to_yaml(Whole())
    assert "  betas: [0.9, 0.95]\n" in text
    assert len(text.splitlines()) == len(values_of(Whole())) + 2


def test_differences_name_the_fields_and_both_values() -> None:
    a = Whole()
    b = replace(a, run=replace(a.run, rate=2.0), shape=replace(a.shape, layers=9))
    assert differences(a, b) == [("shape.layers", 2, 9), ("run.rate", 1e-3, 2.0)]


def test_a_suggestion_has_the_nearest_and_all() -> None:
    assert suggest("1F1b", ["gpipe", "1f1b"]) == "Did you mean 1f1b? Use one of gpipe, 1f1b"
    assert suggest("zzz", ["gpipe", "1f1b"]) == "Use one of gpipe, 1f1b"


def test_a_preset_may_refuse_its_name() -> None:
    def none(name: str) -> Mapping[str, Value]:
        raise ConfigError("shape.size", name, "no")

    with pytest.raises(ConfigError, match=r"shape\.size"):
        load(Whole, None, ["--shape.size", "x"], {"shape.size": none})
