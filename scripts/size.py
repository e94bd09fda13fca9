"""Count the size of the repository by room, and compare it with its budget.

    python -m scripts.size [--root FOLDER] [--json] [--run] [--check]

Input: the tree under --root. Output: lines of code by room, and the figures of the
table "Size" of docs/design.md beside the table's. A line of code is a line of a .py
file that is not blank, no comment alone and no part of a docstring. A room is a
top-level name of mjax/. Figures of rooms and arrows are those of `scripts.structure`,
but a `__main__.py` counts in its own room, unless it only calls `mjax.commands`. A
circle of files is a group of modules that import each other, at any depth. With --run,
the modules that a short training run imports are counted too. --check ends with 1 if a
figure exceeds its budget.
"""

import argparse
import ast
import collections
import io
import json
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from scripts import structure

_PARTS = ("mjax", "scripts", "tests", "examples", "notebooks")
_SIDE = ("health", "observe")
"""Rooms of mjax that are counted apart from the rest."""
_OTHER = (".js", ".css", ".toml", ".sql")
_LARGE = 500
"""Lines of a large module."""
_HEAD = 5
"""Most lines of code of a `__main__.py` that only calls `mjax.commands`."""
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
"""Fields of a statement that hold statements."""
_SKIPPED = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)


_RUN = """
import atexit, json, sys
from mjax.__main__ import main

def write():
    files = {name: module.__file__ for name, module in sys.modules.items()
             if name.partition(".")[0] == "mjax" and module.__file__}
    with open(sys.argv[-1] + ".json", "w") as file:
        json.dump(files, file)

atexit.register(write)
main()
"""
"""Program that is `mjax`, and then writes the files of its modules."""


# ------------------------------------------------------------------------------- lines


def code_lines(text: str) -> int:
    """Count the lines of a Python file with code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    for statement in _statements(ast.parse(text).body):
        if isinstance(statement, ast.Expr) and _is_text(statement.value):
            end = statement.end_lineno or statement.lineno
            lines -= set(range(statement.lineno, end + 1))
    return len(lines)


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield statements and those inside them."""
    for statement in body:
        yield statement
        for inner in _BLOCKS:
            yield from _statements(getattr(statement, inner, ()))


def _is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def lines_by_room(root: Path) -> dict[str, dict[str, int]]:
    """Count the lines of code of each part of the tree, by its top-level names."""
    parts: dict[str, dict[str, int]] = {}
    for part in _PARTS:
        rooms: collections.Counter[str] = collections.Counter()
        for path in sorted((root / part).rglob("*.py")):
            name = path.relative_to(root / part).parts[0].removesuffix(".py")
            rooms[name] += code_lines(path.read_text())
        parts[part] = dict(rooms)
    return parts


def lines_by_suffix(root: Path) -> dict[str, int]:
    """Count the lines of other files of mjax that are not blank, by suffix."""
    counts: collections.Counter[str] = collections.Counter()
    for path in (root / "mjax").rglob("*"):
        if path.suffix in _OTHER and "vendor" not in path.parts:
            counts[path.suffix] += len(
                [*filter(str.strip, path.read_text().splitlines())]
            )
    return dict(counts)


def doc_words(root: Path) -> int:
    """Count the words of the pages in docs/, code included."""
    paths = (root / "docs").rglob("*.md")
    return sum(len(path.read_text().split()) for path in paths)


# ------------------------------------------------------------------------------ arrows


def graph(root: Path) -> structure.Structure:
    """Read rooms and arrows, with each `__main__.py` in its own room."""
    order = structure.read(root).order

    def room(name: str, path: Path | None = None) -> str:
        if path is None or path.name != "__main__.py" or _is_head(path.read_text()):
            return structure.room_of(name, path)
        return name.split(".")[1]

    return structure.Structure(rooms=structure.read_rooms(root, room), order=order)


def _is_head(text: str) -> bool:
    return "mjax.commands" in text and code_lines(text) <= _HEAD


def file_circles(root: Path) -> list[list[str]]:
    """Return the groups of modules of mjax and scripts that import each other."""
    names = structure.module_names
    known = names(root) | names(root, "scripts")
    arrows = {
        name: {
            target
            for _, target in structure.imported(name, path, known)
            if target in known and target != name
        }
        for name, path in known.items()
    }
    return structure.Structure(rooms=arrows, order=[]).circles


def num_floors(found: structure.Structure) -> int:
    """Count the floors of the rooms, without the arrows that run up."""
    up = set(found.up)
    rooms = {
        room: {to for to in targets if (room, to) not in up}
        for room, targets in found.rooms.items()
    }
    return len(structure.Structure(rooms=rooms, order=found.order).floors)


# ----------------------------------------------------------------------------- figures


