"""Read the collectives of a compiled step: kind, mesh axes, bytes, loops around it."""

import dataclasses
import math
import re

BYTES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1}


@dataclasses.dataclass(frozen=True)
class Collective:
    kind: str
    axes: frozenset[str]
    shapes: tuple[str, ...]
    """Results, such as f32[4,16]."""
    loops: int
    """While loops around it."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the results."""
        total = 0
        for shape in self.shapes:
            dtype, dims = shape.rstrip("]").split("[")
            total += BYTES[dtype] * math.prod(int(d) for d in dims.split(",") if d)
        return total


KINDS = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"
OPERATION = re.compile(rf"= (.*?) ({KINDS})(-start)?\(")
GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")


def collectives(hlo: str) -> list[Collective]:
    """List the collectives over more than one device; raise on an unread group."""
    bodies: dict[str, str] = {}
    found: list[tuple[str, re.Match[str], str]] = []
    computation = ""
    for line in hlo.splitlines():
        if header := re.match(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            computation = header.group(1)
        if " while(" in line:
            for name in re.findall(r"(?:body|condition)=%?([\w.\-]+)", line):
                bodies[name] = computation
        if operation := OPERATION.search(line):
            found.append((computation, operation, line))
    assert found or "while" in hlo or "ENTRY" in hlo, "not an HLO module"
    return [
        c
        for name, op, line in found
        if (c := _collective(_depth(name, bodies), op, line)).axes
    ]


def _depth(computation: str, bodies: dict[str, str]) -> int:
    depth = 0
    while computation in bodies:
        computation, depth = bodies[computation], depth + 1
    return depth


def _collective(loops: int, operation: re.Match[str], line: str) -> Collective:
    groups = GROUPS.search(line)
    if groups is None and "replica_groups={{0}}" in line:
        groups = re.match("()()", "")
    if groups is None:
        raise ValueError(f"cannot read the replica groups of {line.strip()[:300]}")
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", groups.group(1)))
    axes = re.findall(r"'(\w+)'", groups.group(2))
    shapes = re.findall(r"(?:" + "|".join(BYTES) + r")\[[\d,]*\]", operation.group(1))
    return Collective(
        kind=operation.group(2),
        axes=frozenset(axis for axis in axes if int(sizes[axis]) > 1),
        shapes=tuple(shapes),
        loops=loops,
    )
