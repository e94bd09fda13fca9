"""The background thread of each process that copies saved steps into the store.

Input: steps that were committed in the work dir. Output: the same steps in the store.
Process 0 chooses a step, the newest that is not there first; each process uploads the
files that it has written; process 0 compares what is there with what was sent, and
writes the commit. The training thread only wakes the thread of process 0.

If anything fails, the step stays in the work dir, the reason is told once, and the
newest step is tried again after 1, 2, 4, ... 60 seconds. What is there already is not
sent again. While a step is being uploaded it is not deleted in the work dir; steps that
retention deletes there before their turn came are left out.
"""

import contextlib
import dataclasses
import json
import queue
import threading
import time
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

from mjax.ckpt.config import Retention
from mjax.ckpt.fence import TakenOverError
from mjax.ckpt.manifest import DamagedError
from mjax.ckpt.phases import EXPECTED, in_words
from mjax.ckpt.remote import transfer
from mjax.ckpt.remote.fence import RemoteFence
from mjax.ckpt.remote.steps import Commit, File, RemoteSteps
from mjax.ckpt.store import Store
from mjax.processes.agreement import DAY_S, Agreement
from mjax.stores.objects import ConflictError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_POLL_S = 0.05
_STOP = "stop"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Upload:
    """Outcome of an upload, on process 0."""

    step: int
    url: str
    error: str | None
    """None: the step is in the store."""
    upload_s: float = 0.0
    """Seconds of the last try."""
    num_bytes: int = 0
    """Bytes of all files."""
    tries: int = 1
    """Number of tries since the last step that was uploaded."""
    waited_s: float = 0.0
    """Seconds since the first of them."""
    removed: tuple[int, ...] = ()
    """Older steps that were deleted in the store."""

    @property
    def metrics(self) -> dict[str, int | float]:
        """Fields of the next row of metrics; none after an error."""
        if self.error is not None:
            return {}
        return {"ckpt_upload_step": self.step, "ckpt_upload_s": self.upload_s}

    def describe(self) -> str:
        """Describe the outcome for people."""
        if self.error is not None:
            return (
                f"warning: checkpoint {self.step} is not in {self.url} yet: "
                f"{self.error}; training goes on, the upload is tried again"
            )
        tries = ""
        if self.tries > 1:
            tries = f", at try {self.tries} after {self.waited_s:.0f} s"
        removed = "".join(f", {step}" for step in self.removed)[2:]
        return (
            f"checkpoint {self.step} is in {self.url}: {self.num_bytes / 1e6:.1f} MB "
            f"in {self.upload_s:.2f} s{tries}"
            f"{'; removed ' + removed if removed else ''}"
        )


