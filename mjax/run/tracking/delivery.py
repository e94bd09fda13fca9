"""Send rows to a tracker from a thread, so that no tracker stops or slows a run.

Input: rows, at the pace of the run. Output: calls of a `Tracker`, in order, at the pace
of the tracker; and `tracking/NAME.json` in the work dir with the last step sent, for
trackers that cannot remove steps.

The queue is bounded: when it is full, new rows are dropped and counted. A call that
raises (even SystemExit) is repeated, with pauses that double. A row that fails `_TRIES`
times is dropped, so that one bad value does not block the following rows. The first
failure is reported at once, and the number of dropped rows at the end.
"""

import collections
import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mjax import checked_json
from mjax.run.tracking.tracker import Config, RunFacts, Tracker

MAX_QUEUED = 10_000
"""Maximum number of queued rows. At about 1 kB per row, a full queue takes 10 MB."""
_TRIES = 3
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1.0, 60.0


_left_behind: list[str] = []
"""Names of trackers that had not finished when the run ended."""


def left_behind() -> bool:
    """Return whether a tracker is still busy after the run stopped waiting for it.

    The library of the tracker may wait for it at interpreter exit; wandb waits for over
    a minute.
    """
    return bool(_left_behind)


class _Row(NamedTuple):
    step: int
    metrics: Mapping[str, float]


class Delivery:
    """One tracker and its queue. The loop's thread calls the methods."""

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        run: RunFacts,
        config: Config,
        say: Callable[[str], None],
        *,
        max_queued: int = MAX_QUEUED,
        first_pause_s: float = _FIRST_PAUSE_S,
    ) -> None:
        """Start to send.

        Args:
          name: name of the tracker in messages and in its file name.
          tracker: the tracker; one thread uses it.
          run: identifies the run.
          config: all fields of the run's config, as JSON values.
          say: prints a line; may be called from any thread.
          max_queued: maximum number of rows in the queue.
          first_pause_s: seconds to pause after the first failure; each later pause is
            twice as long, up to a minute.
        """
        self._name, self._tracker, self._say = name, tracker, say
        self._run, self._config = run, config
        self._max_queued, self._first_pause_s = max_queued, first_pause_s
        folder = run.work_dir / "tracking"
        self._path = folder / f"{name}.json"
        self._changed = threading.Condition()
        self._rows: collections.deque[_Row] = collections.deque()
        self._ending: str | None = None
        self._given_up = False
        self._is_failing = False
        self._has_told = False
        self._num_dropped = 0
        self._sent_step = 0
        self._done = threading.Event()
        threading.Thread(target=self._work, name=f"track-{name}", daemon=True).start()

    def send(self, row: Mapping[str, Any]) -> None:
        """Queue a row of metrics.jsonl; drop it if the queue is full.

        Args:
          row: `step` and numbers; None values are omitted.
        """
        metrics = {
            name: value
            for name, value in row.items()
            if name != "step" and isinstance(value, (int, float))
        }
        with self._changed:
            if len(self._rows) < self._max_queued:
                self._rows.append(_Row(row["step"], metrics))
                self._changed.notify()
            else:
                self._num_dropped += 1

    def end(self, ending: str) -> None:
        """Mark the end of the rows; the thread continues with the queue.

        Args:
          ending: see `Tracker.finish`.
        """
        with self._changed:
            self._ending = ending
            self._changed.notify()

    def finish(self, ending: str, *, patience_s: float) -> None:
        """Send the queued rows and end the tracker; report lost rows.

        This does not wait for a failing tracker.

        Args:
          ending: see `Tracker.finish`.
          patience_s: maximum seconds to wait.
        """
        until_s = time.monotonic() + patience_s
        self.end(ending)
        while not self._done.wait(0.02) and time.monotonic() < until_s:
            if self._is_failing:
                break
        with self._changed:
            self._given_up = True
            num_lost = self._num_dropped + len(self._rows)
            self._changed.notify()
        if not self._done.is_set():
            _left_behind.append(self._name)
        if num_lost:
            self._say(
                f"warning: {self._name}: {num_lost} rows were not sent; metrics.jsonl "
                "has all of them"
            )
        elif not self._done.is_set():
            self._say(
                f"warning: {self._name} has all rows, but did not record in time that "
                "this start of the run has ended"
            )

    # ------------------------------------------------------------- on its own thread

    def _work(self) -> None:
        if self._until_it_works(self._start):
            while (row := self._next()) is not None:
                self._deliver(row)
            if not self._given_up:
                self._until_it_works(
                    lambda: self._tracker.finish(self._ending or "failed"), _TRIES
                )
        self._done.set()

    def _start(self) -> None:
        self._tracker.start(self._run, self._config)
        if not self._tracker.takes_back:
            self._sent_step = _sent_step(self._path, self._run.id)
            if self._sent_step > self._run.start_step:
                self._say(
                    f"{self._name}: steps {self._run.start_step + 1} to "
                    f"{self._sent_step} were sent before the run went back to a "
                    "checkpoint and are not sent again; metrics.jsonl has the new rows"
                )

    def _next(self) -> _Row | None:
        """Wait for a row; None at the end."""
        with self._changed:
            while not self._rows and self._ending is None and not self._given_up:
                self._changed.wait()
            if self._given_up or not self._rows:
                return None
            return self._rows[0]

    def _deliver(self, row: _Row) -> None:
        """Send the first row of the queue, then remove it."""
        is_new = row.step > self._sent_step or row.step == self._run.start_step
        is_sent = True
        if is_new:
            if row.step > self._sent_step and not self._tracker.takes_back:
                self._note(row.step)
            is_sent = self._until_it_works(
                lambda: self._tracker.scalars(row.step, row.metrics), _TRIES
            )
        with self._changed:
            if not self._given_up:
                self._rows.popleft()
                self._num_dropped += not is_sent

    def _note(self, step: int) -> None:
        """Record a step before sending it, so a kill may lose but never repeat it."""
        self._sent_step = step
        temporary = self._path.with_suffix(".tmp")
        # Written once per step, without fsync. If the disk is full, a restart does not
        # know which step was sent last.
        with contextlib.suppress(OSError):
            temporary.parent.mkdir(exist_ok=True)
            temporary.write_text(json.dumps({"run": self._run.id, "step": step}))
            temporary.replace(self._path)

    def _until_it_works(
        self, action: Callable[[], None], tries: int | None = None
    ) -> bool:
        """Repeat an action while it raises; return whether it succeeded in the end."""
        pause_s, num_tried = self._first_pause_s, 0
        while not self._given_up:
            try:
                action()
            except (
                Exception,
                SystemExit,
            ) as error:  # a library may raise any exception
                self._is_failing = True
                self._tell(error)
            else:
                self._is_failing = False
                return True
            num_tried += 1
            if num_tried == tries:
                return False
            with self._changed:
                self._changed.wait_for(lambda: self._given_up, pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        return False

    def _tell(self, error: Exception | SystemExit) -> None:
        if not (self._has_told or self._given_up):
            self._has_told = True
            first = str(error).strip().partition("\n")[0]
            self._say(
                f"warning: {self._name} does not accept the metrics; training "
                f"continues and the call is repeated: {type(error).__name__}: {first}"
            )


def _sent_step(path: Path, run_id: str) -> int:
    """Return the last step sent for a run; 0 if none."""
    try:
        found = checked_json.read(path.read_bytes(), dict[str, str | int])
        return int(found["step"]) if found["run"] == run_id else 0
    except (OSError, ValueError, KeyError):  # absent or damaged
        return 0
