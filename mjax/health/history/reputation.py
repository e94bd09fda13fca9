"""The reputation of hosts, from their events.

Input: a history of hosts. Output: a score for each host, an order with the healthiest
host first, and whether a bad host may be used again.

score(host, now) = sum over its events of weight * share * 2^(-(now - time) / half-life)

The weights are from `events`: a fault that names the hardware has the largest weight. A
score decays with time; a passed test does not lower it. Source of the idea: Imbue,
"From bare metal to a 70B model" (imbue.com/research/70b-infrastructure): about 3% of
the hosts fail per week, a few of them repeatedly, and known good hosts are kept in
reserve.
"""

import dataclasses
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from mjax.health.history.events import HostEvent, Kind
from mjax.health.history.store import History

HALF_LIFE_DAYS = 28.0
"""Days after which the weight of a fault has halved. At 3% a week, a host fails once in
33 weeks by chance. A host that fails twice in a month stands out, and a fault of half a
year ago has a hundredth of its weight."""
_DAY_NS = 24 * 3600 * 10**9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Standing:
    """The reputation of a host."""

    host: str
    score: float
    """Sum of decayed weights; 0: no fault is known."""
    why_not: str
    """Why the host may not be used; empty if it may."""
    has_burned: bool
    """Whether the host passed a burn after its last fault."""
    num_faults: int
    last_fault_ns: int | None = None


class Reputation:
    """The history of hosts, and its scores."""

    def __init__(self, path: Path, *, half_life_days: float = HALF_LIFE_DAYS) -> None:
        """Open a history, and create it if absent; raises as `History`.

        Args:
          path: path of the SQLite file, on a disk of this machine.
          half_life_days: time after which the weight of an event is halved.
        """
        if not 0.0 < half_life_days < float("inf"):
            raise ValueError(
                f"--half-life-days must be positive, got {half_life_days:g}"
            )
        self._half_life_ns = half_life_days * _DAY_NS
        self._history = History(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the history."""
        self._history.close()

    def record(self, event: HostEvent) -> bool:
        """Record an event; return whether it is new."""
        return self._history.add([event]) == 1

    def record_all(self, events: Iterable[HostEvent]) -> int:
        """Record events; return how many are new."""
        return self._history.add(events)

    def events(self, host: str | None = None) -> list[HostEvent]:
        """Return the events of a host, or of all, oldest first."""
        return self._history.events(host)

    def hosts(self) -> list[str]:
        """Return all hosts with an event, by name."""
        return self._history.hosts()

    def score(self, host: str, now_ns: int | None = None) -> float:
        """Return the score of a host; 0 if no fault is known.

        Args:
          host: its name.
          now_ns: time since the epoch; None: now. Events after it have full weight.
        """
        now_ns = time.time_ns() if now_ns is None else now_ns
        return score_of(self.events(host), now_ns, self._half_life_ns)

    def why_not(self, host: str) -> str:
        """Return why a host may not be used; empty if it may."""
        return why_not(self.events(host))

    def may_return(self, host: str) -> bool:
        """Return whether a host may be used; after a fault, it must pass a burn."""
        return not self.why_not(host)

    def standings(
        self, hosts: Sequence[str] | None = None, now_ns: int | None = None
    ) -> list[Standing]:
        """Return the reputation of hosts, in the given order; None: all, by name."""
        now_ns = time.time_ns() if now_ns is None else now_ns
        names = self.hosts() if hosts is None else hosts
        return [
            standing(name, self.events(name), now_ns, self._half_life_ns)
            for name in names
        ]

    def order(self, hosts: Sequence[str], now_ns: int | None = None) -> list[str]:
        """Return hosts, healthiest first.

        Hosts that may not be used come last. Otherwise the score decides, then whether
        the host has passed a burn, then the given order.
        """
        found = self.standings(hosts, now_ns)
        # sorted() is stable.
        found.sort(key=lambda one: (bool(one.why_not), one.score, not one.has_burned))
        return [one.host for one in found]


def score_of(events: Iterable[HostEvent], now_ns: int, half_life_ns: float) -> float:
    """Return the decayed sum of the weights of events of one host."""
    return sum(
        (
            event.weight * 2.0 ** (-max(0, now_ns - event.time_ns) / half_life_ns)
            for event in events
        ),
        0.0,
    )


def why_not(events: Sequence[HostEvent]) -> str:
    """Return why a host may not be used; empty if it may.

    A burn clears the host if it began after the last event that requires one.

    Args:
      events: events of one host, in any order.
    """
    bad = [event for event in events if event.meaning.must_burn]
    if not bad:
        return ""
    last = max(bad, key=lambda event: event.time_ns)
    if _burned_after(events, last.time_ns):
        return ""
    what = f"{last.kind.value}: {last.cause}" if last.cause else last.kind.value
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(last.time_ns / 1e9))
    return f"{what} at {when} UTC, and no passed burn that began after it"


def standing(
    host: str, events: Sequence[HostEvent], now_ns: int, half_life_ns: float
) -> Standing:
    """Return the reputation of one host."""
    times = [event.time_ns for event in events if event.weight > 0.0]
    last = max(times, default=None)
    return Standing(
        host=host,
        score=score_of(events, now_ns, half_life_ns),
        why_not=why_not(events),
        has_burned=_burned_after(events, -1 if last is None else last),
        num_faults=len(times),
        last_fault_ns=last,
    )


def _burned_after(events: Iterable[HostEvent], time_ns: int) -> bool:
    """Return whether a passed burn began after a time."""
    return any(
        (event.time_ns if event.started_ns is None else event.started_ns) > time_ns
        for event in events
        if event.kind is Kind.BURN_PASSED
    )
