"""Save and restore the training state.

Input: a state (any pytree of arrays) with JSON metadata of the run. Output: one folder
per saved step. The state is stored as a flat mapping from the path of a leaf
(`params.embed.table`) to its global array. So the data on disk depend only on names and
shapes, not on the mesh, the number of processes or container classes.

Saving has two stages: the copy to host memory, for which training waits
(`host_copy`), and the writing in the background (`saving`). Restoring uses the newest
step whose bytes all match their checksums (`saved_step`, `placing`); damaged steps are
put aside. With --ckpt.remote each step is then copied to an object store (`remote`).
docs/checkpoints.md lists the guarantees.
"""

import contextlib
import dataclasses
import enum
import hashlib
import queue
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxtyping import PyTree

from mjax.ckpt.config import CkptConfig
from mjax.ckpt.fence import TakenOverError
from mjax.ckpt.host_copy import HostCopy, HostMemory
from mjax.ckpt.job import Job
from mjax.ckpt.journal import (
    SAVED,
    Journal,
    Records,
    new_save_id,
    origin_of,
    start_of,
)
from mjax.ckpt.local import LocalCopies, Offer
from mjax.ckpt.manifest import DamagedError, Manifest
from mjax.ckpt.phases import open_agreement
from mjax.ckpt.recovery import LostError, Recovery, Restored, Unfit, by_path
from mjax.ckpt.remote.link import Link
from mjax.ckpt.remote.uploader import Upload
from mjax.ckpt.saving import Attempt, Writer
from mjax.ckpt.store import Store
from mjax.processes.agreement import DAY_S, Agreement

_LAST_ATTEMPTS = 8  # attempts over about two minutes


class Answer(enum.Enum):
    """Answer to the question whether a step can be saved."""

    ACCEPTED = "accepted"
    """`save` may be called now."""
    BUSY = "busy"
    """The previous save is still being written; ask again at the next step."""
    HOPELESS = "hopeless"
    """The run should stop: saves have failed for too long, or another start of the run
    has claimed the store."""


