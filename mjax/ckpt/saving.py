"""Stage 2 of a save: from host memory to the store, in the background.

Each process has one thread for this. Orbax writes, checks and commits the host copy
(`orbax_save`). The thread adds retries and retention. If an attempt fails, the folder
is deleted and the same host copy is written again after a pause, until an attempt
succeeds or a newer copy replaces it. Older steps are deleted after a newer step is
committed. Process 0 decides whether there is another attempt, and tells the other
processes.
"""

import concurrent.futures.thread
import contextlib
import dataclasses
import queue
import sys
import threading
import time
from collections.abc import Callable, Collection, Container
from typing import Any

from mjax.ckpt.config import Retention
from mjax.ckpt.job import PHASES, Job, Progress
from mjax.ckpt.phases import EXPECTED, FailedError, Phases, in_words
from mjax.ckpt.store import Store
from mjax.processes.agreement import Agreement

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_POLL_S = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """Outcome of one attempt to save, on process 0; messages call it a try."""

    step: int
    save_id: str
    number: int
    """Number of the attempt: 1 for the first attempt of a job."""
    error: str | None
    """Why the attempt failed; None if the step is saved."""
    pause_s: float | None
    """Seconds until the next attempt; None if there is none."""
    is_last: bool
    """Whether the run takes no more steps, and waits for this save."""
    write_s: float
    """Seconds from the creation of the folder to its final rename."""
    checksum_s: float
    """Part of write_s that process 0 spent on the checksums of its host copy."""
    read_back_s: float
    """Part of write_s that process 0 spent on reading its part back."""
    num_bytes: int
    """Bytes of all arrays, over all processes."""
    removed: tuple[int, ...] = ()
    """Older steps that were deleted after this step was committed."""
    warning: str | None = None
    """Problem after the step was saved, for example an older step that could not be
    deleted; None if there was none."""

    @property
    def metrics(self) -> dict[str, int | float]:
        """Fields for the next row of metrics; empty if the step is not saved."""
        return {
            "ckpt_step": self.step,
            "ckpt_write_s": self.write_s,
            "ckpt_write_gb_per_s": self.num_bytes / self.write_s / 1e9,
        }

    def describe(self) -> str:
        """Return the outcome as a line of text."""
        if self.error is not None:
            then = "it is given up"
            if self.pause_s is not None:
                meanwhile = "the run waits" if self.is_last else "training goes on"
                then = f"next try in {self.pause_s:.0f} s; {meanwhile}"
            return (
                f"warning: checkpoint {self.step} was not saved (try {self.number}): "
                f"{self.error}; {then}"
            )
        tries = f", at try {self.number}" if self.number > 1 else ""
        removed = "".join(f", {step}" for step in self.removed)[2:]
        warning = f"; warning: {self.warning}" if self.warning else ""
        return (
            f"checkpoint {self.step} saved: {self.num_bytes / 1e6:.1f} MB in "
            f"{self.write_s:.2f} s{tries}{'; removed ' + removed if removed else ''}"
            f"{warning}"
        )


