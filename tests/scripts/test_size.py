"""Counts of small trees, made by hand."""

import json
from pathlib import Path

import pytest

from scripts import size, structure

CODE = '''"""A module.

Two lines more."""
# A comment.

import os  # counts


class Thing:
    """No code."""

    field: int = 1
    """No code either."""

    def method(self):
        text = """Lines
        of a value"""
        return text
'''
FILES = {
    "mjax/__init__.py": "",
    "mjax/train.py": "from mjax import run\n",
    "mjax/run/__init__.py": "",
    "mjax/run/loop.py": "def f():\n  import mjax.run.signals\n",
    "mjax/run/signals.py": "import mjax.run.loop\n",
    "mjax/mesh/__init__.py": "",
    "mjax/mesh/__main__.py": "import mjax.run\nprint(1)\n",
    "mjax/health/check.py": CODE,
    "mjax/observe/page.js": "let a;\n\nlet b;\n",
    "mjax/observe/vendor/big.js": "1\n2\n3\n",
    "scripts/a.py": "import scripts.b\n",
    "scripts/b.py": "import scripts.a\n",
    "tests/test_a.py": "assert 1\n",
}
ROWS = ("train", "run", "health", "observe", "mesh")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "docs").mkdir()
    rows = [f"| `{room}` | nothing | words |" for room in ROWS]
    (tmp_path / "docs" / "design.md").write_text(
        "# Design\n\n## Reading tour\n\n1. [a](../mjax/train.py)\n\n"
        "## Who may import whom\n\n|---|---|---|\n" + "\n".join(rows) + "\n"
    )
    return tmp_path


def test_lines_of_code_are_neither_blank_nor_comments_nor_docstrings():
    assert size.code_lines(CODE) == 7


def test_the_figures_of_a_small_tree(tree: Path):
    assert size.figures(tree) == {
        "mjax without health and observe": 6,
        "mjax/health and mjax/observe": 7,
        ".js and .css": 2,
        "scripts": 2,
        "tests": 1,
        "words of docs": len((tree / "docs" / "design.md").read_text().split()),
        "rooms of mjax": 5 - 1,  # observe has no module
        "arrows": 2,
        "arrows up": 1,  # of mesh/__main__.py to run
        "floors": 2,
        "circles of files": 2,
        "files of the tour": 1,
        "lines of the tour": 1,
    }


def test_a_main_that_only_calls_commands_belongs_to_the_program(tree: Path):
    (tree / "mjax/commands.py").write_text("")
    (tree / "mjax/mesh/__main__.py").write_text(
        "import sys\n\nfrom mjax.commands import mesh\n\nsys.exit(mesh.main())\n"
    )
    assert size.graph(tree).up == []


def test_a_figure_above_its_budget_fails_the_check(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    design = tree / "docs" / "design.md"
    text = design.read_text()
    monkeypatch.setattr(structure, "ROOT", tree)
    for most, code in (("2", 0), ("1", 1)):
        design.write_text(f"{text}\n## Size\n\n| scripts | 9 | {most} |\n")
        assert size.main(["--root", str(tree), "--check"]) == code
    assert capsys.readouterr().out.endswith("scripts: 2, at most 1\n")
    assert size.main(["--root", str(tree), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["above"] == ["scripts"]
