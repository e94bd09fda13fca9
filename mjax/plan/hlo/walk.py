"""Walk a module as it runs: the one place that follows calls and loops.

Enters: a parsed module, and which of the computations that an instruction names to
follow. Leaves: the instructions in the order in which they run, each with the loops
around it. A loop's body is walked once; its trip count says how often it runs.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator

from mjax.plan.hlo.parse import Computation, Instruction, Module

type Follow = Callable[[Instruction], Iterable[str]]
"""Names of the computations to enter from an instruction."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """An instruction, and where it runs."""

    instruction: Instruction
    computation: Computation
    loops: tuple[Instruction, ...]
    """While loops around it, the outermost first."""

    def runs(self, unknown_trip_count: int | None = None) -> int:
        """Return how often it runs: the product of the trip counts around it."""
        return math.prod(trip_count(loop, unknown_trip_count) for loop in self.loops)


def walk(module: Module, follow: Follow, start: str | None = None) -> Iterator[Site]:
    """Yield the instructions of a computation and of those that it calls.

    Args:
      module: of which a computation is walked.
      follow: which computations to enter.
      start: name of the computation; None is the entry.
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
    """Return how often a loop runs.

    Args:
      loop: a while instruction.
      unknown: the answer where XLA does not say it.
    Raises:
      ValueError: neither XLA nor the caller says it.
    """
    trips = unknown if loop.trip_count is None else loop.trip_count
    if trips is None:
        raise ValueError(f"the trip count of loop {loop.name} is unknown")
    return trips
