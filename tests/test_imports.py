"""Hold the import table of docs/design.md, and the rule that imports do nothing."""

import ast
import fnmatch
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import structure
from scripts.structure import imported, module_names, room_of, table_rows

ROOT = Path(__file__).parent.parent
Table = dict[str, tuple[str, ...]]


def import_table(text: str) -> Table:
    """Read the table: module -> patterns of what it may import, without "mjax."."""
    table: Table = {}
    for modules, allowed in table_rows(text):
        patterns = tuple(re.findall(r"`([^`]+)`", allowed))
        assert patterns or allowed in ("everything", "nothing"), modules
        for module in modules:
            table[module] = ("*",) if allowed == "everything" else patterns
    return table


def _with_parents(name: str) -> list[str]:
    """Return a module and the packages around it, the innermost first, without mjax."""
    parts = name.split(".")[1:]
    return [".".join(parts[:stop]) for stop in range(len(parts), 0, -1)]


def violations(root: Path, table: Table) -> list[str]:
    """List what the modules under root import against the table."""
    known = module_names(root)
    found = []
    for name, path in known.items():
        top, row = room_of(name), room_of(name, path)
        if row == top:
            row = next((own for own in _with_parents(name) if own in table), row)
        if row and row not in table:
            found.append(f"{name}: {row} has no row in the table")
            continue
        for line, target in imported(name, path, known):
            inner = target.partition(".")[2]
            # The bare package holds its version and imports nothing.
            own = not inner or inner.split(".")[0] == top
            allowed = [
                pattern
                for pattern in table.get(row, ())
                if fnmatch.fnmatchcase(inner, pattern)
                or fnmatch.fnmatchcase(inner, f"{pattern}.*")
            ]
            if not own and not allowed:
                found.append(f"{name}:{line}: imports {target}")
    return found


def test_no_module_imports_against_the_table():
    table = import_table((ROOT / "docs" / "design.md").read_text())
    assert violations(ROOT, table) == []


def test_the_table_has_no_way_back():
    """If a may import b, b may not import a, not even through others."""
    table = import_table((ROOT / "docs" / "design.md").read_text())
    below = {
        module: set(table)
        if patterns == ("*",)
        else {pattern.split(".")[0] for pattern in patterns}
        for module, patterns in table.items()
    }
    below["train"].discard("train")
    reached: set[str] = set()
    while len(reached) < len(below):
        free = {m for m, parts in below.items() if parts <= reached} - reached
        assert free, f"a cycle among {sorted(set(below) - reached)}"
        reached |= free


@pytest.mark.parametrize(
    ("path", "code", "caught"),
    [
        ("mjax/kernels/op/api.py", "import mjax.mesh.axes", "imports mjax.mesh.axes"),
        ("mjax/layers/mlp.py", "from mjax import config", "imports mjax.config"),
        ("mjax/layers/mlp.py", "from mjax.mesh import axes", "imports mjax.mesh.axes"),
        ("mjax/layers/mlp.py", "from mjax.kernels.op import api", None),
        ("mjax/layers/mlp.py", "from mjax.kernels import op", "mjax.kernels.op"),
        ("mjax/layers/mlp.py", "from . import norm", None),
        ("mjax/layers/mlp.py", "from ..config import x", "imports mjax.config"),
        ("mjax/layers/__init__.py", "from .. import config", "imports mjax.config"),
        ("mjax/mesh/axes.py", "def f():\n  from mjax import config", "axes:2"),
        ("mjax/mesh/axes.py", "if TYPE_CHECKING:\n  import mjax.config", "axes:2"),
        ("mjax/mesh/axes.py", "importlib.import_module('mjax.config')", "mjax.config"),
        ("mjax/mesh/axes.py", "import jax, mjaxish", None),
        ("mjax/mesh/__main__.py", "import mjax.config", None),
        ("mjax/__init__.py", "import mjax.config", "mjax:1: imports mjax.config"),
        ("mjax/utils.py", "", "utils has no row"),
        ("mjax/layers/plain.py", "from mjax.kernels.op import api", "layers.plain:1"),
        ("mjax/layers/plain.py", "from mjax.layers import norm", None),
        ("mjax/layers/deep/x.py", "from mjax.mesh import axes", None),
        ("mjax/layers/deep/x.py", "from mjax.kernels.op import api", "deep.x:1"),
    ],
)
def test_the_checker_catches_a_planted_import(
    tmp_path: Path, path: str, code: str, caught: str | None
):
    for name in ("config", "layers/norm", "kernels/op/api", "mesh/axes", path[5:-3]):
        file = tmp_path / "mjax" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.touch()
    (tmp_path / path).write_text(code)
    table = {
        "config": ("mesh.axes",),
        "layers": ("kernels.*.api",),
        "layers.plain": (),
        "layers.deep": ("mesh.axes",),
        "kernels": (),
        "mesh": (),
        "train": ("*",),
    }
    found = violations(tmp_path, table)
    if caught is None:
        assert found == []
    else:
        assert len(found) == 1
        assert caught in found[0]


