"""The source from which the page reads a run.

Input: none. Output: shares of new data (one for each poll) and, on request, the lines
of earlier steps. `FileFeed` reads files, `StoreFeed` a database. A feed never changes
the data of the run.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from mjax.observe.page.model import Process, Share
from mjax.observe.spans import Header, Line, SpanFile

MOST_DEVICES = 1_000_000
"""Largest plausible size of a mesh. It is ten times the size of the largest cluster."""
_MOST_NS = 2**62
_MOST_STEP = 2**31


def check_header(header: Header) -> None:
    """Refuse sizes that would cause endless work, and numbers too large for arrays.

    Raises:
      ValueError: a size of the mesh, a device or a time is impossible.
    """
    num = math.prod(header.mesh.values())
    if min(header.mesh.values(), default=1) < 1 or num > MOST_DEVICES:
        raise ValueError(f"the sizes of the mesh {header.mesh} are impossible")
    wrong = [device for device in header.devices if not 0 <= device < num]
    if wrong or not 0 <= header.rank < num:
        raise ValueError(
            f"rank {header.rank} with devices {[*header.devices[:8]]} is outside of "
            f"the mesh {header.mesh}"
        )
    if max(abs(header.wall_ns), abs(header.monotonic_ns)) >= _MOST_NS:
        raise ValueError(
            f"the clocks of rank {header.rank} show impossible times: wall "
            f"{header.wall_ns} ns, monotonic {header.monotonic_ns} ns"
        )


def check_line(line: Line) -> None:
    """Refuse numbers that are too large for arrays.

    Raises:
      ValueError: the step or a time is impossible.
    """
    if not -1 <= line.step < _MOST_STEP:
        raise ValueError(f"step {line.step} is impossible")
    for _, _, _, start_ns, end_ns in line.spans:
        if start_ns <= -_MOST_NS or end_ns >= _MOST_NS:
            raise ValueError("the time of a span is impossible")


@runtime_checkable
class Feed(Protocol):
    """Source of a run's data. One thread polls; any thread may request lines."""

    def poll(self) -> Share:
        """Read a limited share of new data, so that other threads can run in between.

        Raises:
          OSError: nothing can be read now; the next attempt may succeed.
        """
        ...

    def lines(self, process: Process, first: int, last: int) -> Sequence[Line]:
        """Return the lines of a process for some steps, in order.

        They may include lines of other steps.

        Args:
          process: as returned by `poll`.
          first: first step.
          last: last step, included.
        """
        ...

    def whole(self, process: Process) -> SpanFile:
        """Return all lines of a process."""
        ...

    def config(self) -> Any:
        """Return the config of the run, unchanged; None if the run wrote none."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...
