"""Read the loops of a GPU kernel from its disassembled code.

Input: the nvdisasm output of one kernel. Output: its instructions, and for each loop
with matmuls the counts of the instructions that decide its speed, and the number of its
exponentials that run while a matmul is in flight.

Hopper's matmul instruction HGMMA is asynchronous: one with `gsb0` ends a group, and
`WARPGROUP.DEPBAR.LE gsb0, n` waits until at most n groups are unfinished (PTX ISA,
wgmma.commit_group and wgmma.wait_group). ptxas may move such a wait up; work that was
written to overlap the matmul then runs after it.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

LOOP_WATCHED = ("HGMMA", "MUFU.EX2", "LD", "LDG", "LDS", "SHFL", "BAR", "MEMBAR")
"""Instructions counted in loops: matmuls; exponentials; generic loads, those
from global and from shared memory; exchanges inside a warp; barriers of a block; memory
barriers."""

_LINE = re.compile(
    r"/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;/]*)"
)
_LABEL = re.compile(r"^(\.L_\w+):", re.MULTILINE)
_TARGET = re.compile(r"\.L_\w+")
_WAIT = "WARPGROUP.DEPBAR.LE"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction."""

    opcode: str
    """Name with its suffixes."""
    operands: str
    predicate: str
    """Predicate, such as @!P1; empty if it always runs."""

    def is_a(self, name: str) -> bool:
        """Return whether it is an instruction of this name, with any suffixes."""
        return f"{self.opcode}.".startswith(f"{name}.")

    @property
    def ends_group(self) -> bool:
        """Whether it is the last matmul of a group."""
        return self.is_a("HGMMA") and self.operands.endswith("gsb0")

    @property
    def most_unfinished(self) -> int | None:
        """Groups of matmuls that may be unfinished after it; None if it does not
        wait."""
        if self.opcode != _WAIT:
            return None
        return int(self.operands.rpartition(",")[2], 16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop with matmuls."""

    instructions: int
    counts: Mapping[str, int]
    """Counts of `LOOP_WATCHED`."""
    hidden_exponentials: int
    """Exponentials that run while a group of matmuls is unfinished."""

    @property
    def exponentials(self) -> int:
        """All exponentials."""
        return self.counts["MUFU.EX2"]


def loops(sass: str) -> list[Loop]:
    """Return the loops of a kernel that contain matmuls, in code order."""
    return [_measured(body) for body in loop_bodies(sass)]


def loop_bodies(sass: str) -> list[list[Instruction]]:
    """Return the instructions of each loop with matmuls, in code order.

    If loops are nested, only the innermost ones are returned.
    """
    code, labels = parse(sass)
    spans = []
    for i, instruction in enumerate(code):
        # An unconditional branch back ends out-of-line code.
        if instruction.opcode == "BRA" and instruction.predicate:
            target = _TARGET.search(instruction.operands)
            begin = labels[target[0]] if target else i
            if begin <= i and any(c.is_a("HGMMA") for c in code[begin:i]):
                spans.append((begin, i + 1))
    return [
        code[begin:end]
        for begin, end in spans
        if not any(
            (begin, end) != other and begin <= other[0] and other[1] <= end
            for other in spans
        )
    ]


def parse(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return the instructions, and for each label the index of the next instruction."""
    code, labels = list[Instruction](), dict[str, int]()
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _LINE.search(line):
            _, predicate, opcode, operands = found.groups()
            code.append(
                Instruction(
                    opcode=opcode,
                    operands=operands.strip(),
                    predicate=predicate or "",
                )
            )
    return code, labels


def _measured(body: Sequence[Instruction]) -> Loop:
    counts = {
        name: sum(instruction.is_a(name) for instruction in body)
        for name in LOOP_WATCHED
    }
    return Loop(
        instructions=len(body),
        counts=counts,
        hidden_exponentials=sum(
            unfinished > 0
            for instruction, unfinished in _steady(body)
            if instruction.is_a("MUFU.EX2")
        ),
    )


def _steady(body: Sequence[Instruction]) -> Iterator[tuple[Instruction, int]]:
    """Return each instruction and the unfinished groups before it, begun ones included.

    Walked twice: groups left unfinished by one iteration are in flight in the next.
    """
    unfinished, is_begun = 0, False
    for first in (True, False):
        for instruction in body:
            if not first:
                yield instruction, unfinished + is_begun
            if instruction.is_a("HGMMA"):
                is_begun = not instruction.ends_group
                unfinished += instruction.ends_group
            elif (most := instruction.most_unfinished) is not None:
                unfinished = min(unfinished, most)
