"""Model the time of a kernel's loop on one SM of a Hopper GPU, without a GPU.

Input: the phases of one loop iteration of a warpgroup, and the number of warpgroups.
Output: the clocks of an iteration.

An SM has four schedulers, and each has one warp of every warpgroup. So a warpgroup's
instructions count as those of one warp on one scheduler. A single warp does not fill a
pipe, since its instructions wait for each other: its work takes `slowness` times the
clocks of the busiest pipe. Warpgroups share the pipes and slow each other down only
where a pipe is full. The tensor cores run the groups of matmuls one by one, in the
order of issue.

Rates (CUDA C++ programming guide, table of the throughput of arithmetic instructions,
compute capability 9.0) are for warp instructions of 32 threads on one of the four
schedulers.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

CLOCK_GHZ = 1.83
"""Clock rate at which 132 SMs of 4096 FLOPs per clock reach the data sheet's 989
TFLOP/s.
"""
NUM_SMS = 132
FLOPS_PER_CLOCK = 4096
"""FLOPs per clock of the tensor cores of an SM: bfloat16, dense."""
SHARED_BYTES_PER_CLOCK = 128
EXPONENTIALS_PER_CLOCK = 16
L2_BYTES_PER_CLOCK = 5120 / NUM_SMS
"""L2 bytes per clock for each SM when all SMs read. NVIDIA gives 5120 bytes a clock for
the L2 of the A100 (Ampere architecture whitepaper); none for Hopper.
"""

PIPES = ("issue", "fma", "alu", "mufu", "lsu")
"""Pipes: issue slots; single-precision multiply and add; comparisons, conversions and
integers; exponentials; shared memory and shuffles."""
PIPE_CLOCKS = {"fma": 1.0, "alu": 2.0, "mufu": 8.0, "lsu": 4.0}
"""Clocks of a warp instruction: 128, 64, 16 and 32 results per clock and SM."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Instructions of one warp."""

    clocks: Mapping[str, float]
    """Clocks of each of `PIPES`."""

    @property
    def most(self) -> float:
        """Clocks of the busiest pipe."""
        return max(self.clocks.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """A group of matmuls of a warpgroup, in flight once it is issued."""

    flops: float
    shared_bytes: float
    """Bytes of operands in shared memory, read once per instruction."""

    @property
    def clocks(self) -> float:
        """Clocks of the tensor cores or of reading the operands, whichever is
        longer."""
        arithmetic = self.flops / FLOPS_PER_CLOCK
        return max(arithmetic, self.shared_bytes / SHARED_BYTES_PER_CLOCK)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wait:
    """Wait until at most this many groups of matmuls are unfinished."""

    most_unfinished: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """The right to issue matmuls: taken, or passed to the next warpgroup."""

    taken: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meet:
    """Wait until every warpgroup has arrived here equally often."""


Phase = Work | Product | Wait | Turn | Meet
Program = Sequence[Phase]


def clocks_per_round(
    program: Program, *, warpgroups: int, slowness: float = 1.0, rounds: int = 48
) -> float:
    """Return the steady-state clocks in which every warpgroup does one iteration.

    Args:
      program: phases of one iteration of a warpgroup.
      warpgroups: number of warpgroups that run it.
      slowness: clocks of a single warp over those of its busiest pipe; at least 1.
      rounds: simulated iterations; the first half is not counted.
    Raises:
      ValueError: the warpgroups wait for each other, or slowness is below 1.
    """
    if slowness < 1:
        raise ValueError(f"slowness must be at least 1, got {slowness}")
    groups = [_Warpgroup(program) for _ in range(warpgroups)]
    groups[0].turns = 1
    half = rounds // 2
    now, tensor_free = 0.0, 0.0
    while min(group.rounds for group in groups) < rounds:
        tensor_free = _start_all(groups, now, tensor_free)
        working = [group for group in groups if isinstance(group.phase, Work)]
        speed = _speed(working, slowness)
        ends = [now + group.left * slowness / speed for group in working]
        ends += [t for group in groups if (t := group.waits_until) is not None]
        if not ends:
            raise ValueError("no warpgroup can go on: each waits for another")
        step = max(min(ends) - now, 0.0)
        now += step
        for group in working:
            group.left -= step * speed / slowness
        for group in groups:
            group.finish(now)
    return (_reached(groups, rounds) - _reached(groups, half)) / (rounds - half)


class _Warpgroup:
    """Position of one warpgroup in its program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.at, self.rounds, self.turns, self.meetings = 0, 0, 0, 0
        self.left = 0.0
        self.done: list[float] = []
        """End time of each group of matmuls."""
        self.times: list[float] = []
        """End time of each iteration."""
        self._enter()

    @property
    def phase(self) -> Phase:
        return self.program[self.at]

    @property
    def waits_until(self) -> float | None:
        """End time of the matmuls that this warpgroup waits for; None if it does not
        wait."""
        if not isinstance(self.phase, Wait):
            return None
        n = self.phase.most_unfinished
        return self.done[-n - 1] if len(self.done) > n else 0.0

    def finish(self, now: float) -> None:
        """Leave a finished phase."""
        until = self.waits_until
        is_over = self.left <= 1e-9 if isinstance(self.phase, Work) else False
        if is_over or (until is not None and until <= now + 1e-9):
            self.next(now)

    def next(self, now: float) -> None:
        self.at += 1
        if self.at == len(self.program):
            self.at = 0
            self.rounds += 1
            self.times.append(now)
        self._enter()

    def _enter(self) -> None:
        self.left = self.phase.most if isinstance(self.phase, Work) else 0.0
        self.meetings += isinstance(self.phase, Meet)


def _start_all(groups: list[_Warpgroup], now: float, tensor_free: float) -> float:
    """Skip all phases that take no time; return when the tensor cores are free."""
    moved = True
    while moved:
        moved = False
        for i, group in enumerate(groups):
            phase = group.phase
            if isinstance(phase, Product):
                tensor_free = max(now, tensor_free) + phase.clocks
                group.done.append(tensor_free)
            elif isinstance(phase, Turn) and not phase.taken:
                groups[(i + 1) % len(groups)].turns += 1
            elif isinstance(phase, Turn) and group.turns:
                group.turns -= 1
            elif isinstance(phase, Meet) and _all_have_met(groups, group):
                pass
            else:
                continue
            group.next(now)
            moved = True
    return tensor_free


def _all_have_met(groups: Sequence[_Warpgroup], group: _Warpgroup) -> bool:
    return all(other.meetings >= group.meetings for other in groups)


def _speed(working: Sequence[_Warpgroup], slowness: float) -> float:
    """Return the factor on the speed of all warpgroups; 1 if no pipe is full."""
    used: dict[str, float] = dict.fromkeys(PIPES, 0.0)
    for group in working:
        assert isinstance(group.phase, Work)
        for pipe, clocks in group.phase.clocks.items():
            used[pipe] += clocks / (group.phase.most * slowness)
    return 1 / max(1.0, *used.values())


def _reached(groups: Sequence[_Warpgroup], rounds: int) -> float:
    """Return when all warpgroups have done this number of iterations."""
    return max(group.times[rounds - 1] for group in groups)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """Clocks of each resource of one SM for an iteration of all warpgroups."""

    tensor: float
    shared: float
    exponentials: float
    issue: float
    l2: float

    @property
    def most(self) -> float:
        """Clocks of the slowest resource."""
        return max(dataclasses.astuple(self))


def counts(
    program: Program,
    *,
    warpgroups: int,
    loaded_bytes: float,
    added_bytes: float = 0.0,
) -> Counts:
    """Count the clocks of an iteration per resource, with full overlap.

    Args:
      program: phases of one iteration of a warpgroup.
      warpgroups: number of warpgroups that run it.
      loaded_bytes: bytes that the copy engine writes to shared memory for all
        warpgroups.
      added_bytes: bytes that the copy engine reads from shared memory and adds to
        global memory; the L2 reads and writes as many.
    """
    products = [phase for phase in program if isinstance(phase, Product)]
    work = [phase.clocks for phase in program if isinstance(phase, Work)]
    shared = sum(p.shared_bytes for p in products) * warpgroups
    shared += loaded_bytes + added_bytes
    # Four schedulers share one path to shared memory.
    shared_clocks = shared / SHARED_BYTES_PER_CLOCK
    shared_clocks += warpgroups * math.fsum(w.get("lsu", 0.0) for w in work)
    return Counts(
        tensor=warpgroups * math.fsum(p.flops for p in products) / FLOPS_PER_CLOCK,
        shared=shared_clocks,
        exponentials=warpgroups * math.fsum(w.get("mufu", 0.0) for w in work),
        issue=warpgroups * math.fsum(w.get("issue", 0.0) for w in work),
        l2=(loaded_bytes + 2 * added_bytes) / L2_BYTES_PER_CLOCK,
    )
