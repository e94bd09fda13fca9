"""Times of the events of a launch, on one clock that does not jump.

Input: the events of the drivers of one run, oldest first. Output: each event with its
seconds since the first driver began, and problems. A driver writes the wall clock,
which may be set at any time, and the monotonic clock, which never jumps but restarts
when its host boots. So the monotonic clock is used during the life of a driver, and
between two drivers in the same boot of one host. Otherwise the wall clock is used, also
for old events without a monotonic clock.
"""

import dataclasses
from collections.abc import Sequence

from mjax.observe.events import Event

BEGAN = "launch"
"""Kind of a driver's first event, which gives the age of the process and the boot id of
its host."""
_JUMP_S = 1.0
"""Smallest reported difference between the two clocks. NTP slews smaller errors."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """An event, and when it happened in seconds since the run began."""

    event: Event
    at_s: float
    began_s: float
    """For `launch`: when the driver's process began, but not before the preceding
    event. For all other events: `at_s`."""

    def place_s(self, monotonic_s: float | None) -> float | None:
        """Convert a time of the driver's monotonic clock to the scale of `at_s`."""
        if monotonic_s is None or self.event.monotonic_ns is None:
            return None
        return self.at_s - (self.event.monotonic_ns / 1e9 - monotonic_s)


def timed(events: Sequence[Event]) -> tuple[list[Timed], list[str]]:
    """Put events on one clock.

    Args:
      events: at least one.
    Returns:
      the events, and problems with their clocks and numbers, for people.
    """
    found: list[Timed] = []
    problems: list[str] = []
    first = events[0].number
    if first is not None and first > 1:
        problems.append(
            f"events.jsonl begins with event {first}: earlier time is not counted"
        )
    boot = None
    for event in events:
        age_s = 0.0
        is_new, boot_before = event.kind == BEGAN, boot
        if is_new:
            age_s = _number(event.data.get("age_s"))
            boot = event.data.get("boot")
        if not found:
            found.append(Timed(event=event, at_s=age_s, began_s=0.0))
            continue
        before = found[-1]
        problems += _missing(before.event, event)
        is_one_clock = not is_new or (boot is not None and boot == boot_before)
        at_s = before.at_s + _between_s(before.event, event, is_one_clock, problems)
        began_s = max(before.at_s, at_s - age_s)
        found.append(Timed(event=event, at_s=at_s, began_s=began_s))
    return found, problems


def _number(value: object) -> float:
    """Return a number of seconds from the event's data; 0 if absent."""
    return max(0.0, float(value)) if isinstance(value, int | float) else 0.0


def _missing(before: Event, event: Event) -> list[str]:
    """Describe the events that are missing between two events."""
    if before.number is None or event.number is None:
        return []
    num_missing = event.number - before.number - 1
    if num_missing <= 0:
        return []
    return [
        f"events.jsonl has no event {before.number + 1}"
        + (f" to {event.number - 1}" if num_missing > 1 else "")
        + ": what they recorded is not counted"
    ]


def _between_s(
    before: Event, event: Event, is_one_clock: bool, problems: list[str]
) -> float:
    """Return the seconds between two events, not below 0."""
    wall_s = (event.time_ns - before.time_ns) / 1e9
    if is_one_clock and None not in (before.monotonic_ns, event.monotonic_ns):
        assert before.monotonic_ns is not None
        assert event.monotonic_ns is not None
        seconds = (event.monotonic_ns - before.monotonic_ns) / 1e9
        if seconds >= 0:
            if abs(wall_s - seconds) > _JUMP_S:
                problems.append(
                    f"the wall clock of the driver jumped by {wall_s - seconds:+.1f} s "
                    f"before event {event.number}: its monotonic clock is used"
                )
            return seconds
    if wall_s < 0:
        problems.append(
            f"the wall clock of the driver went back by {-wall_s:.1f} s before the "
            f"event {event.kind} of generation {event.generation}: the time between is "
            "unknown and counts as 0"
        )
    return max(0.0, wall_s)