CORRIDOR = ("train", "run", "step", "model", "layers", "kernels")


def tour() -> list[str]:
    """Read the files of the reading tour in docs/design.md, in order."""
    text = (ROOT / "docs" / "design.md").read_text()
    section = text.partition("## Reading tour")[2].partition("\n## ")[0]
    return re.findall(r"\]\(\.\./(mjax/[^)]+\.py)\)", section)


def not_reached(root: Path, files: list[str]) -> list[str]:
    """List the files that none before them imports; the first one is given."""
    known = module_names(root)
    names = {path.relative_to(root).as_posix(): name for name, path in known.items()}
    reached = {names[files[0]]}
    missing = []
    for file in files:
        name = names[file]
        if name not in reached:
            missing.append(file)
        reached |= {target for _, target in imported(name, known[name], known)}
    return missing


def test_each_stop_of_the_tour_is_imported_by_an_earlier_one():
    files = tour()
    assert files[0] == "mjax/train.py"
    assert len(set(files)) == len(files), "a file is opened twice"
    assert not_reached(ROOT, files) == []


def test_a_gap_in_the_tour_is_caught():
    """Without the file that leads to it, a stop is not reached."""
    files = [file for file in tour() if file != "mjax/step/plain.py"]
    assert not_reached(ROOT, files) == ["mjax/step/prefetch.py"]
    assert not_reached(ROOT, files[::-1]) != []


def test_the_tour_walks_the_corridor_that_the_design_names():
    rooms = [file.split("/")[1].removesuffix(".py") for file in tour()]
    first = [room for room in dict.fromkeys(rooms) if room in CORRIDOR]
    assert tuple(first) == CORRIDOR
    text = (ROOT / "docs" / "design.md").read_text()
    assert f"`{' -> '.join(CORRIDOR)}, mesh`" in text


def test_the_figures_and_the_drawing_of_the_design_are_those_of_the_tree():
    """`python -m scripts.structure --svg docs/figures/structure.svg` writes it."""
    found = structure.read(ROOT)
    assert (found.up, found.circles, found.unordered) == ([], [], [])
    counts = (len(found.rooms), len(found.arrows), 0, 0, len(found.longest_chain))
    text = (ROOT / "docs" / "design.md").read_text()
    assert f"| now | {' | '.join(map(str, counts))} |" in text
    drawing = ROOT / "docs" / "figures" / "structure.svg"
    assert drawing.read_text() == structure.as_svg(found)


def imported_scripts(root: Path) -> list[str]:
    """List what the tests of the product import of scripts, at any depth."""
    found = []
    for path in sorted((root / "tests").rglob("*.py")):
        file = path.relative_to(root).as_posix()
        if file.startswith("tests/scripts/"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module or ''}.{alias.name}" for alias in node.names]
            else:
                continue
            found += [
                f"{file}: {name}"
                for name in names
                if name.split(".")[0] == "scripts" or name.startswith("tests.scripts")
            ]
    return found


def test_only_the_tests_of_scripts_import_scripts():
    """But for the reader of imports, of which there is one: this file needs it too."""
    found = imported_scripts(ROOT)
    structure = "tests/test_imports.py: scripts.structure"
    assert [line for line in found if not line.startswith(structure)] == []


@pytest.mark.parametrize(
    ("path", "code", "caught"),
    [
        ("model/test_model.py", "from scripts.gpu import cells", "scripts.gpu.cells"),
        ("model/test_model.py", "from scripts import gpu", "scripts.gpu"),
        ("test_model.py", "def test():\n  import scripts.gpu as g", "scripts.gpu"),
        ("test_model.py", "from tests.scripts.planted import x", "tests.scripts"),
        ("scripts/test_gpu.py", "from scripts import gpu", None),
        ("test_model.py", "import scriptsish, mjax.scripts", None),
    ],
)
def test_a_planted_import_of_a_script_is_caught(
    tmp_path: Path, path: str, code: str, caught: str | None
):
    file = tmp_path / "tests" / path
    file.parent.mkdir(parents=True)
    file.write_text(code)
    found = imported_scripts(tmp_path)
    if caught is None:
        assert found == []
    else:
        assert len(found) == 1
        assert caught in found[0]


def test_importing_the_configuration_loads_no_jax():
    """Config classes compute nothing: they are in modules apart from those that do."""
    code = """
import sys
import mjax.config.train, mjax.config.command_line, mjax.recipes
loaded = {"jax", "flax", "optax", "orbax"} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_importing_every_module_touches_no_device():
    """A backend, once started, would ignore `--simulate-devices`.

    Without the model class for lm-eval, whose base is lm-eval's: `.venv` has none.
    """
    names = [n for n in module_names(ROOT) if n != "mjax.evaluate.lm_eval_model"]
    code = f"""
import importlib
for name in {names}:
    importlib.import_module(name)
from jax._src import xla_bridge
assert xla_bridge._backends == {{}}, xla_bridge._backends
import jax
jax.config.update("jax_platforms", "cpu")
assert jax.devices() and xla_bridge._backends, "the probe sees a started backend"
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
