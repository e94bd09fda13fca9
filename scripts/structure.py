"""Count the rooms of mjax, the arrows between them, and the arrows that run up.

`python -m scripts.structure [--json] [--svg FILE] [--root FOLDER]`

A room is a top-level name of mjax/: a package, or a module beside them. An arrow from a
room to another stands for all imports between the two: lazy ones and those for type
checkers too. A `__main__.py` belongs to the program, `train`. The order of the rooms is
that of the rows of the import table in docs/design.md; an arrow to an earlier row runs
up. The floor of a room is the length of the longest chain of arrows below it.
"""

import argparse
import ast
import dataclasses
import functools
import html
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROGRAM = "train"
Rooms = dict[str, set[str]]
"""Rooms imported by each room."""


# ------------------------------------------------------------------------- the imports


def module_names(root: Path, package: str = "mjax") -> dict[str, Path]:
    """Map the dotted name of every module of a package under root to its file."""
    names = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imported(
    name: str, path: Path, known: Mapping[str, Path]
) -> Iterator[tuple[int, str]]:
    """Yield (line, module) for each module of ours that a file imports, lazily too."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for line, level, base, names in _imports(path.read_text()):
        if level:
            parents = package.split(".")[: 1 - level or None]
            base = ".".join([*parents, *([base] if base else [])])
        # `from package import x`: a module if there is one of that name.
        full = [f"{base}.{alias}" for alias in names]
        for target in [target if target in known else base for target in full] or [
            base
        ]:
            if target.partition(".")[0] in ("mjax", "scripts"):
                yield line, target


@functools.cache
def _imports(text: str) -> list[tuple[int, int, str, list[str]]]:
    """Return line, level, module and names of each import in a file."""
    imports = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imports += [(node.lineno, 0, alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            imports.append((node.lineno, node.level, node.module or "", names))
        elif (
            isinstance(node, ast.Call)
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and ast.unparse(node.func).endswith(("import_module", "__import__"))
        ):
            imports.append((node.lineno, 0, str(node.args[0].value), []))
    return imports


def table_rows(text: str) -> list[tuple[list[str], str]]:
    """Read the import table of docs/design.md: the modules of a row, and its cell."""
    section = text.partition("## Who may import whom")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*)\|([^|]*)\|", section, flags=re.MULTILINE)
    return [(re.findall(r"`([^`]+)`", modules), cell.strip()) for modules, cell in rows]


def room_of(name: str, path: Path | None = None) -> str:
    """Return the room of a module; the bare package has none."""
    if path is not None and path.name == "__main__.py":
        return PROGRAM
    return name.split(".")[1] if "." in name else ""


def read_rooms(root: Path, room_of_file: Callable[[str, Path], str] = room_of) -> Rooms:
    """Read the rooms of the tree under root; `room_of_file` assigns modules to them."""
    known = module_names(root)
    rooms: Rooms = {}
    for name, path in known.items():
        room = room_of_file(name, path)
        if room:
            targets = {room_of(target) for _, target in imported(name, path, known)}
            rooms.setdefault(room, set()).update(targets - {room, ""})
    return rooms


# ---------------------------------------------------------------------------- figures


@dataclasses.dataclass(frozen=True, kw_only=True)
class Structure:
    """The rooms of a tree, and the faults of their arrows."""

    rooms: Rooms
    order: list[str]
    """Rooms from the top down."""

    @property
    def arrows(self) -> list[tuple[str, str]]:
        """All arrows, sorted."""
        return sorted((room, to) for room in self.rooms for to in self.rooms[room])

    @property
    def unordered(self) -> list[str]:
        """Rooms without a place in the order."""
        return sorted(self.rooms.keys() - set(self.order))

    @property
    def up(self) -> list[tuple[str, str]]:
        """Arrows to an earlier row."""
        place = {room: index for index, room in enumerate(self.order)}
        return [
            (room, to)
            for room, to in self.arrows
            if room in place and to in place and place[to] < place[room]
        ]

    @functools.cached_property
    def below(self) -> Rooms:
        """All rooms that are reachable from each room."""
        below = {room: set(to) for room, to in self.rooms.items()}
        for middle in below:
            for room in below:
                if middle in below[room]:
                    below[room] |= below[middle]
        return below

    @property
    def circles(self) -> list[list[str]]:
        """Rooms that reach each other, each group once."""
        groups = {
            tuple(sorted(to for to in self.below[room] if room in self.below[to]))
            for room in self.rooms
            if room in self.below[room]
        }
        return [list(group) for group in sorted(groups)]

    @functools.cached_property
    def longest_chain(self) -> list[str]:
        """Rooms of a longest chain of arrows; empty if there are circles."""
        if self.circles:
            return []
        return max(self._chains.values(), key=len, default=[])

    @property
    def floors(self) -> list[list[str]]:
        """Rooms by floor, the top one first, each from the top of the order down."""
        if self.circles:
            raise ValueError(f"no floors: {self.circles} import each other in a circle")
        height = {room: len(chain) for room, chain in self._chains.items()}
        place = {room: index for index, room in enumerate(self.order)}
        by_place = sorted(self.rooms, key=lambda room: place.get(room, -1))
        return [
            [room for room in by_place if height[room] == floor]
            for floor in range(max(height.values(), default=0), 0, -1)
        ]

    @functools.cached_property
    def _chains(self) -> dict[str, list[str]]:
        """A longest chain that begins at each room; needs a graph without circles."""

        @functools.cache
        def chain(room: str) -> list[str]:
            longest = max(map(chain, sorted(self.rooms[room])), key=len, default=[])
            return [room, *longest]

        return {room: chain(room) for room in self.rooms}

    @property
    def direct(self) -> list[tuple[str, str]]:
        """Arrows that no chain of others implies, for a drawing."""
        return [
            (room, to)
            for room, to in self.arrows
            if not any(to in self.below[other] for other in self.rooms[room] - {to})
        ]


def read(root: Path) -> Structure:
    """Read the structure of the tree under root, in the order of its import table."""
    rows = table_rows((root / "docs" / "design.md").read_text())
    order = [module for modules, _ in rows for module in modules]
    return Structure(rooms=read_rooms(root), order=order)


def as_text(found: Structure) -> str:
    """Write the figures for people."""
    lines = [
        f"rooms          {len(found.rooms)}",
        f"arrows         {len(found.arrows)}",
        f"up             {len(found.up)}",
        *(f"  {room} -> {to}" for room, to in found.up),
        f"circles        {len(found.circles)}",
        *(f"  {', '.join(circle)}" for circle in found.circles),
        f"longest chain  {len(found.longest_chain)}",
        f"  {' -> '.join(found.longest_chain)}",
        "without a row  " + (", ".join(found.unordered) or "none"),
        "",
    ]
    for room in [*found.unordered, *found.order]:
        if room in found.rooms:
            lines.append(f"{room}: {', '.join(sorted(found.rooms[room])) or 'nothing'}")
    return "\n".join(lines)


def as_json(found: Structure) -> str:
    """Write the figures as one JSON object."""
    return json.dumps(
        {
            "num_rooms": len(found.rooms),
            "num_arrows": len(found.arrows),
            "up": found.up,
            "circles": found.circles,
            "longest_chain": found.longest_chain,
            "without_row": found.unordered,
            "rooms": {room: sorted(to) for room, to in found.rooms.items()},
        },
        indent=2,
    )


# ----------------------------------------------------------------------------- drawing

_BOX_WIDTH, _BOX_HEIGHT, _FLOOR_HEIGHT, _GAP, _SWEEPS = 104, 28, 66, 18, 24
Node = tuple[str, ...]
"""A room, or the place (room, to, floor) where an arrow passes a floor."""


def _layers(found: Structure) -> tuple[list[list[Node]], list[list[Node]]]:
    """Return the nodes of each floor, and the path of each direct arrow."""
    floors = found.floors
    floor_of = {room: n for n, floor in enumerate(floors) for room in floor}
    layers: list[list[Node]] = [[(room,) for room in floor] for floor in floors]
    ways = []
    for room, to in found.direct:
        passed = range(floor_of[room] + 1, floor_of[to])
        way = [(room,), *((room, to, str(floor)) for floor in passed), (to,)]
        for node in way[1:-1]:
            layers[int(node[2])].append(node)
        ways.append(way)
    return layers, ways


def _places(layers: list[list[Node]], ways: list[list[Node]]) -> dict[Node, float]:
    """Order each floor by the mean place of its neighbours, so that few arrows cross.

    Source: Sugiyama, Tagawa and Toda 1981, the barycentre method.
    """
    joined: dict[Node, list[Node]] = {node: [] for floor in layers for node in floor}
    for way in ways:
        for upper, lower in itertools.pairwise(way):
            joined[upper].append(lower)
            joined[lower].append(upper)
    floor_of = {node: n for n, floor in enumerate(layers) for node in floor}
    x = {node: float(n) for floor in layers for n, node in enumerate(floor)}

    def spread(floor: list[Node]) -> None:
        widths = [_BOX_WIDTH if len(node) == 1 else 0 for node in floor]
        start = -(sum(widths) + _GAP * (len(floor) - 1)) / 2
        for node, width in zip(floor, widths, strict=True):
            x[node] = start + width / 2
            start += width + _GAP

    for sweep in range(_SWEEPS):
        step = -1 if sweep % 2 else 1
        for floor in layers[::step]:
            means = {}
            for node in floor:
                near = [
                    o
                    for o in joined[node]
                    if step * floor_of[o] < step * floor_of[node]
                ]
                means[node] = sum(x[o] for o in near) / len(near) if near else x[node]
            floor.sort(key=lambda node, means=means: means[node])
            spread(floor)
    return x


def as_svg(found: Structure) -> str:
    """Draw the rooms by floor with the direct arrows, none of them behind a room."""
    layers, ways = _layers(found)
    x = _places(layers, ways)
    y = {
        node: 20 + _FLOOR_HEIGHT * n for n, floor in enumerate(layers) for node in floor
    }
    reach = max(abs(place) for place in x.values()) + _BOX_WIDTH / 2 + 10
    height = 20 + _FLOOR_HEIGHT * len(layers)
    box = f"{-reach:.0f} 0 {2 * reach:.0f} {height}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" '
        'font-family="sans-serif" font-size="13">',
        "<title>Rooms of mjax by floor: each imports only from floors below</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#667"/>'
        "</marker></defs>",
        f'<rect x="{-reach:.0f}" width="{2 * reach:.0f}" height="{height}" '
        'fill="#fff"/>',
    ]
    for way in ways:
        points = [f"{x[way[0]]:.0f},{y[way[0]] + _BOX_HEIGHT}"]
        for node in way[1:-1]:
            points += [f"{x[node]:.0f},{y[node] + d}" for d in (0, _BOX_HEIGHT)]
        points.append(f"{x[way[-1]]:.0f},{y[way[-1]]}")
        lines.append(
            f'<polyline points="{" ".join(points)}" fill="none" stroke="#667" '
            'marker-end="url(#tip)"/>'
        )
    for room in found.rooms:
        left, top = x[room,] - _BOX_WIDTH / 2, y[room,]
        lines += [
            f'<rect x="{left:.0f}" y="{top}" width="{_BOX_WIDTH}" '
            f'height="{_BOX_HEIGHT}" rx="5" fill="#eef2f8" stroke="#456"/>',
            f'<text x="{x[room,]:.0f}" y="{top + 18}" text-anchor="middle">'
            f"{html.escape(room)}</text>",
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Run the command; 1 if an arrow runs up or in a circle, or a room has no row."""
    parser = argparse.ArgumentParser(prog="python -m scripts.structure")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a drawing")
    parser.add_argument("--root", type=Path, default=ROOT, help="of another tree")
    args = parser.parse_args(argv)
    if not (args.root / "mjax").is_dir():
        parser.error(f"--root {args.root} has no folder mjax; name a checkout of it")
    found = read(args.root)
    print(as_json(found) if args.json else as_text(found))
    if args.svg is not None:
        args.svg.write_text(as_svg(found))
    return 1 if found.up or found.circles or found.unordered else 0


if __name__ == "__main__":
    sys.exit(main())