class Checkpoints:
    """The saved steps of one run.

    Every process of the run makes the same calls in the same order.
    """

    def __init__(
        self,
        work_dir: Path,
        config: CkptConfig,
        unfit: Unfit = lambda step, run: "",
    ) -> None:
        """Open the folder of checkpoints, without creating or changing anything.

        Args:
          work_dir: work dir of the run, which contains the journal.
          config: location of the steps, and rules for keeping them.
          unfit: function that decides which steps the run must not use.
        """
        self._unfit = unfit
        self.store = Store(config.dir or work_dir / "checkpoints")
        self._config = config
        self._work_dir = work_dir
        self._journal = Journal(work_dir / "checkpoints.jsonl")
        self._agreement = Agreement("checkpoints", (LostError,), timeout_s=DAY_S)
        self._memory = HostMemory()
        self._copies: LocalCopies | None = None
        self._last_good_step = 0
        self._wanted_step: int | None = None
        self._error: str | None = None
        self._run_id: str | None = None
        self._last_start: int | None = None
        self._link: Link | None = None
        if config.remote is not None:
            self._link = Link(config, self.store, self._journal, self._agreement, unfit)
        self._writer = Writer(
            self.store,
            config.retention,
            open_agreement(),
            refused=self._journal.records,
            held=tuple if self._link is None else self._link.held,
            timeout_s=config.timeout_s,
        )

    # -------------------------------------------------------------------------- saving

    def ask(self, step: int, *, is_last: bool = False) -> Answer:
        """Return whether the state can be saved now; if ACCEPTED, call `save`.

        Args:
          step: number of optimizer steps in the state.
          is_last: whether the run ends after this save. The answer is then never BUSY,
            and HOPELESS only if another start has taken over the store.
        """
        return Answer(self._agreement.decide(lambda: self._answer(step, is_last).value))

    def _answer(self, step: int, is_last: bool) -> Answer:
        if self.is_taken_over:
            return Answer.HOPELESS
        if is_last:
            return Answer.ACCEPTED
        unsaved = step - self._last_good_step
        is_failing = self._error is not None or self._writer.is_stalled
        if self._fence_problem is not None:
            return Answer.HOPELESS
        if is_failing and unsaved > self._config.unsaved_limit:
            return Answer.HOPELESS
        return Answer.ACCEPTED if self._writer.claim() else Answer.BUSY

    def save(
        self,
        step: int,
        make_state: Callable[[], PyTree],
        run: Mapping[str, Any],
        *,
        is_last: bool = False,
    ) -> HostCopy | None:
        """Copy the state off the devices, and start writing it in the background.

        After the call the device buffers may be donated. The new copy replaces an older
        copy that could not be written yet.

        Args:
          step: number of optimizer steps in the state.
          make_state: returns the pytree of global arrays, with any sharding.
          run: JSON metadata of the state: config, data position, versions.
          is_last: whether to give up after a few attempts.
        Returns:
          The copy; None if the step is already saved, the store hangs, or the copy
          failed. `attempts` reports a failed copy.
        """
        save_id = self._agreement.decide(lambda: self._new_save_id(step))
        self._wanted_step = step
        if not save_id:
            return None
        copy, error = None, None
        try:
            copy = self._memory.copy(by_path(make_state()), replicas=False)
        except (RuntimeError, MemoryError) as problem:
            error = str(problem)
        self._writer.submit(
            Job(
                step=step,
                save_id=save_id,
                copy=copy or error or "no memory",
                run=dict(run),
                max_attempts=_LAST_ATTEMPTS if is_last else None,
            )
        )
        return copy

    def _new_save_id(self, step: int) -> str:
        """Wait for the previous save, on process 0; return an id for the new one.

        The result is "" if the step is already saved or the store hangs.
        """
        self._writer.supersede()
        if not self._writer.wait_unless_hung(self._config.hung_s):
            return ""
        if step == self._writer.saved_step:
            return ""
        self._run_id = self._run_id or self._find_run_id()
        with contextlib.suppress(OSError):  # retried at the next save
            self._journal.run_id(self._run_id)
        if self._last_start is None:
            self._last_start = self._find_last_start()
        seen = 0 if self._link is None else self._link.last_start
        return new_save_id(self._run_id, 1 + max(self._last_start, seen))

    def copy_is_due(self, step: int) -> bool:
        """Return whether `copy` must be called after this step."""
        return self._copies is not None and step % self._config.local_every == 0

    def copy(
        self, step: int, make_state: Callable[[], PyTree], run: Mapping[str, Any]
    ) -> None:
        """Copy the state of each process's devices to its host, see `local`.

        No copy is made while any process still writes the previous one. Arguments as in
        `save`.
        """
        copies = self._copies
        assert copies is not None
        ids = self._agreement.all_of("" if copies.is_writing else secrets.token_hex(8))
        if all(ids):
            offer = Offer(step=step, copy_id=ids[0])
            copies.save(offer, lambda: by_path(make_state()), run)

    def attempts(self) -> list[Attempt]:
        """Return attempts that ended since the last call; empty except on process 0.

        Also records them in the journal.

        Raises:
          RuntimeError: the background thread has failed.
        """
        self._writer.wait(0.0)
        ended: list[Attempt] = []
        while True:
            try:
                attempt = self._writer.attempts.get_nowait()
            except queue.Empty:
                return ended
            self._error = attempt.error
            if attempt.error is None:
                self._last_good_step = attempt.step
                attempt = self._noted(attempt)
                if self._link is not None:
                    self._link.notify()
            ended.append(attempt)

    def _noted(self, attempt: Attempt) -> Attempt:
        try:
            self._journal.write(SAVED, attempt.step, save_id=attempt.save_id)
        except OSError as error:
            return dataclasses.replace(attempt, warning=str(error))
        return attempt

    def uploads(self) -> list[Upload]:
        """Return outcomes of uploads since the last call; only on process 0.

        Raises:
          RuntimeError: the background thread has failed.
        """
        return [] if self._link is None else self._link.uploads()

    def finish_uploads(
        self, stopped_s: Callable[[], float | None] = lambda: None
    ) -> str:
        """Wait until the steps of the work dir are in the object store.

        Args:
          stopped_s: returns the seconds since a signal stopped the run, or None if none
            did. It is called about once a second, equally often on every process.
        Returns:
          Text that says what is still missing after --ckpt.remote-wait-s, or after
          --ckpt.remote-stop-wait-s if a signal stopped the run; "" if nothing is.
        """
        return "" if self._link is None else self._link.finish(stopped_s)

    @property
    def is_taken_over(self) -> bool:
        """Whether another start is known to own the store; on process 0."""
        return self.store.fence.problem is not None

    def owns_store(self) -> bool:
        """Return whether no other start is known to own the store, on process 0.

        This reads owner.json; if the store does not answer, the last answer counts.
        """
        with contextlib.suppress(TakenOverError, OSError):
            self.store.fence.check()
        return not self.is_taken_over

    @property
    def _fence_problem(self) -> str | None:
        remote = None if self._link is None else self._link.fence.problem
        return self.store.fence.problem or remote

    @property
    def is_writing(self) -> bool:
        """Whether a save is being written now, as process 0 sees it."""
        return self._writer.is_writing

    def why_unsaved(self, step: int) -> str:
        """Return, on process 0, a text that says for how many steps nothing was saved,
        and why.
        """
        if self._fence_problem is not None:
            return f"{self._fence_problem}; this start ends and leaves the run to it"
        return (
            f"nothing was saved since step {self._last_good_step}, "
            f"{step - self._last_good_step} steps ago (--ckpt.max-unsaved "
            f"{self._config.unsaved_limit}): {self._reason}"
        )

    def why_last_unsaved(self, step: int) -> str:
        """Return, on process 0, a text that says why the last save of a run failed."""
        if self._fence_problem is not None:
            return f"gave up: {self.why_unsaved(step)}"
        good = self._last_good_step
        left = f"the newest checkpoint is of step {good}" if good else "none was saved"
        return f"failed: step {step} was not saved ({left}): {self._reason}"

    @property
    def _reason(self) -> str | None:
        stalled = (
            f"a write has not ended after {self._config.timeout_s} s; check that "
            f"{self.store.directory} responds, then repeat the command"
        )
        return stalled if self._writer.is_stalled else self._error

    def wait(
        self,
        tell: Callable[[], None] = lambda: None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait for the last save to end; return whether it was committed.

        A save is given up if its store hangs; `why_last_unsaved` then gives the reason.

        Args:
          tell: called about once a second, to report failed attempts.
          is_stopped: called as often, and equally often on every process. After True, a
            save that fails is not tried again.
        """
        while (state := self._agreement.decide(self._state_of_save)) == "saving":
            tell()
            if is_stopped():
                self._writer.supersede()
        return state == "saved"

    def _state_of_save(self) -> str:
        is_over = self._writer.poll(self._config.hung_s)
        if is_over is None:
            return "saving"
        is_saved = is_over and self._wanted_step == self._writer.saved_step
        return "saved" if is_saved else "not saved"

    def close(self) -> None:
        """Give up unfinished saves, and stop the background threads."""
        if self._copies is not None:
            self._copies.wait()
        self._writer.supersede()
        self._writer.close()
        if self._link is not None:
            self._link.close()

    # ----------------------------------------------------------------------- restoring

    def newest(self) -> Manifest | None:
        """Return the manifest of the newest usable step.

        It is in the store, see `Recovery.newest`, or at --ckpt.remote if a usable step
        there is newer. None if nothing was ever saved, or if steps are lost but
        --ckpt.local-dir may have copies.

        Raises:
          ValueError: as in `Recovery.newest`; or --ckpt.remote refuses access, or holds
            the steps of another run.
          LostError: without --ckpt.local-dir, steps were saved but none is left in the
            store, or --ckpt.remote has only unusable steps.
          RuntimeError: --ckpt.remote does not answer, and the work dir has no step; or
            the store does not answer.
        """
        if self._link is not None and (found := self._link.newest()):
            return found
        try:
            found = self._recovery(None).newest()
            if found is None and self._link is not None:
                self._link.check_lost()
        except LostError:
            if self._config.local_dir is None:
                raise
            return None
        return found

    def where(self, step: int) -> str:
        """Return where a step is, as a text: in the store, or at --ckpt.remote."""
        is_here = self._link is None or step in self.store.steps()
        return str(self.store.directory if is_here else self._config.remote)

    def restore(self, abstract_state: PyTree) -> Restored | None:
        """Return the newest intact state; see `Recovery.restore`.

        A newer step at --ckpt.remote is first copied into the store.
        """
        if self._link is not None:
            self._link.fetch()
        if self._config.local_dir is not None:
            run = self._agreement.decide(self._run_name)
            self._copies = LocalCopies(
                self._config.local_dir, run, self._agreement.rank
            )
            if self._link is not None and self._link.branch_step is not None:
                self._copies.discard_after(self._link.branch_step)
        restored = self._restored(abstract_state)
        if restored is not None:
            self._last_good_step = restored.store_step
            # Copies on the hosts are restored only if they are newer than the store.
            if restored.store_step == restored.step:
                self._writer.saved_step = self._wanted_step = restored.step
        if self._copies is not None:
            self._copies.discard_after(0 if restored is None else restored.step)
        return restored

    def _restored(self, abstract_state: PyTree) -> Restored | None:
        """Return the newest intact state of the store, the hosts or --ckpt.remote."""
        put_aside: list[str] = []
        while True:
            try:
                restored = self._recovery(self._copies).restore(abstract_state)
            except LostError:
                if self._link is None or not self._link.fetch():
                    raise
                continue
            if restored is not None:
                put_aside += restored.put_aside
            if self._link is None:
                return restored
            if not self._link.fetch():
                return self._link.described(restored, put_aside)

    def check_nothing_remote(self) -> None:
        """Refuse to start a new run if --ckpt.remote already has steps.

        Raises:
          ValueError, RuntimeError: --ckpt.remote has steps; or as in `newest`.
        """
        if self._link is not None:
            self._agreement.decide(self._link.check_empty)

    def claim(self, launch: str, generation: int) -> None:
        """Claim the store for this start of the run, and start the uploads.

        Arguments as in `Fence.claim`.

        Raises:
          RuntimeError: a later start owns the store, or the store cannot be written.
          ValueError: --ckpt.remote refuses access, or holds the steps of another run.
        """

        def act() -> str:
            try:
                self.store.fence.claim(launch, generation)
            except OSError as error:
                raise RuntimeError(
                    f"cannot write to {self.store.directory} ({error}); make it "
                    "writable, or give another --ckpt.dir"
                ) from error
            return ""

        self._agreement.decide(act)
        if self._link is not None:
            self._link.start(launch, generation)

    def _run_name(self) -> str:
        """Return the run's name in --ckpt.local-dir; a copied work dir has another."""
        path = hashlib.sha256(str(self._work_dir.resolve()).encode()).hexdigest()
        return f"{self._journal.run_id(self._find_run_id())}-{path[:8]}"

    def _find_run_id(self) -> str:
        """Return the id of the run, from the journal or a saved step; or a new id."""
        if found := self._records().run_id:
            return found
        for step in reversed(self.store.steps()):
            with contextlib.suppress(DamagedError, ValueError):
                save_id = self.store.manifest(step).save_id
                if save_id != origin_of(save_id):
                    return origin_of(save_id)
        return secrets.token_hex(8)

    def _records(self) -> Records:
        """Return the records, or none if the file cannot be read: steps have ids."""
        with contextlib.suppress(OSError):
            return self._journal.records()
        return Records()

    def _find_last_start(self) -> int:
        """Return the largest start number in the journal and the saved steps."""
        records = self._records().records
        ids = [record.save_id for record in records if record.event == SAVED]
        for step in self.store.steps():
            with contextlib.suppress(DamagedError, ValueError):
                ids.append(self.store.manifest(step).save_id)
        return max(map(start_of, ids), default=0)

    def _recovery(self, copies: LocalCopies | None) -> Recovery:
        return Recovery(self.store, self._journal, self._agreement, copies, self._unfit)
