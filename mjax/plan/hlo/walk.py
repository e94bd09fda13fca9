"""Walk a module in execution order: the only place that follows calls and loops.

Input: a parsed module, and a choice of the computations to follow. Output: the
instructions in execution order, each with the loops around it. A loop's body is walked
once; its trip count says how often it runs.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator

from mjax.plan.hlo.parse import Computation, Instruction, Module

type Follow = Callable[[Instruction], Iterable[str]]
"""Function from an instruction to the names of the computations to enter."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """An instruction and the loops around it."""

    instruction: Instruction
    computation: Computation
    loops: tuple[Instruction, ...]
    """While loops around the instruction, the outermost first."""

    def runs(self, unknown_trip_count: int | None = None) -> int:
        """Return the number of executions: the product of the loops' trip counts."""
        return math.prod(trip_count(loop, unknown_trip_count) for loop in self.loops)


def walk(module: Module, follow: Follow, start: str | None = None) -> Iterator[Site]:
    """Yield the instructions of a computation and of the computations that it calls.

    Args:
      module: module of the computation.
      follow: which computations to enter.
      start: name of the computation; None starts at the entry.
    """

    def visit(name: str, loops: tuple[Instruction, ...]) -> Iterator[Site]:
        computation = module.computations[name]
        for x in computation.instructions:
            yield Site(instruction=x, computation=computation, loops=loops)
            inside = (*loops, x) if x.opcode == "while" else loops
            for called in follow(x):
                yield from visit(called, inside)

    yield from visit(module.entry if start is None else start, ())


def trip_count(loop: Instruction, unknown: int | None = None) -> int:
    """Return the trip count of a loop.

    Args:
      loop: a while instruction.
      unknown: trip count to return if XLA does not know it; None if there is none.
    Raises:
      ValueError: XLA does not know the trip count, and `unknown` is None.
    """
    trips = unknown if loop.trip_count is None else loop.trip_count
    if trips is None:
        raise ValueError(f"the trip count of loop {loop.name} is unknown")
    return trips
