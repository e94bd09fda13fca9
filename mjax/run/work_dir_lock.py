"""Refuse a work dir in which another process of this host trains.

Input: the work dir. Output: its lock, held by process 0 until the run ends; or an error
that names the process that trains there and its step, and says how to stop it.
docs/resilience.md says which starts are refused.
"""

from pathlib import Path
from typing import Self

from mjax.observe import beats
from mjax.processes import lock
from mjax.processes.lock import Holder, Lock


class WorkDirLock:
    """The lock of a run's work dir. Only process 0 calls its methods.

    Use it in a with statement, which releases the lock at its end.
    """

    def __init__(self, launch: str, generation: int) -> None:
        """Begin without a lock.

        Args:
          launch: name of the launch that started this process; "" if there is none.
          generation: generation of the launch; 0 without one.
        """
        self._ours = lock.this_process(launch, generation)
        self._lock: Lock | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._lock is not None:
            self._lock.release()

    def check(self, work_dir: Path) -> None:
        """Refuse a work dir that another process holds; create and hold nothing.

        Raises:
          ValueError: another process of this host trains there, or drives a launch.
        """
        self._check_driver(work_dir)
        self._refuse(work_dir, lock.holder_of(work_dir / lock.TRAINING))

    def take(self, work_dir: Path) -> None:
        """Take the lock of a work dir that exists; call again if it was replaced.

        Raises:
          ValueError: as in `check`.
        """
        self._check_driver(work_dir)
        self._lock = self._lock or Lock(work_dir / lock.TRAINING)
        self._refuse(work_dir, self._lock.take(self._ours))

    def _check_driver(self, work_dir: Path) -> None:
        if not self._ours.launch:
            lock.refuse_driver(work_dir)

    def _refuse(self, work_dir: Path, found: Holder | None) -> None:
        if found is None or self._ours.replaces(found):
            return
        # An old generation that begins late is refused by `mjax.ckpt.fence`.
        if not self._ours.launch or found.launch != self._ours.launch:
            step = _step_of(work_dir, found)
            raise ValueError(lock.problem_of_training(work_dir, found, step))


def _step_of(work_dir: Path, found: Holder) -> int | None:
    """Return the last step in the heartbeats of a process; None if it has none."""
    newest: beats.Beat | None = None
    for path in (work_dir / beats.FOLDER).glob("*.json"):
        try:
            beat = beats.read(path)
        except ValueError:  # unreadable: the message then lacks the step
            continue
        if beat is None or (beat.whose.pid, beat.whose.boot) != (found.pid, found.boot):
            continue
        if newest is None or beat.wall_ns > newest.wall_ns:
            newest = beat
    return None if newest is None else newest.step
