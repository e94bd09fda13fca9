"""Count the kernels of a program compiled for a GPU, and the bytes that they move.

Enters: the text of an optimised HLO module (`compiled.as_text()`). Leaves: each kernel
that one run launches, with the bytes of its operands and results: what must cross the
memory bus when no operand is in the cache. An operand of which a kernel reads a slice,
or an output that is written in place, counts with the slice alone.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

from scripts.hlo_text import TRIP_COUNT, split_computations

ITEM_BYTES: Mapping[str, int] = {
    **{"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2},
    **{"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "token": 0},
}

_INSTRUCTION = re.compile(
    r"^  (?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+) "
    r"(?P<opcode>[a-z][\w\-]*)\((?P<operands>.*?)\)(?P<attributes>(?:, .*)?)$"
)
# A tuple's shape may hold tuples; async starts do.
_NESTED = re.compile(r"= \((\(.*?\)), ")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_CALLS = re.compile(r"\bcalls=%?([\w.\-]+)")
_LOOP = re.compile(r"\bbody=%?([\w.\-]+)")

_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all")
_FREE = {
    *("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all"),
    *("partition-id", "replica-id", "iota-done", "opt-barrier"),
}
_VIEWS = {"bitcast", "reshape", "get-tuple-element", "copy", "convert", "transpose"}
_SLICES = {"dynamic-slice", "slice", "gather"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One launch, or as many as its loop has rounds."""

    name: str
    source: str
    """Where it comes from: the op_name of its root."""
    kind: str
    """gemm, call, collective, or elementwise (which reductions and copies are too)."""
    runs: int
    read_bytes: int
    """Of one launch."""
    written_bytes: int
    """Of one launch."""
    flops: int
    """Of the matrix products in one launch."""
    product_dtype: str | None
    """In which the factors meet: bf16, f32; None if there is no product."""

    @property
    def moved_bytes(self) -> int:
        """Bytes of all launches, in and out."""
        return self.runs * (self.read_bytes + self.written_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Instruction:
    name: str
    is_root: bool
    shape: str
    opcode: str
    operands: tuple[str, ...]
    """Names; of a parameter, its index."""
    attributes: str


def kernels(hlo_text: str) -> list[Kernel]:
    """List the kernels that one run of a module launches.

    Args:
      hlo_text: an optimised module, as printed by `compiled.as_text()`.
    Raises:
      ValueError: the text is no module, or it holds a loop of unknown trip count or a
        conditional, whose launches cannot be counted.
    """
    computations, entry = _parse(hlo_text)
    found: list[Kernel] = []

    def visit(name: str, runs: int) -> None:
        shapes = {x.name: x.shape for x in computations[name]}
        for x in computations[name]:
            if x.opcode == "while":
                trips, body = (
                    TRIP_COUNT.search(x.attributes),
                    _LOOP.search(x.attributes),
                )
                if trips is None or body is None:
                    raise ValueError(f"the trip count of loop {x.name} is unknown")
                visit(body[1], runs * int(trips[1]))
            elif x.opcode == "conditional":
                raise ValueError(f"cannot count the branches of {x.name}")
            elif x.opcode not in _FREE and not x.opcode.endswith("-done"):
                found.append(_kernel(x, shapes, computations, runs))

    visit(entry, 1)
    return found


def _parse(hlo_text: str) -> tuple[dict[str, list[_Instruction]], str]:
    """Return the instructions of each computation, and the name of the entry."""
    computations, entry = split_computations(hlo_text)
    return {k: [_instruction(x) for x in v] for k, v in computations.items()}, entry


def _instruction(line: str) -> _Instruction:
    # ((operands), result, context): the operands are listed again behind the opcode.
    line = _NESTED.sub("= (", line)
    match = _INSTRUCTION.match(line)
    if match is None:
        raise ValueError(f"cannot read this line of HLO: {line!r}")
    index = match["opcode"] == "parameter"
    operands = re.findall(r"\d+" if index else r"%([\w.\-]+)", match["operands"])
    return _Instruction(
        name=match["name"],
        is_root=match["root"] is not None,
        shape=match["shape"],
        opcode=match["opcode"],
        operands=tuple(operands),
        attributes=match["attributes"],
    )


def _kernel(
    x: _Instruction,
    shapes: dict[str, str],
    computations: Mapping[str, list[_Instruction]],
    runs: int,
) -> Kernel:
    called = _CALLS.search(x.attributes)
    inside = computations[called[1]] if called else []
    full = [_num_bytes(shapes[name]) for name in x.operands]
    read, written = sum(full), _num_bytes(x.shape)
    if x.opcode.startswith("fusion"):
        read = _fusion_reads(inside, full)
        written = _fusion_writes(inside)
    source = re.search(r'op_name="([^"]*)"', x.attributes)
    opcode = x.opcode.removesuffix("-start")
    products = [y for y in (x, *inside) if y.opcode == "dot"]
    if opcode in _COLLECTIVES:
        kind = "collective"
    elif products:
        kind = "gemm"
    else:
        kind = "call" if opcode == "custom-call" else "elementwise"
    factors = shapes | {y.name: y.shape for y in inside}
    return Kernel(
        name=x.name,
        source=source[1] if source else "",
        kind=kind,
        runs=runs,
        read_bytes=read,
        written_bytes=written,
        flops=sum(_dot_flops(y, factors) for y in products),
        product_dtype=factors[products[0].operands[0]].split("[")[0]
        if products
        else None,
    )


def _dot_flops(x: _Instruction, shapes: Mapping[str, str]) -> int:
    """Two FLOPs per output element and contracted index."""
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", x.attributes)
    if contracted is None:
        raise ValueError(f"cannot read the contracted dims of {x.name}")
    lhs = _dims(shapes[x.operands[0]])
    return 2 * math.prod(_dims(x.shape)) * math.prod(lhs[i] for i in _ints(contracted))


def _dims(shape: str) -> list[int]:
    match = _ARRAY.match(shape)
    if match is None:
        raise ValueError(f"{shape!r} is not the shape of one array")
    return [int(n) for n in match[2].split(",") if n]


def _ints(match: re.Match[str]) -> list[int]:
    return [int(n) for n in match[1].split(",") if n]


def _fusion_reads(inside: list[_Instruction], full: list[int]) -> int:
    """Bytes read of each operand: all, or the slices of it that are looked at."""
    users: dict[str, list[_Instruction]] = {}
    for x in inside:
        for name in x.operands:
            users.setdefault(name, []).append(x)

    def looked_at(name: str) -> int | None:
        """Entries of a value that its users look at; None is all of them."""
        total = 0
        for user in users.get(name, []):
            if user.opcode in _SLICES and user.operands[0] == name:
                total += math.prod(_dims(user.shape))
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
                continue
            elif user.opcode in _VIEWS and not user.is_root:
                inner = looked_at(user.name)
                if inner is None:
                    return None
                total += inner
            else:
                return None
        return total

    def read(x: _Instruction, whole: int) -> int:
        entries = looked_at(x.name)
        if entries is None:
            return whole
        return min(whole, entries * ITEM_BYTES[x.shape.split("[")[0]])

    parameters = [x for x in inside if x.opcode == "parameter"]
    return sum(read(x, full[int(x.operands[0])]) for x in parameters)


def _fusion_writes(inside: list[_Instruction]) -> int:
    by_name = {x.name: x for x in inside}

    def written(x: _Instruction) -> int:
        if x.opcode == "tuple":
            return sum(written(by_name[name]) for name in x.operands)
        if x.opcode in _VIEWS and x.operands[0] in by_name:
            source = by_name[x.operands[0]]
            if source.opcode == "dynamic-update-slice":
                return written(source)
        if x.opcode == "dynamic-update-slice":
            return _num_bytes(by_name[x.operands[1]].shape)
        return _num_bytes(x.shape)

    return sum(written(x) for x in inside if x.is_root)


def _num_bytes(shape: str) -> int:
    return sum(
        ITEM_BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n)
        for dtype, dims in _ARRAY.findall(shape)
    )
