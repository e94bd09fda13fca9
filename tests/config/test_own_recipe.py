"""Recipes of one's own: FILE.py:NAME."""

from pathlib import Path

import pytest

from mjax.config.command_line import Command, parse, shared_facts
from mjax.config.train import TrainConfig
from mjax.recipes import RECIPES

OWN = """\
import dataclasses
from mjax.config.train import TrainConfig
from mjax.recipes import RECIPES

def tiny():
    return dataclasses.replace(RECIPES["debug"](), steps=3)

def broken():
    steps = 0
    return TrainConfig(steps=steps)

def wrong():
    return {"steps": 3}

def ends():
    raise SystemExit(3)

VALUE = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    Path("syntax.py").write_text("def f(:\n")
    Path("raises.py").write_text("x = 1\n1 / 0\n")
    Path("empty.py").write_text("")


def read(*words: str) -> tuple[TrainConfig, Command]:
    return parse(words, RECIPES, "prog")


def test_a_function_of_a_file_is_a_recipe(tmp_path):
    for path in ("own.py", "./own.py", tmp_path / "own.py"):
        found, command = read("--recipe", f"{path}:tiny", "--seed", "4")
        assert (found.steps, found.seed, found.model.layers) == (3, 4, 2)
        assert command.recipe == f"{path}:tiny"
    Path("c.toml").write_text('recipe = "own.py:tiny"\nlog.every = 2\n')
    found, _ = read("--config", "c.toml")
    assert (found.steps, found.log.every) == (3, 2)


def test_processes_may_have_the_file_in_other_folders(tmp_path):
    here = shared_facts(*read("--recipe", "own.py:tiny"))
    assert here == shared_facts(*read("--recipe", f"{tmp_path}/own.py:tiny"))
    assert here["--recipe"] == "tiny"


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            "own.py:tinny",
            "own.py has no function tinny; the nearest is tiny (of tiny, "
            "broken, wrong, ends)",
        ),
        (
            "own.py",
            "--recipe own.py names a file but no function; write --recipe own.py:tiny",
        ),
        (
            "own.py:broken",
            "own.py, line 10: broken() failed with ValueError: --steps must "
            "be at least 1, got 0",
        ),
        (
            "own.py:wrong",
            "own.py: wrong() must return a TrainConfig, got dict; end it "
            "with return TrainConfig(...)",
        ),
        (
            "own.py:VALUE",
            "own.py: VALUE is of type int, not a function that returns a TrainConfig",
        ),
        ("own.py:ends", "own.py, line 16: ends() failed with SystemExit: 3"),
        ("syntax.py:f", "syntax.py, line 1: invalid syntax"),
        (
            "raises.py:f",
            "raises.py, line 2: reading it failed with ZeroDivisionError: "
            "division by zero",
        ),
        ("empty.py:f", "empty.py has no function f"),
    ],
)
def test_what_is_wrong_with_the_file_is_told_with_its_line(capsys, recipe, message):
    with pytest.raises(SystemExit) as left:
        read("--recipe", recipe)
    assert left.value.code == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_file_that_is_not_there_says_where_it_was_looked_for(capsys, tmp_path):
    with pytest.raises(SystemExit):
        read("--recipe", "absent.py:f")
    assert capsys.readouterr().err == (
        f"error: --recipe absent.py:f: absent.py does not exist; give FILE.py:NAME, "
        f"relative to {tmp_path}, or the name of a recipe\n"
    )
