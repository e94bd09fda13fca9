"""Parse the text of a scheduled HLO module.

Input: the text of `compiled.as_text()` (jax 0.11.2; XLA for GPUs or CPUs). Output: its
computations, with their instructions in the order of the text, which is the order of
execution in a scheduled module. The parser guesses nothing: a line that it does not
understand raises a `ValueError` that quotes it.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mjax.trace import scopes

BITS: Mapping[str, int] = {
    **{"pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8},
    **{"s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64},
    **{"f4e2m1fn": 4, "f8e3m4": 8, "f8e4m3": 8, "f8e4m3fn": 8, "f8e4m3b11fnuz": 8},
    **{"f8e4m3fnuz": 8, "f8e5m2": 8, "f8e5m2fnuz": 8, "f8e8m0fnu": 8},
    **{"bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128},
    **{"token": 0},
}
"""Bits per entry, by name of the dtype."""

_HEADER = re.compile(r"(?P<entry>ENTRY )?%(?P<name>[\w.\-]+) \(.*\) -> .* \{$")
# Tables of source lines precede the first computation, separated by blank lines.
_TABLE = re.compile(r"(?:|\d+ .*|FileNames|FunctionNames|FileLocations|StackFrames)$")
_END = re.compile(r"\}(?:, execution_thread=\"[\w.\-]+\")?$")
_INSTRUCTION = re.compile(r"  (?P<root>ROOT )?%(?P<name>[\w.\-]+) = ")
_OPCODE = re.compile(r" (?P<opcode>[a-z][\w\-]*)\(")
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,]*)\](?P<layout>\{[^{}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
# Names, preceded by their shapes in some versions of jax.
_OPERANDS = re.compile(r"(?:(?:^|, )(?:[^%]+ )?%[\w.\-]+)*$")
_KEY = re.compile(r"([a-z_][\w\-]*)=")
_INDEX = re.compile(r"/\*index=\d+\*/")
# A string, or a list of numbers (pairs of 12,288 devices), is one token.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\{\{[\d,{}]*\}\}|[(){}\[\],]')
_CALLS = ("calls", "to_apply", "body", "condition", "called_computations")
_BRANCHES = ("true_computation", "false_computation", "branch_computations")
_CALLING = {*_CALLS, *_BRANCHES}
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_LITERALS = ("parameter", "constant", "iota", "partition-id", "replica-id")


@dataclasses.dataclass(frozen=True)
class Array:
    """Dtype and dims of one array; a token has no bytes."""

    dtype: str
    dims: tuple[int, ...]
    is_on_host: bool = False
    """Whether the array is in pinned host memory, which is memory space 5 in XLA."""

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Number of bytes; entries smaller than a byte are packed."""
        return -(-self.size * BITS[self.dtype] // 8)


type Shape = Array | tuple[Any, ...]
"""An array, or a tuple of arrays and tuples."""


def arrays(shape: Shape) -> tuple[Array, ...]:
    """List the arrays of a shape, from left to right."""
    if isinstance(shape, Array):
        return (shape,)
    return tuple(array for part in shape for array in arrays(part))


def num_bytes(shape: Shape) -> int:
    """Add up the bytes of the arrays of a shape."""
    return sum(array.num_bytes for array in arrays(shape))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...]
    """Names of earlier instructions of the same computation."""
    literal: str
    """Text in the brackets of an opcode without operands: a value or an index."""
    attributes: Mapping[str, str]
    """Attributes as written: kind, calls, replica_groups, backend_config, ..."""
    is_root: bool

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that the instruction calls, except the branches of
        a conditional."""
        return self._names(_CALLS)

    @property
    def branches(self) -> tuple[str, ...]:
        """Names of the branches of a conditional."""
        return self._names(_BRANCHES)

    def _names(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        values = [self.attributes[key] for key in keys if key in self.attributes]
        return tuple(name for value in values for name in _NAME.findall(value))

    @property
    def body(self) -> str:
        """Name of the computation that a loop repeats."""
        return self.attributes["body"].lstrip("%")

    @property
    def trip_count(self) -> int | None:
        """Trip count of a loop, if XLA knows it."""
        found = _TRIPS.search(self.attributes.get("backend_config", ""))
        return int(found[1]) if found else None

    @property
    def target(self) -> str:
        """Target of a custom call, such as __cublas$lt$matmul; empty for others."""
        return self.attributes.get("custom_call_target", "").strip('"')

    @property
    def op_name(self) -> str:
        """Place of the instruction in the traced function; empty if XLA gives none."""
        found = _OP_NAME.search(self.attributes.get("metadata", ""))
        return found[1] if found else ""

    @property
    def result(self) -> Shape:
        """Shape of the result. For a `-start` half it is a part of `shape`:
        ((operands), result, context), or (result, operand, context) of a copy-start."""
        if self.opcode.endswith("-start") and isinstance(self.shape, tuple):
            return self.shape[0 if self.opcode == "copy-start" else 1]
        return self.shape

    @property
    def array(self) -> Array:
        """Shape of the result, which must be one array.

        Raises:
          ValueError: the result is a tuple.
        """
        if not isinstance(self.shape, Array):
            raise ValueError(f"{self.name} ({self.opcode}) must give one array")
        return self.shape


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Computation:
    """Instructions in the order in which they are executed."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """Map from names to instructions."""
        return {x.name: x for x in self.instructions}

    @functools.cached_property
    def places(self) -> Mapping[str, int]:
        """Map from names of instructions to their positions."""
        return {x.name: place for place, x in enumerate(self.instructions)}

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose result is the result of the computation."""
        return next(x for x in self.instructions if x.is_root)

    @functools.cached_property
    def done_of(self) -> Mapping[str, str]:
        """Map from the name of each `-start` half to the name of its `-done` half."""
        awaited: dict[str, str] = {}
        for x in self.instructions:
            if x.opcode.endswith("-update"):
                # An async-update is between the two halves: map it to the `-done` half.
                awaited[x.name] = awaited.get(x.operands[0], x.operands[0])
        ends = {}
        for x in self.instructions:
            if x.opcode.endswith("-done"):
                ends[awaited.get(x.operands[0], x.operands[0])] = x.name
        return ends

    def operands(self, x: Instruction) -> tuple[Instruction, ...]:
        """Return the operands of an instruction of this computation."""
        return tuple(self.by_name[name] for name in x.operands)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
    """A scheduled module."""

    name: str
    entry: str
    num_partitions: int
    """Number of devices that run the module together."""
    computations: Mapping[str, Computation]


