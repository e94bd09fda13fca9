"""Count the arithmetic of the matrix products in a compiled program.

Enters: the text of an optimised HLO module (`compiled.as_text()`). Leaves: the FLOPs
of its dots, where each loop body counts as often as it runs. XLA's own cost analysis
counts a loop body once.

    python -c 'import jax; ...; print(f.lower(x).compile().as_text())' > program.txt
    python -m scripts.hlo_dots program.txt
"""

import dataclasses
import math
import re
import sys
from pathlib import Path

from scripts.hlo_text import TRIP_COUNT, split_computations

_INSTRUCTION = re.compile(
    r"^  (?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+) "
    r"(?P<opcode>[a-z][\w\-]*)\((?P<rest>.*)$"
)
_ARRAY_SHAPE = re.compile(r"^[a-z]\w*\[(?P<dims>[\d,]*)\]")
_CALLS = re.compile(r"\b(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TWO_BRANCHES = re.compile(r"\b(?:true|false)_computation=%?([\w.\-]+)")
_CONTRACTED = re.compile(r"\blhs_contracting_dims=\{([\d,]*)\}")
# Library calls that hide a matrix product from this count.
_HIDDEN_DOT = re.compile(r"matmul|gemm|\bdot\b|conv|fmha", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class _Instruction:
    """One line of a computation."""

    name: str
    dims: tuple[int, ...] | None
    opcode: str
    rest: str
    """The operands and attributes, from behind the opening bracket."""


def count_dot_flops(hlo_text: str) -> int:
    """Count 2 FLOPs per multiply-add of every dot that one run executes.

    Of a conditional, the most expensive branch counts. Under SPMD the count is per
    device, as the module is.

    Args:
      hlo_text: an optimised module, as printed by `compiled.as_text()`.

    Returns:
      FLOPs of the entry computation.

    Raises:
      ValueError: the text is no module, or a matrix product is in a form that cannot
        be counted: a loop of unknown trip count, a library call, a convolution.
    """
    computations, entry = _parse(hlo_text)
    counted: dict[str, int] = {}

    def flops_of(name: str) -> int:
        if name not in counted:
            if name not in computations:
                raise ValueError(f"the module calls {name!r}, which it does not hold")
            shapes = {x.name: x.dims for x in computations[name]}
            counted[name] = sum(cost(x, shapes) for x in computations[name])
        return counted[name]

    def cost(x: _Instruction, shapes: dict[str, tuple[int, ...] | None]) -> int:
        if x.opcode == "dot":
            return _dot_flops(x, shapes)
        if x.opcode == "convolution" or (
            x.opcode == "custom-call" and _HIDDEN_DOT.search(_call_target(x))
        ):
            raise ValueError(f"cannot count the matrix product in {x.name}: {x.rest}")
        branches = _branches(x)
        if branches:
            return max(flops_of(name) for name in branches)
        inside = sum(flops_of(name) for name in _CALLS.findall(x.rest))
        if x.opcode != "while" or inside == 0:
            return inside
        trips = TRIP_COUNT.search(x.rest)
        if trips is None:
            raise ValueError(f"loop {x.name} holds dots, but its trip count is unknown")
        return inside * int(trips[1])

    return flops_of(entry)


def _parse(hlo_text: str) -> tuple[dict[str, list[_Instruction]], str]:
    """Return the instructions of each computation, and the name of the entry."""
    computations, entry = split_computations(hlo_text)
    return {k: [_instruction(x) for x in v] for k, v in computations.items()}, entry


def _instruction(line: str) -> _Instruction:
    match = _INSTRUCTION.match(line)
    if match is None:
        raise ValueError(f"cannot read this line of HLO: {line!r}")
    shape = _ARRAY_SHAPE.match(match["shape"])
    dims = None if shape is None else _ints(shape["dims"])
    return _Instruction(match["name"], dims, match["opcode"], match["rest"])


def _dot_flops(x: _Instruction, shapes: dict[str, tuple[int, ...] | None]) -> int:
    """Two FLOPs per output element and contracted index."""
    contracted = _CONTRACTED.search(x.rest)
    # Operands are names, with their shape in front in some versions.
    lhs = re.match(r"(?:[a-z]\w*\[\S* )?%?([\w.\-]+)[,)]", x.rest)
    lhs_dims = None if lhs is None else shapes.get(lhs[1])
    if x.dims is None or lhs_dims is None or contracted is None:
        raise ValueError(f"cannot read the shapes of dot {x.name}: {x.rest}")
    return 2 * math.prod(x.dims) * math.prod(lhs_dims[i] for i in _ints(contracted[1]))


def _branches(x: _Instruction) -> list[str]:
    """Names of the computations of which a conditional runs one."""
    if x.opcode != "conditional":
        return []
    listed = _BRANCHES.search(x.rest)
    if listed:
        return [name.strip().lstrip("%") for name in listed[1].split(",")]
    return _TWO_BRANCHES.findall(x.rest)


def _call_target(x: _Instruction) -> str:
    target = re.search(r'custom_call_target="([^"]*)"', x.rest)
    return target[1] if target else ""


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


if __name__ == "__main__":
    print(count_dot_flops(Path(sys.argv[1]).read_text()))
