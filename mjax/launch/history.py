"""The history of hosts, as the driver of one run uses it.

Input: the events of this run, and a file that several runs share. Output: a score for
each host; the spare with the lowest score is used first. Reading may wait for other
runs or a disk, so the driver reads in a thread and uses the last scores. If the file
becomes unusable during the run, one event reports this.
"""

from collections.abc import Callable
from pathlib import Path

from mjax.health.history import run_events
from mjax.health.history.reputation import Reputation
from mjax.launch.events import Event

_KINDS = ("failure", "evict", "check", "host", "log")
"""Kinds of events that may change a score."""


class HostHistory:
    """Reads and writes the file, and keeps the latest scores."""

    def __init__(self, path: Path, events: Path, tell: Callable[..., None]) -> None:
        """Open the file; create it if absent.

        Args:
          path: the SQLite file.
          events: path of events.jsonl of the run.
          tell: records an event, see `events.teller`.
        Raises:
          ValueError: the file is damaged or is not a history.
          RuntimeError: another process locks the file for too long.
        """
        self._reputation = Reputation(path)
        self._events, self._tell = events, tell
        self._scores: dict[str, float] = {}
        self.is_current = self._has_failed = False
        """Whether no event since the last `read` may change a score."""
        self._update()

    def note(self, event: Event) -> None:
        """Mark the scores as outdated if the event may change them."""
        if event.kind in _KINDS:
            self.is_current = False

    def score(self, host: str) -> float:
        """Return the last known score of a host; 0 if it has no known fault."""
        return self._scores.get(host, 0.0)

    def close(self) -> None:
        """Record the new events and close the file."""
        self.read()
        self._reputation.close()

    def read(self) -> None:
        """Record the new events and compute the scores; may wait for other runs."""
        try:
            self._update()
        except (ValueError, RuntimeError, OSError) as error:
            if not self._has_failed:
                self._has_failed = True
                self._tell("history", f"no history of hosts: {error}", "warning")

    def _update(self) -> None:
        if self._events.exists():
            found = run_events.read(self._events, run_events.Counts())
            self._reputation.record_all(found)
        self._scores = {one.host: one.score for one in self._reputation.standings()}