def parse(text: str) -> Module:
    """Parse a module.

    Args:
      text: text of an optimised module, from compiled.as_text().
    Returns:
      The module. Every operand is defined earlier in its computation, every called
      computation exists, and every `-start` half has one `-done` half.
    Raises:
      ValueError: the module is not scheduled, or a line is not understood.
    """
    head, *lines = text.splitlines() or [""]
    name = re.match(r"HloModule ([\w.\-]+)", head)
    if name is None:
        raise ValueError(
            "this is not an HLO module; pass compiled.as_text(). It begins with: "
            f"{head[:80]!r}"
        )
    if "is_scheduled=true" not in head:
        raise ValueError(
            f"module {name[1]} is not scheduled, so the order of its text means "
            "nothing. Pass the text of the compiled step, not of the lowered one"
        )
    if replicas := re.search(r"replica_count=(?!1\b)\d+", head):
        raise ValueError(
            f"module {name[1]} has {replicas[0]}: only programs of partitions, as "
            "jax.jit makes them, are understood"
        )
    partitions = re.search(r"num_partitions=(\d+)", head)
    computations: dict[str, Computation] = {}
    entry = None
    for is_entry, computation in _computations(lines):
        if computation.name in computations:
            raise ValueError(f"two computations are called {computation.name}")
        computations[computation.name] = computation
        entry = computation.name if is_entry else entry
    if entry is None:
        raise ValueError(f"module {name[1]} has no ENTRY computation")
    for computation in computations.values():
        _check(computation, computations)
    return Module(
        name=name[1],
        entry=entry,
        num_partitions=int(partitions[1]) if partitions else 1,
        computations=computations,
    )


def short_name(op_name: str) -> str:
    """Return an op_name without the components that are common in a step.

    The innermost phase is kept; layer, tick and microbatch are removed.
    """
    common = (
        "jit(train_step)",
        "shard_map",
        "eval_jaxpr",
        "while",
        "body",
        "closed_call",
    )
    parts = [part for part in op_name.split("/") if part not in common]
    parts = [part for part in parts if not scopes.is_position(part)]
    phases = [at for at, part in enumerate(parts) if scopes.is_phase(part)]
    return "/".join(part for at, part in enumerate(parts) if at not in phases[:-1])


def _computations(lines: list[str]) -> Iterator[tuple[bool, Computation]]:
    """Yield pairs of (whether it is the entry, computation)."""
    header, inside = None, []
    for line in lines:
        line = _INDEX.sub("", line)
        if header is None:
            header = _HEADER.match(line)
            if header is None and not _TABLE.match(line):
                raise _unread("is not the header of a computation", line)
        elif _END.match(line):
            computation = Computation(name=header["name"], instructions=tuple(inside))
            yield header["entry"] is not None, computation
            header, inside = None, []
        else:
            inside.append(_instruction(line))
    if header is not None:
        raise ValueError(f"computation {header['name']} does not end")


