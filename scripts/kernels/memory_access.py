"""Read from the machine code of a kernel how it accesses the memory of a Hopper GPU.

Input: the nvdisasm output of one kernel, and the resources of a thread block. Output:
the widths of its loads and stores, the bytes that a thread requests before it waits for
the first of them, the thread blocks per SM, and the clocks of a loop for a single warp.

Little's law: to move B bytes a second with a latency of L seconds, B L bytes must be in
flight. SMs must request the loads among them; stores need no wait.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from mjax.hardware.gpus import Gpu
from scripts.kernels.sass import Instruction, parse

LATENCY_S = 700e-9
"""Latency of a load from busy memory: an assumption, the middle of 600 to 800 ns; no
measurement of an H200 under load was found.
"""

THREADS_PER_WARP = 32
WARPS_PER_SM = 64
BLOCKS_PER_SM = 32
REGISTERS_PER_SM = 65_536
REGISTERS_PER_ALLOCATION = 256
"""Granularity of the registers of a warp; all its threads have the same number (CUDA
programming guide, technical specifications of compute capability 9.0, as for the three
constants above).
"""
RESERVED_SHARED_BYTES = 1024
"""Shared memory reserved per thread block (Hopper tuning guide, section 1.4.2.4)."""

BULK = ("UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED")
"""Copies by the copy engine between global and shared memory."""

CLOCKS = {"LDS": 30, "LDG": 600, "SHFL": 24, "MUFU": 20, "BAR": 24, "MEMBAR": 40}
"""Clocks until the result of an instruction can be read, or the next may begin; 4 for
all others. Assumptions, rounded.
"""

_OTHER_CLOCKS = 4
_BLOCKING = ("BAR", "MEMBAR")
_SIZES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
_REGISTER = re.compile(r"\bR(\d+)(\.64)?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """The launch of a kernel: number of thread blocks, and resources of each."""

    blocks: int
    threads: int
    """Of a block."""
    registers: int
    """Of a thread."""
    shared_bytes: int
    """Of a block."""


def size_of(instruction: Instruction) -> int:
    """Return the bytes that each thread loads or stores."""
    sizes = [_SIZES[part] for part in instruction.opcode.split(".") if part in _SIZES]
    return sizes[0] if sizes else 4


def accesses(sass: str) -> dict[str, int]:
    """Count the instructions that access global memory, by name and bits per thread.

    Example: {"LDG.128": 8, "STG.16": 1, "UTMALDG": 3}. LD and ST do not name their
    memory.
    """
    counts = collections.Counter[str]()
    for instruction in parse(sass)[0]:
        name = instruction.opcode.partition(".")[0]
        if name in BULK:
            counts[name] += 1
        elif name in ("LD", "LDG", "ST", "STG", "RED", "REDG", "ATOMG"):
            counts[f"{name}.{8 * size_of(instruction)}"] += 1
    return dict(counts)


def loaded_bytes(sass: str) -> int:
    """Return the most bytes that a thread has requested and not yet waited for.

    A load is in flight until an instruction names one of the registers it fills.
    Branches are not followed, except that an innermost loop is walked twice.
    """
    most, pending = 0, dict[int, int]()
    for instruction in _walked(sass):
        used = _registers(instruction.operands)
        for first in [f for f, size in pending.items() if _overlap(f, size, used)]:
            del pending[first]
        if instruction.is_a("LDG"):
            first = next(iter(used))
            pending[first] = size_of(instruction)
            most = max(most, sum(pending.values()))
    return most


def blocks_per_sm(launch: Launch, gpu: Gpu) -> int:
    """Return the number of thread blocks that an SM holds at a time."""
    warps = -(-launch.threads // THREADS_PER_WARP)
    registers = _rounded(
        launch.registers * THREADS_PER_WARP, to=REGISTERS_PER_ALLOCATION
    )
    shared = launch.shared_bytes + RESERVED_SHARED_BYTES
    return min(
        BLOCKS_PER_SM,
        WARPS_PER_SM // warps,
        REGISTERS_PER_SM // (registers * warps),
        gpu.shared_memory_per_sm_bytes // shared,
        -(-launch.blocks // gpu.num_sms),
    )


def bytes_needed(gpu: Gpu, read_share: float) -> float:
    """Return the bytes of loads that an SM must have in flight to keep memory busy.

    Args:
      gpu: GPU whose memory bandwidth is the target.
      read_share: bytes read over all bytes moved.
    """
    return gpu.memory_bytes_per_s / gpu.num_sms * LATENCY_S * read_share


def longest_loop(sass: str) -> list[Instruction]:
    """Return the instructions of the longest innermost loop; empty if there is none."""
    code, labels = parse(sass)
    spans = _innermost(code, labels)
    begin, end = max(spans, key=lambda span: span[1] - span[0], default=(0, 0))
    return code[begin:end]


def straight(sass: str) -> list[Instruction]:
    """Return the instructions up to the last exit, where the code ends."""
    code = parse(sass)[0]
    end = max((i for i, x in enumerate(code) if x.is_a("EXIT")), default=-1)
    return code[: end + 1]


def clocks_alone(body: Sequence[Instruction]) -> float:
    """Return the clocks of a loop iteration for a warp alone on its scheduler.

    One instruction per clock, in order, each when its registers are filled. The other
    warps of a block are assumed to arrive at a barrier at the same time.
    """
    now, ready = 0.0, dict[str, float]()
    started = 0.0
    for turn in range(2):
        started = now if turn else 0.0
        for instruction in body:
            names = re.findall(r"\bU?[RP]\d+\b", instruction.operands)
            names += re.findall(r"U?P\d+", instruction.predicate)
            now = max([now + 1, *(ready.get(name, 0.0) for name in names)])
            clocks = _clocks(instruction)
            if instruction.opcode.partition(".")[0] in _BLOCKING:
                now += clocks
            for name in _results(instruction, names):
                ready[name] = now + clocks
    return now - started


def _results(instruction: Instruction, names: Sequence[str]) -> Iterator[str]:
    """Name the registers that an instruction writes."""
    if instruction.is_a("STS") or instruction.is_a("STG") or not names:
        return
    first = names[0]
    yield first
    number = re.search(r"\d+$", first)
    if first.startswith("R") and number and instruction.is_a("LDS"):
        for more in range(1, size_of(instruction) // 4):
            yield f"R{int(number[0]) + more}"


def _clocks(instruction: Instruction) -> float:
    return CLOCKS.get(instruction.opcode.partition(".")[0], _OTHER_CLOCKS)


def _walked(sass: str) -> Iterator[Instruction]:
    """Return the instructions in code order, with each innermost loop repeated once."""
    code, labels = parse(sass)
    ends = {end: begin for begin, end in _innermost(code, labels)}
    for i, instruction in enumerate(code):
        yield instruction
        if i + 1 in ends:
            yield from code[ends[i + 1] : i + 1]


def _innermost(
    code: Sequence[Instruction], labels: Mapping[str, int]
) -> list[tuple[int, int]]:
    spans = []
    for i, instruction in enumerate(code):
        target = re.search(r"\.L_\w+", instruction.operands)
        if instruction.opcode == "BRA" and instruction.predicate and target:
            begin = labels[target[0]]
            if begin <= i:
                spans.append((begin, i + 1))
    return [
        span
        for span in spans
        if not any(
            span != other and span[0] <= other[0] and other[1] <= span[1]
            for other in spans
        )
    ]


def _registers(operands: str) -> dict[int, None]:
    """List the registers that an operand text names, in order; R8.64 names two."""
    found = dict[int, None]()
    for number, wide in _REGISTER.findall(operands):
        found[int(number)] = None
        if wide:
            found[int(number) + 1] = None
    return found


def _overlap(first: int, size: int, used: Mapping[int, None]) -> bool:
    return any(first <= n < first + max(1, size // 4) for n in used)


def _rounded(n: int, *, to: int) -> int:
    return -(-n // to) * to