class Writer:
    """The background thread of one process; all processes make the same calls."""

    def __init__(
        self,
        store: Store,
        retention: Retention,
        agreement: Agreement,
        *,
        refused: Callable[[], Container[tuple[int, str]]],
        held: Callable[[], Collection[int]] = tuple,
        timeout_s: int,
    ) -> None:
        """Start the thread.

        Orbax is imported here, before the run's first step. So a broken installation is
        found at once, and the first save need not wait for the import.

        Args:
          store: folder of the steps.
          retention: rules for keeping older steps.
          agreement: agreement of the writers of all processes, see `open_agreement`.
          refused: returns (step, save id) of the steps that must not be restored.
          held: returns the steps that must not be deleted for now.
          timeout_s: time after which an attempt fails if a process does not answer.
        """
        from mjax.ckpt import orbax_save

        self._save_once = orbax_save.save_once
        self._remove_unfinished = orbax_save.remove_unfinished
        self.attempts: queue.SimpleQueue[Attempt] = queue.SimpleQueue()
        """Outcomes of attempts, on process 0."""
        self.saved_step: int | None = None
        """The last step that was committed, or that the run resumed from."""
        self._store, self._retention, self._agreement = store, retention, agreement
        self._refused, self._held, self._timeout_s = refused, held, timeout_s
        self._rank = agreement.rank
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._num_jobs = 0
        self._is_writing = False
        self._since_s = 0.0
        self._told_s = 0
        self._lock = threading.Lock()
        self._superseded = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._work, name="mjax-ckpt-writer", daemon=True
        )
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """Whether process 0 is writing, rather than pausing between two attempts."""
        return self._is_writing

    @property
    def is_stalled(self) -> bool:
        """Whether the attempt of process 0 has lasted longer than the time limit."""
        return self._is_writing and time.monotonic() - self._since_s > self._timeout_s

    def claim(self) -> bool:
        """Prevent another attempt of process 0; return False if one is in progress.

        After True, a newer job may be submitted without waiting for a store.
        """
        with self._lock:
            if not self._is_writing:
                self._superseded.set()
            return not self._is_writing

    def _begin_try(self) -> bool:
        """Begin an attempt unless the job is superseded; return whether it began."""
        with self._lock:
            self._is_writing = not self._superseded.is_set()
            self._since_s = time.monotonic()
            return self._is_writing

    def submit(self, job: Job) -> None:
        """Queue a job; on process 0 the previous job must be done, see `wait`.

        Another process may still wait for a store that process 0 has given up on. That
        process begins the job when the store answers.
        """
        assert self._rank != 0 or self._is_idle.is_set()
        self._raise_failure()
        self._superseded.clear()
        self._begin_try()
        with self._lock:
            self._num_jobs += 1
            self._is_idle.clear()
        self._jobs.put(job)

    def supersede(self) -> None:
        """Make process 0 give up the current job at its next pause."""
        self._superseded.set()

    def wait(self, timeout_s: int | float | None = None) -> bool:
        """Wait until the last job is saved or given up; return False on timeout."""
        done = self._is_idle.wait(timeout_s)
        self._raise_failure()
        return done

    def wait_unless_hung(self, hung_s: int | float) -> bool:
        """Call `poll` until the last job is over; return False if the store hangs."""
        while (is_over := self.poll(hung_s)) is None:
            pass
        return is_over

    def poll(self, hung_s: int | float) -> bool | None:
        """Wait a second, on process 0, for the end of the last job.

        An attempt that takes longer than the time limit is reported on stderr.

        Args:
          hung_s: seconds of one attempt after which the store counts as hung.
        Returns:
          True if the last job is saved or given up; False if the store hangs, and the
          job is then unfinished; None otherwise.
        """
        if self.wait(_POLL_S):
            return True
        lasted_s = time.monotonic() - self._since_s if self._is_writing else 0.0
        if lasted_s > hung_s:
            return False
        if lasted_s <= self._told_s:
            self._told_s = 0  # a new attempt has begun
        if lasted_s > self._told_s + self._timeout_s:
            self._told_s += self._timeout_s
            _warn(f"a write has not ended after {self._told_s} s; still waiting for it")
        return None

    def close(self) -> None:
        """Stop after the current job, without waiting for a store that hangs."""
        self._jobs.put(None)
        self._thread.join(_LONGEST_PAUSE_S)
        if self._thread.is_alive():
            _leave_executors()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"the thread that writes checkpoints has died: {self._failure!r}"
            ) from self._failure

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._save(job)
            except BaseException as error:  # `wait` raises any error
                self._failure = error
            self._is_writing = False
            with self._lock:
                self._num_jobs -= 1
                if not self._num_jobs:
                    self._is_idle.set()

    def _save(self, job: Job) -> None:
        """Repeat attempts until the job is saved, given up or superseded."""
        pause_s = _FIRST_PAUSE_S
        for number in range(1, 1 << 30):
            phases = Phases(self._agreement, PHASES, timeout_s=self._timeout_s)
            is_last = number == job.max_attempts
            attempt = self._try(job, phases, number, None if is_last else pause_s)
            if self._rank == 0:
                goes_on = self._lead_on(attempt, phases)
            else:
                decision = phases.close()
                goes_on = decision["again"]
                if decision["saved"]:
                    self.saved_step = job.step
            if not goes_on:
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _try(
        self, job: Job, phases: Phases, number: int, pause_s: float | None
    ) -> Attempt:
        """Write, read back and commit once, through Orbax; return the outcome."""
        begun_s = time.perf_counter()
        progress, error, bug = Progress(), None, None
        try:
            self._save_once(job, self._store, phases, progress)
        except FailedError as problem:
            error, bug = str(problem), problem.__cause__
            pause_s = None if problem.is_final else pause_s
        except BaseException as problem:  # raised here only, between two phases
            error, bug = phases.fail(problem), problem
        if bug is not None and not isinstance(bug, EXPECTED):
            phases.close({"saved": False, "again": False})
            raise bug
        if error and self._rank == 0:
            self._remove_unfinished(progress)
        return Attempt(
            step=job.step,
            save_id=job.save_id,
            number=number,
            error=error,
            pause_s=pause_s if error else None,
            is_last=job.max_attempts is not None,
            write_s=time.perf_counter() - begun_s,
            checksum_s=progress.checksum_s,
            read_back_s=progress.read_back_s,
            num_bytes=job.num_bytes,
        )

    def _lead_on(self, attempt: Attempt, phases: Phases) -> bool:
        """Report an attempt, on process 0; return whether there is another one."""
        if attempt.error is None:
            self.saved_step = attempt.step
            phases.close({"saved": True, "again": False})
            attempt = self._pruned(attempt)
        self._is_writing = False
        self.attempts.put(attempt)
        if attempt.error is None:
            return False
        goes_on = False
        if attempt.pause_s is not None:
            self._superseded.wait(attempt.pause_s)
            goes_on = self._begin_try()
        phases.close({"saved": False, "again": goes_on})
        return goes_on

    def _pruned(self, attempt: Attempt) -> Attempt:
        """Delete steps that no rule keeps; return the attempt with their numbers."""
        try:
            removed = self._store.prune(
                self._retention,
                newest=attempt.step,
                refused=self._refused(),
                held=self._held(),
            )
        except OSError as problem:
            return dataclasses.replace(attempt, warning=in_words(problem))
        return dataclasses.replace(attempt, removed=tuple(removed))


def _leave_executors() -> None:
    """Let the program exit although a store hangs.

    Orbax writes its metadata on threads of asyncio's executor. These threads are
    daemons, like the thread that started them, but Python waits for every executor at
    exit.
    """
    queues: Any = concurrent.futures.thread._threads_queues
    for thread in [*queues]:
        if thread.daemon:
            queues.pop(thread, None)


def _warn(text: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be closed
        print(f"warning: {text}", file=sys.stderr, flush=True)