def _instruction(line: str) -> Instruction:
    start = _INSTRUCTION.match(line)
    if start is None:
        raise _unread("is not an instruction", line)
    shape_end = _close(line, start.end()) if line[start.end()] == "(" else start.end()
    opcode = _OPCODE.search(line, shape_end)
    if opcode is None:
        raise _unread("has no opcode", line)
    end = _close(line, opcode.end() - 1)
    inside = line[opcode.end() : end - 1]
    name = opcode["opcode"]
    operands, literal = (), ""
    if name in _LITERALS:
        literal = inside
    elif _OPERANDS.match(inside):
        operands = tuple(_NAME.findall(inside))
    else:
        raise _unread(f"has an operand that is not understood: {inside!r}", line)
    try:
        shape = _shape(line[start.end() : opcode.start()])
    except ValueError as error:
        raise _unread(f"has a shape that is not understood: {error}", line) from error
    return Instruction(
        name=start["name"],
        opcode=name,
        shape=shape,
        operands=operands,
        literal=literal,
        attributes=_attributes(line, end),
        is_root=start["root"] is not None,
    )


def _close(line: str, start: int) -> int:
    """Return the position after the bracket that closes the bracket at start."""
    depth = 0
    for token in _TOKEN.finditer(line, start):
        depth += token[0] in ("(", "{", "[")
        depth -= token[0] in (")", "}", "]")
        if depth == 0:
            return token.end()
    raise _unread("has a bracket that is not closed", line)


def _split(text: str) -> list[str]:
    """Return the parts of a text between commas outside brackets and strings."""
    parts, depth, begin = [], 0, 0
    for token in _TOKEN.finditer(text):
        depth += token[0] in ("(", "{", "[")
        depth -= token[0] in (")", "}", "]")
        if token[0] == "," and depth == 0:
            parts.append(text[begin : token.start()].strip())
            begin = token.end()
    return [*parts, text[begin:].strip()] if text.strip() else []


@functools.lru_cache(maxsize=65536)
def _shape(text: str) -> Shape:
    text = text.strip()
    if text.startswith("("):
        return tuple(_shape(part) for part in _split(text[1:-1]))
    found = _ARRAY.fullmatch(text)
    if found is None:
        raise ValueError(repr(text))
    if found["dtype"] not in BITS:
        raise ValueError(f"dtype {found['dtype']!r}")
    dims = tuple(int(n) for n in found["dims"].split(",") if n)
    return Array(found["dtype"], dims, is_on_host="S(5)" in (found["layout"] or ""))


def _attributes(line: str, end: int) -> dict[str, str]:
    """Read `, key=value` pairs; groups may be `mesh[...], device_ids=(...) {...}`."""
    attributes = {}
    previous = ""
    for part in _split(line[end:].removeprefix(",")):
        key = _KEY.match(part)
        if key is not None and key[1] == "device_ids" and previous == "replica_groups":
            attributes[previous] += f", {part}"
        elif key is not None:
            previous = key[1]
            attributes[previous] = part[key.end() :]
        else:
            raise _unread(f"has an attribute that is not understood: {part!r}", line)
    return attributes


def _check(computation: Computation, known: Mapping[str, Computation]) -> None:
    """Refuse undefined operands, missing computations, and unpaired `-start` halves."""
    seen: set[str] = set()
    starts: set[str] = set()
    for x in computation.instructions:
        where = f"{x.name} in computation {computation.name}"
        if missing := [name for name in x.operands if name not in seen]:
            raise ValueError(f"{where} uses {missing[0]}, which is not defined before")
        called = () if _CALLING.isdisjoint(x.attributes) else (*x.called, *x.branches)
        if absent := [name for name in called if name not in known]:
            raise ValueError(f"{where} calls {absent[0]}, which the module lacks")
        if x.name in seen:
            raise ValueError(f"{where} is defined twice")
        seen.add(x.name)
        if x.opcode.endswith("-start"):
            starts.add(x.name)
    if sum(x.is_root for x in computation.instructions) != 1:
        raise ValueError(f"computation {computation.name} must have one ROOT")
    ends = set(computation.done_of)
    if odd := sorted(starts - ends):
        raise ValueError(
            f"{odd[0]} in computation {computation.name} is started but not awaited in "
            "the same computation"
        )
    if odd := sorted(ends - starts):
        raise ValueError(
            f"{odd[0]} in computation {computation.name} is awaited but is not a start"
        )


def _unread(what: str, line: str) -> ValueError:
    return ValueError(f"this line of HLO {what}: {line.strip()[:300]!r}")