class Uploader:
    """The thread of one process; every process makes the same calls."""

    def __init__(
        self,
        local: Store,
        remote: RemoteSteps,
        fence: RemoteFence,
        retention: Retention,
        agreement: Agreement,
        *,
        refused: Callable[[], Container[tuple[int, str]]],
        claim: Callable[[], None],
    ) -> None:
        """Start the thread.

        Args:
          local: steps of the work dir.
          remote: where they are copied.
          fence: around it.
          retention: which steps stay there.
          agreement: agreement of the uploaders of all processes.
          refused: returns (step, save id) of local steps that may not be restored.
          claim: claims the fence on process 0, before the first upload; what it raises
            is tried again.
        """
        self.uploads: queue.SimpleQueue[Upload] = queue.SimpleQueue()
        """How uploads went, on process 0."""
        self._local, self._remote, self._fence = local, remote, fence
        self._retention, self._agreement = retention, agreement
        self._refused, self._claim = refused, claim
        self._done: dict[int, Commit] | None = None
        """The steps that are in the store; None: it was not asked yet."""
        self._held: int | None = None
        self._tries, self._since_s = 0, 0.0
        self.problem = ""
        """Why the last try has failed, on process 0; "": it has not."""
        self._wake, self._is_closing = threading.Event(), False
        self._num_notified, self._num_current = 0, -1
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._work, name="mjax-ckpt-uploader", daemon=True
        )
        self._wake.set()  # what an earlier start has left
        self._thread.start()

    def held(self) -> set[int]:
        """Return the steps of the work dir that must stay there now, on process 0."""
        step = self._held
        return set() if step is None else {step}

    def notify(self) -> None:
        """Tell process 0 that a step was committed."""
        self._num_notified += 1
        self._wake.set()

    def finish(self, timeout_s: int | float) -> bool:
        """Wait, on process 0, until all is uploaded; say whether it is.

        Args:
          timeout_s: after which the rest stays in the work dir.
        """
        self._wake.set()
        until_s = time.monotonic() + timeout_s
        while not self._is_current and self._thread.is_alive():
            if time.monotonic() >= until_s:
                break
            time.sleep(_POLL_S)
        return self._is_current

    @property
    def _is_current(self) -> bool:
        """Whether nothing was left to upload after the last step was told of."""
        return self._num_current == self._num_notified

    def close(self) -> None:
        """Stop after the present try; leave a store that hangs."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(_FIRST_PAUSE_S)

    def check(self) -> None:
        """Raise what has ended the thread, if anything has.

        Raises:
          RuntimeError: a bug, or another process that does not answer.
        """
        if self._failure is not None:
            raise RuntimeError(
                f"the thread that uploads checkpoints has died: {self._failure!r}"
            ) from self._failure

    def _work(self) -> None:
        try:
            if self._agreement.rank == 0:
                self._lead()
            else:
                self._follow()
        except BaseException as error:  # whatever it is, `check` raises it
            self._failure = error

    # ----------------------------------------------------------------------- process 0

    def _lead(self) -> None:
        pause_s: float | None = None
        while not self._is_closing:
            self._wake.wait(pause_s)
            self._wake.clear()
            if self._is_closing:
                break
            step, num_notified = self._held, self._num_notified
            try:
                step = self._held = self._next()
                if step is None:  # of the steps that were told before it looked
                    self._num_current = num_notified
                    pause_s, self._tries, self.problem = None, 0, ""
                    continue
                self._num_current = -1
                self._upload(step)
            except EXPECTED as error:
                if isinstance(error, TakenOverError):
                    break  # the fence tells; nothing may be written any more
                pause_s = self._failed(step, error)
                continue
            finally:
                self._held = None
            pause_s = None
            self._wake.set()  # there may be another one
        self._order(_STOP)

    def _failed(self, step: int | None, error: BaseException) -> float:
        """Tell a failure once; return the pause until the next try."""
        self.problem = in_words(error)
        if not self._tries:
            self._since_s = time.monotonic()
            step = max(self._local.steps(), default=0) if step is None else step
            self.uploads.put(
                Upload(step=step, url=self._remote.url, error=self.problem)
            )
        self._tries += 1
        self._num_current = -1
        return min(_FIRST_PAUSE_S * 2 ** min(self._tries - 1, 9), _LONGEST_PAUSE_S)

    def _next(self) -> int | None:
        """Choose the step to upload: the newest first, then those that are kept."""
        if self._done is None:
            self._claim()
            self._done = dict(self._remote.commits())
        here, there = self._good(), self._done
        done = {(step, commit.save_id) for step, commit in there.items()}
        wanted = {s for s, (save_id, _) in here.items() if (s, save_id) not in done}
        newest = max(here, default=None)
        if newest in wanted:
            return newest
        losses = {step: commit.eval_loss for step, commit in there.items()}
        losses |= {step: loss for step, (_, loss) in here.items()}
        return max(wanted & self._retention.stays(losses), default=None)

    def _good(self) -> dict[int, tuple[str, float | None]]:
        """Return save id and loss of the steps of the work dir that may be restored."""
        refused, found = self._refused(), {}
        for step in self._local.steps():
            with contextlib.suppress(DamagedError, ValueError):
                manifest = self._local.manifest(step)
                if (step, manifest.save_id) not in refused:
                    loss = manifest.run.get("eval_loss")
                    found[step] = (manifest.save_id, loss)
        return found

    def _upload(self, step: int) -> None:
        """Upload a step on all processes, and commit it."""
        started_s = time.monotonic()
        assert self._done is not None
        self._fence.check()
        manifest = self._local.manifest(step)
        expected = transfer.files_of(Path(self._local.path(step)))
        self._order(json.dumps([step, manifest.save_id]))
        files = self._merged(self._send(step, manifest.save_id))
        if lacking := sorted({*expected} - {*files}):
            raise OSError(f"{lacking[0]} of step {step} is not seen by its process")
        commit = Commit(
            step=step,
            save_id=manifest.save_id,
            files=files,
            eval_loss=manifest.run.get("eval_loss"),
        )
        if missing := self._remote.missing(commit):
            raise OSError(f"{self._remote.url}: {missing}")
        self._fence.check()
        try:
            self._remote.write_commit(commit)
        except ConflictError as error:
            self._fence.check()
            raise OSError(f"commit of step {step}: {error}") from error
        self._done[step] = commit
        upload = Upload(
            step=step,
            url=self._remote.url,
            error=None,
            upload_s=time.monotonic() - started_s,
            num_bytes=commit.num_bytes,
            tries=self._tries + 1,
            waited_s=time.monotonic() - self._since_s if self._tries else 0.0,
        )
        self._tries, self.problem = 0, ""
        removed: list[int] = []
        try:
            removed = self._remote.prune(self._retention, newest=step)
            good = {(s, save_id) for s, (save_id, _) in self._good().items()}
            self._remote.clean(good)
        finally:
            for old in removed:
                self._done.pop(old, None)
            self.uploads.put(dataclasses.replace(upload, removed=tuple(removed)))

    def _order(self, text: str) -> None:
        self._agreement.from_rank(0, text)

    def _merged(self, own: str) -> dict[str, File]:
        """Merge what all processes have sent.

        Raises:
          OSError: one could not send its files.
        """
        files: dict[str, File] = {}
        for rank, text in enumerate(self._agreement.all_of(own)):
            answer: Mapping[str, Any] = json.loads(text)
            if answer["error"]:
                raise OSError(f"process {rank}: {answer['error']}")
            files |= {name: File(**file) for name, file in answer["files"].items()}
        return files

    # ----------------------------------------------------------------- every process

    def _follow(self) -> None:
        while (order := self._agreement.from_rank(0, "")) != _STOP:
            step, save_id = json.loads(order)
            self._agreement.all_of(self._send(step, save_id))

    def _send(self, step: int, save_id: str) -> str:
        """Upload the files of this process; return them, or what went wrong."""
        rank, num = self._agreement.rank, self._agreement.num
        folder, files, problem = Path(self._local.path(step)), {}, ""
        try:
            names = transfer.share(transfer.files_of(folder), rank, num)
            files = transfer.upload(self._remote, step, save_id, folder, names)
        except EXPECTED as error:
            problem = in_words(error)
        sent = {name: dataclasses.asdict(file) for name, file in files.items()}
        return json.dumps({"error": problem, "files": sent})


def open_agreement() -> Agreement:
    """Open the agreement of the threads that upload."""
    return Agreement("uploads", timeout_s=DAY_S)
