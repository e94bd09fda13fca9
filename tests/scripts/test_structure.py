"""Rooms and arrows of small trees, counted by hand."""

import json
from pathlib import Path

import pytest

from scripts import structure

FILES = {
    "mjax/__init__.py": "",
    "mjax/train.py": "from mjax import run",
    "mjax/run/__init__.py": "",
    "mjax/run/loop.py": "def f():\n  import mjax.mesh.axes\nfrom . import signals",
    "mjax/run/signals.py": "if TYPE_CHECKING:\n  from mjax.flags import read",
    "mjax/mesh/__init__.py": "",
    "mjax/mesh/axes.py": "",
    "mjax/mesh/__main__.py": "import mjax.flags",
    "mjax/flags.py": "",
}
ROWS = ("train", "run", "flags", "mesh")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    write_table(tmp_path, ROWS)
    return tmp_path


def write_table(root: Path, rooms: tuple[str, ...]) -> None:
    (root / "docs").mkdir(exist_ok=True)
    rows = [f"| `{room}` | nothing | words |" for room in rooms]
    text = "\n".join(["## Who may import whom", "", "|---|---|---|", *rows, ""])
    (root / "docs" / "design.md").write_text(text)


def test_rooms_and_arrows_are_counted_once_and_lazy_imports_too(tree: Path):
    found = structure.read(tree)
    assert found.arrows == [
        ("run", "flags"),
        ("run", "mesh"),
        ("train", "flags"),  # of mesh/__main__.py, which belongs to the program
        ("train", "run"),
    ]
    assert (found.up, found.circles, found.unordered) == ([], [], [])
    assert found.longest_chain == ["train", "run", "flags"]
    assert found.floors == [["train"], ["run"], ["flags", "mesh"]]
    assert ("train", "flags") not in found.direct  # through run
    assert structure.main(["--root", str(tree)]) == 0


def test_an_arrow_to_an_earlier_row_runs_up(tree: Path):
    (tree / "mjax/mesh/axes.py").write_text("import mjax.flags")
    assert structure.read(tree).up == [("mesh", "flags")]
    assert structure.main(["--root", str(tree)]) == 1
    write_table(tree, ("train", "run", "mesh", "flags"))
    assert structure.read(tree).up == []
    assert structure.main(["--root", str(tree)]) == 0


def test_a_circle_and_a_room_without_a_row_are_found(
    tree: Path, capsys: pytest.CaptureFixture[str]
):
    (tree / "mjax/flags.py").write_text("import mjax.run.loop")
    (tree / "mjax/extra.py").write_text("")
    assert structure.main(["--root", str(tree), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["circles"] == [["flags", "run"]]
    assert said["longest_chain"] == []
    assert said["without_row"] == ["extra"]
    assert said["num_rooms"] == 5


def test_the_drawing_has_every_room_and_every_direct_arrow(tree: Path, tmp_path: Path):
    drawing = tmp_path / "rooms.svg"
    structure.main(["--root", str(tree), "--svg", str(drawing)])
    text = drawing.read_text()
    assert text.count("<polyline ") == len(structure.read(tree).direct) == 3
    assert all(f">{room}</text>" in text for room in ROWS)


def test_a_folder_without_mjax_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as left:
        structure.main(["--root", str(tmp_path)])
    assert left.value.code == 2
    assert f"--root {tmp_path} has no folder mjax" in capsys.readouterr().err
