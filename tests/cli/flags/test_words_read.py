"""Words of a command line as values of dataclasses, and what is said about bad ones."""

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mjax.cli import flags


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the whole."""

    size: int = 1
    rate: float = 0.5
    name: str | None = None
    path: Path | None = None
    kind: Literal["round", "square"] | None = None
    level: Literal[0, 1] = 0
    names: tuple[str, ...] = ("a",)
    window: tuple[int | None, ...] = (None,)
    pair: tuple[int, int] = (1, 2)
    items: list[float] | None = None
    which: tuple[bool, ...] = (True,)
    is_on: bool = False
    is_off: bool = True
    maybe: bool | None = None
    number_or_text: int | str = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole:
    """What the command line makes."""

    model: Annotated[str, flags.Positional("MODEL")]
    part: Part = Part()
    steps: int = 3
    echo: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needed:
    """Flags without defaults."""

    work_dir: Path
    """Of the run."""
    pp: int
    """Stages."""
    reason: str = "none"


def read(*words: str) -> Whole:
    return flags.read(Whole, ["m", *words], prog="prog")


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("--part.size 2", "size", 2),
        ("--part.size=-2", "size", -2),
        ("--part.size +2", "size", 2),
        ("--part.size 1_000", "size", 1000),
        ("--part.size 2 --part.size 3", "size", 3),
        ("--part.rate 1e3", "rate", 1000.0),
        ("--part.rate -inf", "rate", -float("inf")),
        ("--part.rate 3", "rate", 3.0),
        ("--part.name None", "name", None),
        ("--part.name none", "name", "none"),
        ("--part.name=", "name", ""),
        ("--part.name=-x", "name", "-x"),
        ("--part.name=--size", "name", "--size"),
        ("--part.name=a=b", "name", "a=b"),
        ("--part.name -", "name", "-"),
        ("--part.name -1", "name", "-1"),
        ("--part.path a/b", "path", Path("a/b")),
        ("--part.path None", "path", None),
        ("--part.kind square", "kind", "square"),
        ("--part.kind None", "kind", None),
        ("--part.level 1", "level", 1),
        ("--part.names a b c", "names", ("a", "b", "c")),
        ("--part.names=a b", "names", ("a", "b")),
        ("--part.names=", "names", ("",)),
        ("--part.names", "names", ()),
        ("--part.names a --part.names b", "names", ("b",)),
        ("--part.window 64 None -1", "window", (64, None, -1)),
        ("--part.pair 3 4", "pair", (3, 4)),
        ("--part.items 1 2.5", "items", [1.0, 2.5]),
        ("--part.items None", "items", None),
        ("--part.which True false", "which", (True, False)),
        ("--part.is-on", "is_on", True),
        ("--part.is_on", "is_on", True),
        ("--part.is-on --part.no-is-on", "is_on", False),
        ("--part.no-is-off", "is_off", False),
        ("--part.no_is_off", "is_off", False),
        ("--part.maybe True", "maybe", True),
        ("--part.maybe None", "maybe", None),
        ("--part.number-or-text 3", "number_or_text", 3),
        ("--part.number_or_text x", "number_or_text", "x"),
    ],
)
def test_words_become_a_value_of_the_type_of_the_field(line, field, value):
    found = read(*line.split())
    assert found == Whole(model="m", part=dataclasses.replace(Part(), **{field: value}))
    assert type(getattr(found.part, field)) is type(value)


def test_positional_words_may_stand_before_and_behind_flags():
    for words in (["m", "--steps", "5"], ["--steps", "5", "m"], ["--steps=5", "m"]):
        assert flags.read(Whole, words, prog="p") == Whole(model="m", steps=5)
    assert flags.read(Whole, ["--no-echo", "m"], prog="p").echo is False
    assert flags.read(Whole, ["-"], prog="p").model == "-"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--steps", "--steps needs a value, a whole number, got nothing"),
        (
            "--steps --part.is-on",
            "--steps needs a value, a whole number, got the flag --part.is-on",
        ),
        ("--part.kind", "--part.kind needs a value, one of round, square, got nothing"),
        (
            "--part.name -x",
            "--part.name needs a value, a text, got -x; a value that begins with a "
            "hyphen is written --part.name=-x",
        ),
        ("--part.pair 3", "--part.pair needs 2 values, got 3"),
        ("--steps=", "--steps must be a whole number, got ''"),
        ("--steps 10k", "--steps must be a whole number, got 10k; write 10000"),
        ("--steps 1,000", "--steps must be a whole number, got 1,000; write 1000"),
        ("--steps 2.7", "--steps must be a whole number, got 2.7; the nearest is 3"),
        ("--steps 0x10", "--steps must be a whole number, got 0x10"),
        ("--steps \u22121", "--steps must be a whole number, got \u22121; write -1"),
        ("--part.rate 0,1", "--part.rate must be a number, got 0,1; write 0.1"),
        ("--part.rate fast", "--part.rate must be a number, got fast"),
        ("--part.maybe on", "--part.maybe must be True, False or None, got on"),
        ("--part.level 2", "unknown --part.level 2; the nearest is 1 (of 0, 1)"),
        (
            "--part.kind Squar",
            "unknown --part.kind Squar; the nearest is square (of round, square, None)",
        ),
        (
            "--part.is-on=true",
            "--part.is-on is a switch and takes no value, got true; write --part.is-on",
        ),
        (
            "--part.is_off False",
            "--part.is_off is a switch and takes no value, got False; write "
            "--part.no-is-off",
        ),
        (
            "--no-echo=false",
            "--no-echo is a switch and takes no value, got false; write --echo",
        ),
        (
            "--part.is-on=maybe",
            "--part.is-on is a switch and takes no value, got maybe; write "
            "--part.is-on or --part.no-is-on",
        ),
        (
            "x",
            "unexpected word x after MODEL m; give one MODEL, in quotes if it has "
            "spaces",
        ),
        ("--part.is-on x", "unexpected word x after the switch --part.is-on"),
        ("--steps 3 4", "unexpected word 4 after --steps 3"),
        (
            "--part.name a b",
            "unexpected word b after --part.name a; put quotes around a text with "
            "spaces",
        ),
        ("--", "unexpected -- after MODEL m; leave it out"),
        (
            "--part",
            "unknown flag --part; it is a group of flags, which --help part lists",
        ),
    ],
)
def test_a_refusal_names_the_flag_as_typed_the_value_and_the_fix(line, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read(*line.split())


def test_a_long_or_odd_value_is_shown_short_and_quoted():
    with pytest.raises(ValueError, match=r"got 9{60}\.\.\.$"):
        read("--steps", "9" * 5000)
    with pytest.raises(ValueError, match=r"got 'a\\nb'$"):
        read("--steps", "a\nb")


def test_all_that_is_missing_is_named():
    with pytest.raises(
        ValueError, match=r"^--pp is missing; give it a whole number \(stages\)$"
    ):
        flags.read(Needed, ["--work-dir", "a"], prog="p")
    with pytest.raises(
        ValueError, match=r"^--work-dir and --pp are missing; -h explai"
    ):
        flags.read(Needed, [], prog="p")
    with pytest.raises(ValueError, match=r"^MODEL is missing"):
        flags.read(Whole, [], prog="p")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ls:
    """List."""

    path: Annotated[str, flags.Positional("PATH")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstError:
    """Find the first error.

    More about it.
    """

    json: bool = False


def command(*words: str) -> Ls | FirstError:
    return flags.read(Ls | FirstError, words, prog="prog")


def test_the_first_word_names_one_of_several_dataclasses(capsys):
    assert command("ls", "a") == Ls(path="a")
    assert command("first-error", "--json") == FirstError(json=True)
    with pytest.raises(SystemExit) as left:
        command("-h")
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert "  ls           List.\n  first-error  Find the first error.\n" in shown
    with pytest.raises(SystemExit):
        command("ls", "-h")
    assert "usage: prog ls PATH" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "a command is missing (of ls, first-error); write prog COMMAND"),
        ("lss", "unknown command lss; the nearest is ls (of ls, first-error)"),
        ("--json ls", "a command must come before --json (of ls, first-error)"),
    ],
)
def test_a_command_that_is_none_names_the_others(line, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        command(*line.split())


def test_values_of_parts_come_from_the_command_line_before_those_of_overrides():
    parts = {
        Needed: flags.read(Needed, ["--work-dir=a", "--pp=1"], prog="p"),
        Part: Part(),
    }
    needed, part = flags.read_parts(
        parts,
        ["--pp", "3", "--is-on"],
        prog="p",
        guide=flags.Guide(),
        overrides={"--pp": 2, "--size": 9, "--names": ("x",)},
    )
    assert needed == Needed(work_dir=Path("a"), pp=3)
    assert part == Part(size=9, names=("x",), is_on=True)


def refusal(*words: str) -> str:
    """Return what is said about words; "read" if they are right."""
    try:
        flags.read(Whole, words, prog="p")
    except ValueError as error:
        return str(error)
    return "read"


_WORDS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["--", "-h x", "=", "--=", "-", "--part.size", "--part.names", "-x"]
    ),
    st.sampled_from(
        ["--part.is-on", "--steps", "1", "None", "--part.pair=1", "\u2014steps"]
    ),
)


@given(st.lists(_WORDS, max_size=5))
@settings(max_examples=300, deadline=None)
def test_any_words_are_read_or_refused_in_one_line(words):
    if {"-h", "--help"} & {*words}:
        return
    said = refusal(*words)
    assert said.isprintable()
    assert len(said) < 600
