"""Turn a loop of machine code into the phases that `sm_model` times.

Input: the instructions of a loop. Output: its phases: work, matmuls issued, waits for
matmuls, and turns. So the overlap of a warpgroup is that of the code of ptxas, not of
the source.
"""

import re
from collections.abc import Sequence

from scripts.kernels.sass import Instruction
from scripts.kernels.sm_model import (
    PIPE_CLOCKS,
    Meet,
    Phase,
    Product,
    Program,
    Turn,
    Wait,
    Work,
)

PIECE = 24
"""Instructions of a piece of work. Within a piece the pipes run in parallel; pieces run
one after another, in code order.
"""

_SHAPE = re.compile(r"\.(\d+)x(\d+)x(\d+)\.")
_FMA = ("FFMA", "FADD", "FMUL", "IMAD")
_LSU = ("LD", "LDG", "LDS", "LDSM", "ST", "STG", "STS", "STSM", "SHFL")
_ISSUE_ONLY = ("BRA", "HGMMA", "WARPGROUP", "BAR", "NOP", "SYNCS", "MEMBAR", "FENCE")
_ELEMENT_BYTES = 2


def program(body: Sequence[Instruction]) -> Program:
    """Return the phases of a loop.

    A warpgroup passes a turn if it arrives at a barrier right after it has issued
    matmuls, without waiting for any in between. Such a loop takes a turn before its
    first matmuls. Buffer entries of a ring are released only after a wait. Warpgroups
    synchronise where one arrives at a barrier after a fence without a matmul in
    between: the others' matmuls read its stores to shared memory.
    """
    phases: list[Phase] = []
    piece: list[Instruction] = []
    flops = shared_bytes = 0.0
    has_issued = has_turns = has_stored = False

    def end_piece() -> None:
        if piece:
            phases.append(work(piece))
            piece.clear()

    for instruction in body:
        piece.append(instruction)
        if instruction.is_a("HGMMA"):
            more_flops, more_bytes = product_of(instruction)
            flops, shared_bytes = flops + more_flops, shared_bytes + more_bytes
            has_stored = False
        has_stored |= instruction.is_a("FENCE.VIEW.ASYNC")
        if instruction.ends_group:
            end_piece()
            phases.append(Product(flops=flops, shared_bytes=shared_bytes))
            flops, shared_bytes, has_issued = 0.0, 0.0, True
        elif (most := instruction.most_unfinished) is not None:
            end_piece()
            phases.append(Wait(most_unfinished=most))
            has_issued = False
        elif instruction.is_a("SYNCS.ARRIVE") and has_stored:
            end_piece()
            phases.append(Meet())
            has_stored = False
        elif instruction.is_a("SYNCS.ARRIVE") and has_issued and not has_turns:
            end_piece()
            phases.append(Turn(taken=False))
            has_turns = True
        elif len(piece) == PIECE:
            end_piece()
    end_piece()
    if has_turns:
        first = next(i for i, p in enumerate(phases) if isinstance(p, Product))
        phases.insert(first, Turn(taken=True))
    return phases


def work(piece: Sequence[Instruction]) -> Work:
    """Count the clocks of instructions on each pipe."""
    clocks = {"issue": float(len(piece))}
    for instruction in piece:
        if pipe := _pipe(instruction.opcode.partition(".")[0]):
            clocks[pipe] = clocks.get(pipe, 0.0) + PIPE_CLOCKS[pipe]
    return Work(clocks=clocks)


def product_of(instruction: Instruction) -> tuple[float, float]:
    """Return the FLOPs of a matmul and the bytes that it reads from shared memory."""
    shape = _SHAPE.search(instruction.opcode)
    if shape is None:
        raise ValueError(f"no shape in {instruction.opcode!r}, a matrix product")
    m, n, k = map(int, shape.groups())
    # If the first operand is not in registers, both come from shared memory.
    first = instruction.operands.split(",")[1].strip()
    rows = n if first.startswith("R") else m + n
    return 2.0 * m * n * k, float(rows * k * _ELEMENT_BYTES)


def flops(phases: Program) -> float:
    """Return the FLOPs of all matmuls of an iteration."""
    return sum(phase.flops for phase in phases if isinstance(phase, Product))


def _pipe(name: str) -> str | None:
    if name == "MUFU":
        return "mufu"
    if name in _FMA:
        return "fma"
    if name in _LSU:
        return "lsu"
    # Names that begin with U belong to the uniform datapath, shared by all threads.
    return None if name in _ISSUE_ONLY or name.startswith("U") else "alu"
