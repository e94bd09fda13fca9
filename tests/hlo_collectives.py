"""Read the collectives of a compiled program: kind, mesh axes, arrays, loops around it.

Enters: the text of an optimised module, for CPU or GPU. On a GPU most collectives are
started and awaited apart; one is listed once, where it starts.
"""

import dataclasses
import math
import re

BYTES = {"f32": 4, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "pred": 1}


@dataclasses.dataclass(frozen=True)
class Collective:
    kind: str
    axes: frozenset[str]
    shapes: tuple[str, ...]
    """Results, such as f32[4,16]."""
    loops: int
    """While loops around it."""
    operands: tuple[str, ...] = ()
    """What each device brings, as shapes."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the results."""
        total = 0
        for shape in self.shapes:
            dtype, dims = shape.rstrip("]").split("[")
            total += BYTES[dtype] * math.prod(int(d) for d in dims.split(",") if d)
        return total


KINDS = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"
INSTRUCTION = re.compile(r"^ +(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) [a-z][\w\-]*\(")
OPERATION = re.compile(rf"= (.*?) ({KINDS})(-start)?\(([^)]*)\)")
GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
ARRAY = re.compile(r"(?:" + "|".join(BYTES) + r")\[[\d,]*\]")


def collectives(hlo: str) -> list[Collective]:
    """List the collectives over more than one device; raise on an unread group."""
    bodies: dict[str, str] = {}
    arrays: dict[str, tuple[str, ...]] = {}
    found: list[tuple[str, re.Match[str], str]] = []
    computation = ""
    for line in hlo.splitlines():
        if header := re.match(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            computation = header.group(1)
        if " while(" in line:
            for name in re.findall(r"(?:body|condition)=%?([\w.\-]+)", line):
                bodies[name] = computation
        if instruction := INSTRUCTION.match(line):
            arrays[instruction[1]] = tuple(ARRAY.findall(instruction[2]))
        if operation := OPERATION.search(line):
            found.append((computation, operation, line))
    assert found or "while" in hlo or "ENTRY" in hlo, "not an HLO module"
    return [
        c
        for name, op, line in found
        if (c := _collective(_depth(name, bodies), op, line, arrays)).axes
    ]


def _depth(computation: str, bodies: dict[str, str]) -> int:
    depth = 0
    while computation in bodies:
        computation, depth = bodies[computation], depth + 1
    return depth


def _collective(
    loops: int,
    operation: re.Match[str],
    line: str,
    arrays: dict[str, tuple[str, ...]],
) -> Collective:
    groups = GROUPS.search(line)
    if groups is None and "replica_groups={{0}}" in line:
        groups = re.match("()()", "")
    if groups is None:
        raise ValueError(f"cannot read the replica groups of {line.strip()[:300]}")
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", groups.group(1)))
    axes = re.findall(r"'(\w+)'", groups.group(2))
    names = re.findall(r"%([\w.\-]+)", operation[4])
    operands = tuple(shape for name in names for shape in arrays[name])
    shapes = tuple(ARRAY.findall(operation[1]))
    if operation[3]:  # The type of a start is ((operands), results).
        assert shapes[: len(operands)] == operands, line.strip()[:300]
        shapes = shapes[len(operands) :]
    return Collective(
        kind=operation[2],
        axes=frozenset(axis for axis in axes if int(sizes[axis]) > 1),
        shapes=shapes,
        loops=loops,
        operands=operands,
    )