def tour(root: Path) -> list[Path]:
    """List the files of the reading tour of docs/design.md."""
    text = (root / "docs" / "design.md").read_text()
    section = text.partition("\n## Reading tour\n")[2].partition("\n## ")[0]
    names = re.findall(r"\]\(\.\./(mjax/[^)]+\.py)\)", section)
    return [root / name for name in dict.fromkeys(names)]


def imported_by_a_run(root: Path) -> dict[str, int]:
    """Train for two steps; return the lines of each module of mjax that it imported."""
    with tempfile.TemporaryDirectory() as folder:
        work_dir = Path(folder) / "run"
        words = ["train", "--recipe", "debug", "--steps", "2", "--optim.warmup-steps"]
        words += ["1", "--work-dir", str(work_dir)]
        subprocess.run(
            [sys.executable, "-c", _RUN, *words],
            cwd=root,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        files = json.loads(Path(f"{work_dir}.json").read_text())
    return {n: len(Path(file).read_text().splitlines()) for n, file in files.items()}


def figures(root: Path, *, with_run: bool = False) -> dict[str, int]:
    """Count everything that has a budget, by the names of the table."""
    parts, suffixes = lines_by_room(root), lines_by_suffix(root)
    side = sum(parts["mjax"].get(room, 0) for room in _SIDE)
    rooms, files = graph(root), tour(root)
    result = {
        "mjax without health and observe": sum(parts["mjax"].values()) - side,
        "mjax/health and mjax/observe": side,
        ".js and .css": suffixes.get(".js", 0) + suffixes.get(".css", 0),
        "scripts": sum(parts["scripts"].values()),
        "tests": sum(parts["tests"].values()),
        "words of docs": doc_words(root),
        "rooms of mjax": len(rooms.rooms),
        "arrows": len(rooms.arrows),
        "arrows up": len(rooms.up),
        "floors": num_floors(rooms),
        "circles of files": len(file_circles(root)),
        "files of the tour": len(files),
        "lines of the tour": sum(len(f.read_text().splitlines()) for f in files),
    }
    if with_run:
        lines = imported_by_a_run(root)
        result["modules of a training run"] = len(lines)
        result["of them above 500 lines"] = sum(n > _LARGE for n in lines.values())
    return result


def budget(root: Path) -> dict[str, tuple[int, int | None]]:
    """Read the table: name -> figure at its commit, most; None: no limit."""
    path = root / "docs" / "design.md"
    section = path.read_text().partition("\n## Size\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+?) \| ([\d,]+) \| ([\d,]+|-) \|$", section, re.M)

    def number(text: str) -> int:
        return int(text.replace(",", ""))

    return {
        name: (number(base), None if most == "-" else number(most))
        for name, base, most in rows
    }


def main(argv: list[str] | None = None) -> int:
    """Print the figures; 1 if --check finds one above its budget."""
    parser = argparse.ArgumentParser(prog="python -m scripts.size")
    parser.add_argument("--root", type=Path, default=structure.ROOT)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--run", action="store_true", help="count a run's modules too")
    parser.add_argument("--check", action="store_true", help="1 if above the budget")
    args = parser.parse_args(argv)
    if not (args.root / "mjax").is_dir():
        parser.error(f"--root {args.root} has no folder mjax; name a checkout of it")
    counts = figures(args.root, with_run=args.run)
    limits = budget(structure.ROOT)
    parts = lines_by_room(args.root)
    above = [
        name
        for name, count in counts.items()
        if (most := limits.get(name, (0, None))[1]) is not None and count > most
    ]
    if args.json:
        print(json.dumps({"figures": counts, "above": above, "rooms": parts}, indent=2))
    else:
        _print(counts, limits, parts, lines_by_suffix(args.root))
    if args.check:
        for name in above:
            print(f"{name}: {counts[name]:,}, at most {limits[name][1]:,}")
    return 1 if args.check and above else 0


def _print(
    counts: Mapping[str, int],
    limits: Mapping[str, tuple[int, int | None]],
    parts: Mapping[str, Mapping[str, int]],
    suffixes: Mapping[str, int],
) -> None:
    print(f"{'':34}{'f0052866':>10}{'at most':>10}{'now':>10}")
    for name, count in counts.items():
        base, most = limits.get(name, (None, None))
        cells = [
            "-" if value is None else f"{value:,}" for value in (base, most, count)
        ]
        print(f"{name:34}" + "".join(f"{cell:>10}" for cell in cells))
    for part, rooms in parts.items():
        print(f"\n{part}, lines of code: {sum(rooms.values()):,}")
        for room, lines in sorted(rooms.items(), key=lambda item: -item[1]):
            print(f"  {room:20}{lines:>8,}")
    print("\nother files of mjax, all lines: ", end="")
    print(
        ", ".join(f"{suffix} {lines:,}" for suffix, lines in sorted(suffixes.items()))
    )


if __name__ == "__main__":
    sys.exit(main())
