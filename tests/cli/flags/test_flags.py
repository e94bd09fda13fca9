"""Flags from dataclasses, and what is said about bad ones."""

import dataclasses
import re
import subprocess
import sys
from typing import Literal

import pytest

from mjax.cli import flags
from mjax.cli.flags.standard import ArgumentParser


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A part that checks itself."""

    size: int = 1
    """Must not be negative."""
    kind: Literal["round", "square"] = "round"
    """Shape."""
    is_big: bool = True
    """A switch."""
    colour: Literal["red", "green"] | None = None
    """Of choices, or absent."""
    weight: int | None = None
    """A whole number, or absent."""

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"--part.size must be at least 0, got {self.size}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole:
    """What the command line makes."""

    part: Part = Part()
    count: int = 3
    """A number."""

    def __post_init__(self) -> None:
        if self.count > 9:
            raise ValueError(f"count must be below 10, got {self.count}")


def read(*argv: str, default: Whole | None = None) -> Whole:
    return flags.read(Whole, argv, prog="prog", default=default)


def test_words_become_fields_over_the_default():
    default = Whole(part=Part(size=5), count=4)
    got = read("--part.kind=square", "--part.no-is-big", default=default)
    assert got == Whole(part=Part(size=5, kind="square", is_big=False), count=4)
    assert read() == Whole()


def test_an_optional_flag_takes_its_kind_or_none():
    assert read("--part.colour", "red", "--part.weight=2").part == Part(
        colour="red", weight=2
    )
    default = Whole(part=Part(colour="red", weight=2))
    absent = ["--part.colour=None", "--part.weight", "None"]
    assert read(*absent, default=default) == Whole()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--part.size -1", "--part.size must be at least 0, got -1"),
        ("--count 10", "count must be below 10, got 10"),
        (
            "--part.kind sqare",
            "unknown --part.kind sqare; the nearest is square (of round, square)",
        ),
        (
            "--part.colour=blau",
            "unknown --part.colour blau; the nearest is red (of red, green, None)",
        ),
        ("--count many", "--count must be a whole number, got many"),
        ("--count=2.7", "--count must be a whole number, got 2.7; the nearest is 3"),
        (
            "--part.weight 1e1",
            "--part.weight must be a whole number, got 1e1; the nearest is 10",
        ),
        ("--part.weight inf", "--part.weight must be a whole number, got inf"),
        ("--size 3", "unknown flag --size; the nearest is --part.size"),
        ("--part.sizes=3", "unknown flag --part.sizes; the nearest is --part.size"),
    ],
)
def test_a_refusal_is_a_value_error_with_its_own_words(argv: str, message: str):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read(*argv.split())


def test_flags_are_replaced_wherever_they_stand():
    words = ["--batch.microbatches", "4", "--mesh.dp=8", "--seed", "1"]
    changes = {"--mesh.dp": ["6"], "--batch.microbatches": ["5"]}
    assert flags.with_flags(words, changes) == [
        *("--seed", "1", "--mesh.dp", "6", "--batch.microbatches", "5")
    ]
    assert flags.with_flags(words, {}) == words


def test_the_flags_of_a_command_line_have_all_their_values():
    words = ["--data.path", "a", "b", "--seed=3", "--no-warm", "--optim.lr_x", "-1"]
    assert flags.values(words) == {
        "--data.path": ["a", "b"],
        "--seed": ["3"],
        "--no-warm": [],
        "--optim.lr-x": ["-1"],
    }
    assert flags.values([]) == {}
    with pytest.raises(ValueError, match="flags begin with two hyphens, got seed"):
        flags.values(["seed", "3"])


def test_a_command_gets_the_words_behind_its_name(tmp_path, monkeypatch, capsys):
    (tmp_path / "shouted.py").write_text("def main(argv): print(*argv); return 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    commands = {"shout": "shouted", "absent": "no_such_module"}
    assert flags.run_command(["shout", "a", "--help"], commands, "Help.") == 7
    assert capsys.readouterr().out == "a --help\n"
    for word in ("-h", "--help"):
        assert flags.run_command([word], commands, "Help.") == 0
        assert capsys.readouterr() == ("Help.\n", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "a command is missing"),
        (["shot", "-h"], "there is no command shot"),
        (["--shout"], "there is no command --shout"),
    ],
)
def test_a_command_that_is_none_is_bad_input(capsys, words, said):
    assert flags.run_command(words, {"shout": "shouted"}, "Help.") == 2
    assert capsys.readouterr() == ("", f"error: {said}\n\nHelp.\n")


def test_a_reader_that_has_gone_ends_a_command_without_a_traceback():
    code = "import sys; from mjax.cli import flags; sys.stdin.read()\n"
    code += "sys.exit(flags.run_command(['-h'], {}, 'word ' * 10))"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (1, b"")


def test_a_parser_of_the_standard_library_tells_mistakes_alike(capsys):
    parser = ArgumentParser(prog="prog")
    parser.add_argument("--steps", type=int, required=True)
    for words, said in (
        ([], "the following arguments are required: --steps"),
        (["--steps", "x"], "argument --steps: invalid int value: 'x'"),
        (["--steps", "1", "y"], "unrecognized arguments: y"),
    ):
        with pytest.raises(SystemExit) as left:
            parser.parse_args(words)
        assert left.value.code == 2
        shown = f"error: {said}; prog -h lists all flags\n"
        assert capsys.readouterr() == ("", shown)
