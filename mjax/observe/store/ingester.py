"""Write batches to a store as rows, each exactly once.

Input: batches from any number of threads. Output: transactions of the store, and an
outcome for each batch after its commit. Waiting batches share a transaction.
"""

import concurrent.futures
import queue
import threading
import time
from collections.abc import Sequence

from mjax.observe.store.base import ConflictError, Store, StoreGoneError
from mjax.observe.store.batches import Batch, Mark, Outcome, outcome
from mjax.observe.store.plan import PROCESS_COLUMNS, Known, Plan

_MAX_TOGETHER = 64
"""Maximum number of batches in a transaction. 64 times 2,000 lines of 10 spans take 1
s."""
_Job = tuple[Sequence[Batch], "concurrent.futures.Future[list[Outcome]]"]


class Ingester:
    """Writes batches to a store, in its own thread."""

    def __init__(self, store: Store) -> None:
        """Read the marks of the store and start the thread."""
        self._store = store
        self._lock = threading.Lock()
        self._known = self._read_known()
        self._is_stale = False
        self._refused: dict[tuple[str, str], str] = {}
        self._behind: dict[str, tuple[int, float]] = {}
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="ingester", daemon=True)
        self._thread.start()

    def submit(
        self, batches: Sequence[Batch]
    ) -> "concurrent.futures.Future[list[Outcome]]":
        """Queue batches; the future is done when they are committed.

        The future raises StoreGoneError if the database cannot be written. Then none of
        these batches is stored, and they may be sent again.
        """
        future: concurrent.futures.Future[list[Outcome]] = concurrent.futures.Future()
        self._jobs.put((batches, future))
        return future

    def marks(self, run: str, sources: Sequence[str]) -> list[Mark]:
        """Return the marks of these files; unknown files are absent."""
        with self._lock:
            found = [self._known.marks.get((run, source)) for source in sources]
        return [mark for mark in found if mark is not None]

    def refused(self, run: str, sources: Sequence[str]) -> dict[str, str]:
        """Return the reasons why bytes of these files were refused."""
        found = [(source, self._refused.get((run, source))) for source in sources]
        return {source: reason for source, reason in found if reason is not None}

    def note_behind(self, collector: str, behind_bytes: int) -> None:
        """Record the number of bytes that a collector has not sent yet."""
        with self._lock:
            self._behind[collector] = behind_bytes, time.monotonic()

    def behind(self) -> dict[str, tuple[int, float]]:
        """Return the unsent bytes of each collector, and the age of its report in s."""
        now = time.monotonic()
        with self._lock:
            return {name: (size, now - at) for name, (size, at) in self._behind.items()}

    def close(self) -> None:
        """Commit the queued batches and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while True:
            jobs, is_last = self._next_jobs()
            if jobs:
                self._settle(jobs)
            if is_last:
                return

    def _next_jobs(self) -> tuple[list[_Job], bool]:
        """Wait for a job; return it with all queued jobs, and whether to end then."""
        jobs: list[_Job] = []
        job = self._jobs.get()
        while job is not None:
            jobs.append(job)
            if sum(len(batches) for batches, _ in jobs) >= _MAX_TOGETHER:
                return jobs, False
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return jobs, False
        return jobs, True

    def _settle(self, jobs: Sequence[_Job]) -> None:
        """Write jobs in one transaction, or separately if a value is refused."""
        try:
            found = self._write([batch for batches, _ in jobs for batch in batches])
        except ValueError as error:
            if len(jobs) > 1:
                for job in jobs:
                    self._settle([job])
                return
            batches, future = jobs[0]
            one_by_one = self._one_by_one(batches, str(error))
            self._note(one_by_one)
            future.set_result(one_by_one)
            return
        except Exception as error:  # passed on to the waiting caller, for the collector
            for _, future in jobs:
                future.set_exception(error)
            return
        position = 0
        for batches, future in jobs:
            self._note(found[position : position + len(batches)])
            future.set_result(found[position : position + len(batches)])
            position += len(batches)

    def _one_by_one(self, batches: Sequence[Batch], reason: str) -> list[Outcome]:
        if len(batches) == 1:
            (batch,) = batches
            return [outcome(batch, self._mark(batch), "refused", reason)]
        found = []
        for batch in batches:
            try:
                found += self._write([batch])
            except ValueError as error:
                found += self._one_by_one([batch], str(error))
            except (StoreGoneError, ConflictError) as error:
                found.append(outcome(batch, self._mark(batch), "gap", str(error)))
        return found

    def _note(self, outcomes: Sequence[Outcome]) -> None:
        for found in outcomes:
            if found.verdict == "refused":
                self._refused[found.run, found.source] = found.reason
            elif found.verdict == "stored":
                self._refused.pop((found.run, found.source), None)

    def _mark(self, batch: Batch) -> Mark | None:
        marks = self.marks(batch.run, [batch.source])
        return marks[0] if marks else None

    def _write(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Write batches in one transaction, then keep their marks."""
        if self._is_stale:
            known = self._read_known()
            with self._lock:
                self._known, self._is_stale = known, False
        plan = Plan(self._known)
        for batch in batches:
            plan.add(batch)
        if plan.after:
            try:
                self._store.write(plan.changes())
            except (ConflictError, StoreGoneError):
                # The commit may have succeeded: read the marks before the next write.
                self._is_stale = True
                raise
            with self._lock:
                self._known.learn(plan)
        return plan.outcomes

    def _read_known(self) -> Known:
        """Read marks and headers from the database."""
        columns = ", ".join(PROCESS_COLUMNS)
        processes = self._store.query(f"select {columns} from processes")
        return Known(self._store.marks(), processes)
