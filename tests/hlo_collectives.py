"""Read the collectives of a compiled program: kind, mesh axes, arrays, loops around it.

Enters: the text of an optimised module, for CPU or GPU. On a GPU most collectives are
started and awaited apart; one is listed once, where it starts.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

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
    pairs: tuple[tuple[int, int], ...] = ()
    """Of a collective-permute, the devices that send and receive."""
    outer_loop: str = ""
    """Body of the outermost loop around it; empty without a loop."""

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
PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
BRANCHES = re.compile(
    r"(?:true_computation|false_computation)=%?([\w.\-]+)"
    r"|branch_computations=\{([^}]*)\}"
)
GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
ARRAY = re.compile(r"(?:" + "|".join(BYTES) + r")\[[\d,]*\]")


def collectives(hlo: str, mesh: Mapping[str, int] | None = None) -> list[Collective]:
    """List the collectives over more than one device; raise on an unread group.

    Args:
      hlo: the module.
      mesh: sizes of all axes, the outermost first: a permute names devices only.
    """
    callers: dict[str, tuple[str, bool]] = {}
    arrays: dict[str, tuple[str, ...]] = {}
    found: list[tuple[str, re.Match[str], str]] = []
    computation = ""
    for line in hlo.splitlines():
        if header := re.match(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            computation = header.group(1)
        if " while(" in line:
            for name in re.findall(r"(?:body|condition)=%?([\w.\-]+)", line):
                callers[name] = computation, True
        if " conditional(" in line:
            for one, several in BRANCHES.findall(line):
                for name in re.findall(r"[\w.\-]+", one or several):
                    callers[name] = computation, False
        if instruction := INSTRUCTION.match(line):
            arrays[instruction[1]] = tuple(ARRAY.findall(instruction[2]))
        if operation := OPERATION.search(line):
            found.append((computation, operation, line))
    assert found or "while" in hlo or "ENTRY" in hlo, "not an HLO module"
    return [
        c
        for name, op, line in found
        if (c := _collective(_loops(name, callers), op, line, arrays, mesh)).axes
    ]


def _loops(computation: str, callers: dict[str, tuple[str, bool]]) -> list[str]:
    """Return the bodies of the loops around a computation, the innermost first."""
    loops = []
    while computation in callers:
        caller, is_loop = callers[computation]
        if is_loop:
            loops.append(computation)
        computation = caller
    return loops


def _collective(
    loops: list[str],
    operation: re.Match[str],
    line: str,
    arrays: dict[str, tuple[str, ...]],
    mesh: Mapping[str, int] | None,
) -> Collective:
    names = re.findall(r"%([\w.\-]+)", operation[4])
    operands = tuple(shape for name in names for shape in arrays[name])
    shapes = tuple(ARRAY.findall(operation[1]))
    if operation[3]:  # The type of a start is ((operands), results).
        assert shapes[: len(operands)] == operands, line.strip()[:300]
        shapes = shapes[len(operands) :]
    pairs = _pairs(line) if operation[2] == "collective-permute" else ()
    return Collective(
        kind=operation[2],
        axes=_axes_of_pairs(pairs, mesh, line) if pairs else _axes_of_groups(line),
        shapes=shapes,
        loops=len(loops),
        operands=operands,
        pairs=pairs,
        outer_loop=loops[-1] if loops else "",
    )


def _axes_of_groups(line: str) -> frozenset[str]:
    groups = GROUPS.search(line)
    if groups is None and "replica_groups={{0}}" in line:
        return frozenset()
    if groups is None:
        raise ValueError(f"cannot read the replica groups of {line.strip()[:300]}")
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", groups.group(1)))
    axes = re.findall(r"'(\w+)'", groups.group(2))
    return frozenset(axis for axis in axes if int(sizes[axis]) > 1)


def _pairs(line: str) -> tuple[tuple[int, int], ...]:
    pairs = PAIRS.search(line)
    if pairs is None or not pairs.group(1):
        raise ValueError(f"cannot read who sends in {line.strip()[:300]}")
    found = re.findall(r"\{(\d+),(\d+)\}", pairs.group(1))
    return tuple((int(source), int(target)) for source, target in found)


def _axes_of_pairs(
    pairs: tuple[tuple[int, int], ...], mesh: Mapping[str, int] | None, line: str
) -> frozenset[str]:
    """Return the axes along which a source and its target differ."""
    if mesh is None:
        raise ValueError(f"needs the sizes of the mesh to read {line.strip()[:300]}")
    places = np.array(np.unravel_index(np.array(pairs), tuple(mesh.values())))
    differ = (places[..., 0] != places[..., 1]).any(axis=1)
    return frozenset(axis for axis, far in zip(mesh, differ, strict=True) if far)
