"""Add up a device's seconds in a window by phase and role, overlapped or exposed.

Input: placed events of one device. Output: for each phase and role the sum of all
events, and its *exposed* part. At each instant between the first event and the last,
the time belongs to exactly one running event: computation before communication, then
the one that began first. So the exposed seconds of all phases and roles and the idle
seconds add up to the span. The rest of a sum is overlapped: for a collective, the
device computed at the same time.

An event of a collective lasts at least until all members of its group have entered it,
so the communication of a device includes its waits for others.
"""

import collections
import dataclasses
import heapq
from collections.abc import Iterable, Mapping, Sequence

from mjax.observe.windows.placed import Placed
from mjax.observe.windows.places import UNKNOWN


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seconds:
    """Times of one phase and role."""

    total_s: float
    """Sum of the durations of all events."""
    exposed_s: float
    """Exposed part of the total: the time that belongs to these events."""
    events: int

    @property
    def overlapped_s(self) -> float:
        """Overlapped part of the total."""
        return max(0.0, self.total_s - self.exposed_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceSeconds:
    """Time of one device in a window."""

    span_s: float
    """Seconds from the start of the first event to the end of the last."""
    idle_s: float
    """Seconds of the span without any event."""
    parts: Mapping[tuple[str, str], Seconds]
    """Times by phase and role."""
    unknown: Mapping[str, float]
    """Seconds of instructions whose phase and role are unknown, by instruction name;
    the longest first."""


def seconds_of(events: Sequence[Placed]) -> DeviceSeconds:
    """Add up the events of one device; without events all times are 0."""
    total: dict[tuple[str, str], float] = collections.defaultdict(float)
    count: collections.Counter[tuple[str, str]] = collections.Counter()
    unknown: dict[str, float] = collections.defaultdict(float)
    for placed in events:
        took_s = (placed.event.stop_ns - placed.event.start_ns) * 1e-9
        total[placed.phase, placed.role] += took_s
        count[placed.phase, placed.role] += 1
        if placed.phase == UNKNOWN:
            unknown[placed.event.name] += took_s
    exposed, idle_s = _exposed(events)
    start_ns = min((p.event.start_ns for p in events), default=0.0)
    stop_ns = max((p.event.stop_ns for p in events), default=0.0)
    return DeviceSeconds(
        span_s=(stop_ns - start_ns) * 1e-9,
        idle_s=idle_s,
        parts={
            key: Seconds(
                total_s=total[key], exposed_s=exposed.get(key, 0.0), events=count[key]
            )
            for key in total
        },
        unknown=dict(sorted(unknown.items(), key=lambda item: -item[1])),
    )


def _exposed(
    events: Iterable[Placed],
) -> tuple[dict[tuple[str, str], float], float]:
    """Return exposed seconds by phase and role, and idle seconds."""
    edges: list[tuple[float, int, int]] = []
    listed = sorted(events, key=lambda p: p.event.start_ns)
    for number, placed in enumerate(listed):
        edges.append((placed.event.start_ns, 1, number))
        edges.append((placed.event.stop_ns, 0, number))
    edges.sort()
    exposed: dict[tuple[str, str], float] = collections.defaultdict(float)
    idle_ns, before_ns = 0.0, edges[0][0] if edges else 0.0
    running: list[tuple[bool, int]] = []
    ended: set[int] = set()
    for now_ns, begins, number in edges:
        while running and running[0][1] in ended:
            heapq.heappop(running)
        if running:
            first = listed[running[0][1]]
            exposed[first.phase, first.role] += (now_ns - before_ns) * 1e-9
        else:
            idle_ns += now_ns - before_ns
        before_ns = now_ns
        if begins:
            is_sent = listed[number].role != "compute"
            heapq.heappush(running, (is_sent, number))
        else:
            ended.add(number)
    return dict(exposed), idle_ns * 1e-9


def merged(
    parts: Iterable[Mapping[tuple[str, str], Seconds]],
) -> dict[tuple[str, str], Seconds]:
    """Add up the times of several windows or devices, by (phase, role)."""
    found: dict[tuple[str, str], list[Seconds]] = collections.defaultdict(list)
    for one in parts:
        for key, seconds in one.items():
            found[key].append(seconds)
    return {
        key: Seconds(
            total_s=sum(s.total_s for s in several),
            exposed_s=sum(s.exposed_s for s in several),
            events=sum(s.events for s in several),
        )
        for key, several in found.items()
    }
