"""The command `mjax`, what its completion offers, and the wheel away from the clone."""

import email
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import mjax
from mjax.__main__ import PROGRAMS, main
from mjax.cli import completion, environment

ROOT = Path(__file__).parent.parent


def python(*words: str, cwd: Path | None = None, path: Path = ROOT) -> str:
    """Run Python with one folder of modules; return what it printed, on both."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=cwd,
        env=environment,
    )  # fmt: skip
    return f"{done.returncode}\n{done.stdout}{done.stderr}"


def test_the_programs_are_the_modules_that_can_be_started():
    packages = {path.parent.name for path in ROOT.glob("mjax/*/__main__.py")}
    assert set(PROGRAMS) == packages | {"train"}


def test_the_help_lists_all_programs(capsys: pytest.CaptureFixture[str]):
    assert main(["-h"]) == 0
    printed = capsys.readouterr().out
    for name in (*PROGRAMS, "completion"):
        assert f"\n  {name} " in printed


def test_without_a_program_the_help_is_shown_and_nothing_was_done(
    capsys: pytest.CaptureFixture[str],
):
    assert main([]) == 2
    assert "usage: mjax" in capsys.readouterr().out


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"mjax {mjax.__version__} (jax ")


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("trian", "there is no program trian; the nearest is train"),
        ("--recipe", "name the program first: mjax train --recipe"),
    ],
)
def test_an_unknown_program_is_answered(
    word: str, answer: str, capsys: pytest.CaptureFixture[str]
):
    assert main([word]) == 2
    assert answer in capsys.readouterr().err


def test_a_program_gets_its_words_and_its_exit_code_comes_back():
    assert "--data.path" in python("-m", "mjax", "evaluate", "-h")
    refused = python("-m", "mjax", "train", "--stepz", "3")
    assert refused.startswith("2\n")
    assert "--stepz" in refused


@pytest.mark.parametrize(
    ("words", "among"),
    [
        ([""], "train"),
        (["tr"], "train"),
        (["completion", "z"], "zsh"),
        (["train", "--mesh.t"], "--mesh.tp"),
        (["train", "--optim.name", ""], "lamb"),
        (["observe", ""], "serve"),
        (["ckpt", "ls", "--js"], "--json"),
        (["train", "--recipe", "gp"], "gpt-1b3"),
        (["train", "--no-keep"], "--no-keep-compiled"),
        (["tune", ""], "export"),
    ],
)
def test_what_a_word_can_become(words: list[str], among: str):
    found = completion.candidates(words, PROGRAMS)
    assert among in found
    assert all(word.startswith(words[-1]) for word in found)


@pytest.mark.parametrize(
    "words", [["nothing", ""], ["train", "--work-dir", ""], ["train", "--nothing-li"]]
)
def test_nothing_is_offered_where_nothing_is_known(words: list[str]):
    assert completion.candidates(words, PROGRAMS) == []


def test_bash_completes_a_flag(tmp_path: Path):
    command = tmp_path / "mjax"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m mjax "$@"\n')
    command.chmod(0o755)
    asked = (
        f"{completion.SCRIPTS['bash']}\nCOMP_WORDS=(mjax train --mesh.tp-o)\n"
        'COMP_CWORD=2\n_mjax\necho "${COMPREPLY[@]}"\n'
    )
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", asked], capture_output=True, text=True, check=True,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout.split() == ["--mesh.tp-overlap"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built from a copy: a build leaves files behind."""
    folder = tmp_path_factory.mktemp("package")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "mjax", folder / "mjax", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder)
    built = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(folder)]
    subprocess.run(built, check=True, capture_output=True)
    (path,) = (folder / "dist").glob("*.whl")
    return path


def test_the_wheel_has_every_file_of_the_package(wheel: Path):
    files = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "mjax").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = set(zipfile.ZipFile(wheel).namelist())
    assert files - names == set()
    assert {name for name in names if not name.startswith("mjax")} == set()


def test_the_wheel_says_what_it_is(wheel: Path):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
    said = email.message_from_bytes(archive.read(name))
    assert said["Version"] == mjax.__version__
    assert said["Requires-Python"] == ">=3.12"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(said.get_all("Provides-Extra") or []) == set(
        project["optional-dependencies"]
    )


def test_the_wheel_works_away_from_the_clone(wheel: Path, tmp_path: Path):
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    zipfile.ZipFile(wheel).extractall(installed)
    where = python(
        "-c", "import mjax; print(mjax.__file__)", cwd=elsewhere, path=installed
    )
    assert where == f"0\n{installed}/mjax/__init__.py\n"
    shown = ("-m", "mjax", "train", "--recipe", "demo", "--print-config")
    there, here = python(*shown, cwd=elsewhere, path=installed), python(*shown)
    assert there == here
    assert there.startswith("0\n")


@pytest.mark.parametrize(
    ("words", "package"),
    [
        (["mjax.train", "--recipe", "debug"], "jax and 14 more packages"),
        (["mjax", "ckpt", "ls", "runs/a"], "jax and 14 more packages"),
        (["mjax.launch", "-h"], "msgspec"),
    ],
)
def test_a_python_without_the_packages_is_told_how_to_activate_them(words, package):
    # -S leaves out site-packages.
    code, said, *more = python("-S", "-m", *words).splitlines()
    assert (code, more) == ("2", [])
    assert said.startswith(f"error: this Python has no {package}: {sys.executable} (")
    assert said.endswith(
        "`source .venv/bin/activate`, or create it first with `make env`"
    )


def test_the_packages_that_are_looked_for_are_the_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[^\w-]", each)[0] for each in project["dependencies"]}
    imported = {name.removesuffix("-checkpoint").replace("-", "_") for name in names}
    assert set(environment.PACKAGES) == imported | {"jaxlib"}
