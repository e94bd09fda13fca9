"""Predict the time of a start on many hosts from starts on one host.

Input: the times of starts of several sizes. Output: the growth of each phase on this
host, and its predicted duration at another size. Pure.

On one host the processes share the cores, so the work of each process takes longer with
more processes. On a cluster every process has its own cores; only two kinds of work
grow: the coordinator's, and the work that a process does for each other process. So the
model of a phase adds three terms:

- *own*: CPU seconds of one process, the larger of process 0 and the median of the
  others. In the phases `LOCAL` this is the value at the smallest size.
- *coordinator*: CPU seconds of the coordinator, not in parallel. Its law comes from
  light clients (`mjax.processes.timed_clients`), of which one host can run a thousand.
- *wait*: the rest of the slowest process's time at the smallest size: round trips over
  the loopback interface, files, sleeping. It is taken as constant: a barrier of the
  coordination service is one request and one response per process. If process 0
  requests a value from each other process in turn, one round trip for each is added.
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence

from mjax.health.startup.laws import LINEAR, Growth, Range, growth

LOCAL = ("spawn", "import")
"""Phases of `mjax.processes.timed_start` that do not depend on other processes."""
SILENT = (*LOCAL, "compile")
"""Phases without a request to the coordinator."""
ONE_BY_ONE = ("comparison",)
"""Phases in which process 0 reads a text of each other process in turn:
`mjax.processes.agreement`, `_collect`. (For the devices, jax reads in parallel.)"""
CPU_ONLY = ("collective",)
"""Phases of gloo, which connects every process with every other
(https://github.com/pytorch/gloo/issues/419). A run on GPUs uses NCCL instead."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """One phase of one start."""

    name: str
    wall_s: tuple[float, ...]
    """Wall seconds of each process, from its release to the end of its phase."""
    cpu_s: tuple[float, ...]
    """CPU seconds of each process: all threads, user and system."""
    coordinator_s: float
    """CPU seconds of the coordinator, all threads."""


Starts = Mapping[int, Sequence[tuple[PhaseTimes, ...]]]
"""Maps a number of processes to the phases of each repeat."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase at all sizes."""

    name: str
    slowest_s: Mapping[int, float]
    """Wall seconds of the slowest process by size, median of the repeats."""
    median_s: Mapping[int, float]
    """Wall seconds of the median process by size, median of the repeats."""
    wall: Growth
    """Growth of the slowest process's wall seconds on this host."""
    first: Growth
    """Growth of the CPU seconds of process 0."""
    others: Growth
    """Growth of the CPU seconds of the median process, excluding process 0."""
    coordinator: Growth
    """Growth of the CPU seconds of the coordinator: with light clients if they have
    this phase, otherwise with processes."""
    coordinator_s: Mapping[int, float]
    """CPU seconds of the coordinator by size, with processes."""
    clients_s: Mapping[int, float]
    """CPU seconds of the coordinator by size, with light clients; empty if they do not
    have this phase."""
    own_s: float
    """CPU seconds of one process at the smallest size."""
    wait_s: float
    """Wall seconds of the slowest process at the smallest size, without `own_s` and the
    CPU seconds of the coordinator."""

    @property
    def is_silent(self) -> bool:
        """Whether the phase makes no request to the coordinator."""
        return self.name in SILENT

    @property
    def is_cpu_only(self) -> bool:
        """Whether runs on GPUs replace the phase."""
        return self.name in CPU_ONLY


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """One phase at a size that was not measured."""

    own: Range
    coordinator: Range
    wait_s: float

    @property
    def total(self) -> Range:
        """Sum of the terms; it has no value if one term has none."""
        return add([self.own, self.coordinator, _exactly(self.wait_s)])


def read_phases(starts: Starts, clients: Starts) -> tuple[Phase, ...]:
    """Return the phases of a start, each with the repeats of all sizes.

    Args:
      starts: starts of processes.
      clients: starts of light clients; may be empty.
    Raises:
      ValueError: the starts do not have the same phases.
    """
    names = {
        tuple(phase.name for phase in start)
        for repeats in starts.values()
        for start in repeats
    }
    if len(names) != 1:
        raise ValueError(f"the starts must have the same phases, got {sorted(names)}")
    (order,) = names
    return tuple(_phase(name, starts, clients) for name in order)


def _by_size(
    starts: Starts, name: str, number: Callable[[PhaseTimes], float]
) -> dict[int, float]:
    """Return the median of a number over the repeats of a phase, by size.

    Args:
      starts: the starts; the result is empty if they do not have the phase.
      name: name of the phase.
      number: returns the number of one repeat.
    """
    found = {
        size: [
            number(phase) for start in repeats for phase in start if phase.name == name
        ]
        for size, repeats in sorted(starts.items())
    }
    return {size: statistics.median(values) for size, values in found.items() if values}


def _law(seconds: Mapping[int, float]) -> Growth:
    return growth([*seconds], [*seconds.values()])


def _phase(name: str, starts: Starts, clients: Starts) -> Phase:
    slowest_s = _by_size(starts, name, lambda times: max(times.wall_s))
    first_s = _by_size(starts, name, lambda times: times.cpu_s[0])
    others_s = _by_size(starts, name, lambda times: statistics.median(times.cpu_s[1:]))
    coordinator_s = _by_size(starts, name, lambda times: times.coordinator_s)
    clients_s = _by_size(clients, name, lambda times: times.coordinator_s)
    if name in SILENT:
        clients_s = {}
    least = min(starts)
    own_s = max(first_s[least], others_s[least])
    wait_s = slowest_s[least] - own_s - coordinator_s[least]
    return Phase(
        name=name,
        slowest_s=slowest_s,
        median_s=_by_size(starts, name, lambda times: statistics.median(times.wall_s)),
        wall=_law(slowest_s),
        first=_law(first_s),
        others=_law(others_s),
        coordinator=_law(clients_s or coordinator_s),
        coordinator_s=coordinator_s,
        clients_s=clients_s,
        own_s=own_s,
        wait_s=max(0.0, wait_s),
    )


def predict(phase: Phase, size: int, round_trip_s: float) -> Prediction:
    """Return the duration of a phase if each process has its own cores.

    In a phase, a process exchanges at most a constant amount with each other process,
    so its own work grows at most linearly.

    Args:
      phase: the phase as measured.
      size: number of processes.
      round_trip_s: round trip time of the network between two hosts.
    """
    own, coordinator = _exactly(phase.own_s), _exactly(0.0)
    if phase.name not in LOCAL:
        first = phase.first.at(size, most=LINEAR)
        others = phase.others.at(size, most=LINEAR)
        own = _larger(first, others)
    if not phase.is_silent:
        coordinator = phase.coordinator.at(size)
    trips = size - 1 if phase.name in ONE_BY_ONE else 0
    return Prediction(
        own=own, coordinator=coordinator, wait_s=phase.wait_s + trips * round_trip_s
    )


def add(ranges: Sequence[Range]) -> Range:
    """Add successive durations; the sum has no value if one of them has none.

    The bounds are added too, as if all were off in the same direction.
    """
    values = [r.value_s for r in ranges if r.value_s is not None]
    return Range(
        value_s=sum(values) if len(values) == len(ranges) else None,
        low_s=sum(r.low_s for r in ranges),
        high_s=sum(r.high_s for r in ranges),
    )


def _exactly(seconds: float) -> Range:
    return Range(value_s=seconds, low_s=seconds, high_s=seconds)


def _larger(one: Range, other: Range) -> Range:
    """Return the duration of two concurrent tasks."""
    is_told = one.value_s is not None and other.value_s is not None
    return Range(
        value_s=max(one.value_s or 0.0, other.value_s or 0.0) if is_told else None,
        low_s=max(one.low_s, other.low_s),
        high_s=max(one.high_s, other.high_s),
    )
