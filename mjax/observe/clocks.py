"""Offsets between the clocks of processes, with error bounds.

Input: the times at which each process entered and left barriers of all processes, by
its own clock. Output: offsets to the clock of rank 0, each with a guaranteed bound.

No process leaves a barrier before the last one has entered it. So rank r left after
rank 0 entered, and rank 0 left after rank r entered: the offset, clock of r minus clock
of 0, lies between enter_r - leave_0 and leave_r - enter_0. Several barriers narrow that
range. Between barriers, clocks drift apart by at most `MOST_DRIFT` of the elapsed time.

Source: Lamport 1978 (doi:10.1145/359545.359563) bounds clocks by causality of messages;
here barriers replace messages.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int64

from mjax.observe.spans import SpanFile

MOST_DRIFT = 1e-4
"""Largest relative drift of two clocks under NTP: 100 us per second. Quartz is within
20 to 100 parts per million, and chrony corrects most of that."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offset:
    """Clock of a rank minus that of rank 0, at one moment."""

    ns: float
    error_ns: float
    """Bound of the error of the offset. It is infinite without barriers, or if they
    contradict each other, as after a clock has jumped."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clock:
    """Bounds of one rank's offset at each of K barriers."""

    time_ns: Int64[np.ndarray, "K"]
    """When this rank left the barrier, by its own clock."""
    least_ns: Int64[np.ndarray, "K"]
    most_ns: Int64[np.ndarray, "K"]
    drift: float = MOST_DRIFT
    """Largest possible drift relative to the clock of rank 0, a fraction."""

    def at(self, time_ns: int) -> Offset:
        """Return the offset at a given time of this rank's clock."""
        if not len(self.time_ns):
            return Offset(ns=0.0, error_ns=np.inf)
        drift_ns = self.drift * np.abs(self.time_ns - time_ns)
        # Subtract a bound first: a float64 cannot hold nanoseconds since boot exactly.
        base_ns = int(self.least_ns[0])
        least = float(np.max(self.least_ns - base_ns - drift_ns))
        most = float(np.min(self.most_ns - base_ns + drift_ns))
        has_jumped = most < least
        return Offset(
            ns=base_ns + (least + most) / 2,
            error_ns=np.inf if has_jumped else (most - least) / 2,
        )


def clocks(
    barriers: Mapping[int, Mapping[int, tuple[int, int]]],
) -> dict[int, Clock]:
    """Return the clock of each rank.

    Args:
      barriers: for each rank, a mapping from the number of a barrier to the times in ns
        at which the rank entered and left it.
    """
    of_0 = barriers.get(0, {})
    found = {}
    for rank, own in barriers.items():
        shared = sorted(set(own) & set(of_0))
        enter, leave = _times(own, shared)
        enter_0, leave_0 = _times(of_0, shared)
        is_0 = rank == 0
        found[rank] = Clock(
            time_ns=leave,
            least_ns=0 * leave if is_0 else enter - leave_0,
            most_ns=0 * leave if is_0 else leave - enter_0,
            drift=0.0 if is_0 else MOST_DRIFT,
        )
    return found


def _times(
    barriers: Mapping[int, tuple[int, int]], numbers: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    times = np.array([barriers[k] for k in numbers], np.int64).reshape(-1, 2)
    return times[:, 0], times[:, 1]


def of_generation(files: Sequence[SpanFile]) -> dict[int, Clock]:
    """Return the clocks of the ranks of one generation.

    Args:
      files: span files, one for each rank.
    """
    return clocks(
        {
            found.header.rank: {
                line.barrier: (line.spans[0].start_ns, line.spans[0].end_ns)
                for line in found.lines
                if line.barrier is not None and line.spans
            }
            for found in files
        }
    )
