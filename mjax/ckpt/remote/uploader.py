"""Copy saved steps into the object store, in a background thread of each process.

Input: steps that were committed in the work dir. Output: the same steps in the object
store. Process 0 chooses the newest step that is not in the store yet. Each process
compares the pieces that it wrote with their checksums, and uploads the files that it
wrote. Process 0 then checks the sizes of the uploaded objects and writes the commit.
The training thread only wakes the thread of process 0.

If anything fails, the step stays in the work dir, the reason is reported once, and the
newest step is tried again after 1, 2, 4, ... 60 seconds. Files that are already in the
store are not sent again. A step is not deleted from the work dir while it is being
uploaded. Damaged steps, and steps that retention deletes before their turn, are not
uploaded.
"""

import contextlib
import dataclasses
import json
import queue
import threading
import time
from collections.abc import Callable, Container, Mapping
from pathlib import Path

from mjax.ckpt.config import Retention
from mjax.ckpt.fence import TakenOverError
from mjax.ckpt.manifest import MAIN_FILE, DamagedError
from mjax.ckpt.phases import EXPECTED, in_words
from mjax.ckpt.remote import local_check, transfer
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
    """Why the upload failed; None if the step is in the store."""
    upload_s: float = 0.0
    """Duration of the last try, in seconds."""
    num_bytes: int = 0
    """Bytes of all files of the step."""
    tries: int = 1
    """Number of tries since the last successful upload."""
    waited_s: float = 0.0
    """Seconds since the first of these tries failed; 0 if none did."""
    is_tried_again: bool = True
    """After an error, whether the upload is retried; it is not if the step is
    damaged."""
    removed: tuple[int, ...] = ()
    """Older steps that were then deleted from the store."""

    @property
    def metrics(self) -> dict[str, int | float]:
        """Fields for the next row of metrics; empty after an error."""
        if self.error is not None:
            return {}
        return {"ckpt_upload_step": self.step, "ckpt_upload_s": self.upload_s}

    def describe(self) -> str:
        """Return the outcome as a line of text."""
        if self.error is not None and not self.is_tried_again:
            return (
                f"warning: checkpoint {self.step} is not uploaded to {self.url}: "
                f"{self.error}; training goes on, the steps there stay"
            )
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
    """The uploading thread of one process; all processes make the same calls."""

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
          remote: steps of the object store, the destination.
          fence: fence of the object store.
          retention: rules for keeping steps in the object store.
          agreement: agreement that only the uploaders of all processes use.
          refused: returns (step, save id) of local steps that must not be restored.
          claim: claims the fence on process 0 before the first upload; it is called
            again if it raises.
        """
        self.uploads: queue.SimpleQueue[Upload] = queue.SimpleQueue()
        """Outcomes of uploads, on process 0."""
        self._local, self._remote, self._fence = local, remote, fence
        self._retention, self._agreement = retention, agreement
        self._refused, self._claim = refused, claim
        self._done: dict[int, Commit] | None = None
        """Step in the object store -> its commit; None before the store is listed."""
        self._damaged: dict[tuple[int, str], str] = {}
        """(step, save id) of a damaged local step -> the damage; the save id is "" if
        it cannot be read."""
        self._held: int | None = None
        self._tries, self._since_s = 0, 0.0
        self.problem = ""
        """On process 0, why the last try failed; "" if it did not."""
        self._wake, self._is_closing = threading.Event(), False
        self._num_notified, self._num_current = 0, -1
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._work, name="mjax-ckpt-uploader", daemon=True
        )
        self._wake.set()  # for steps that an earlier start did not upload
        self._thread.start()

    def held(self) -> set[int]:
        """Return the steps that must stay in the work dir for now, on process 0."""
        step = self._held
        return set() if step is None else {step}

    def notify(self) -> None:
        """Wake the thread of process 0, because a step was committed."""
        self._num_notified += 1
        self._wake.set()

    def hurry(self) -> None:
        """Make process 0 try again now instead of after its pause."""
        self._wake.set()

    def wait(self, timeout_s: int | float) -> bool:
        """Wait, on process 0, for all uploads; return whether none is left."""
        until_s = time.monotonic() + timeout_s
        while not self._is_current and self._thread.is_alive():
            if time.monotonic() >= until_s:
                break
            time.sleep(_POLL_S)
        return self._is_current

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs; it also ends if another start has taken over."""
        return self._thread.is_alive()

    @property
    def failure(self) -> str:
        """The error that ended this process's thread; "" if there was none."""
        return "" if self._failure is None else repr(self._failure)

    def left(self) -> list[int]:
        """Return the local steps that are not uploaded yet, on process 0."""
        return sorted(self._wanted(dict(self._done or {})))

    @property
    def damage(self) -> tuple[int, str] | None:
        """The newest local step and its damage; None if no damage is known."""
        newest = max(self._local.steps(), default=0)
        found = [why for (step, _), why in [*self._damaged.items()] if step == newest]
        return (newest, found[-1]) if found else None

    @property
    def _is_current(self) -> bool:
        """Whether all steps up to the last `notify` are uploaded."""
        return self._num_current == self._num_notified

    def close(self) -> None:
        """Stop after the current try, without waiting for a store that hangs."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(_FIRST_PAUSE_S)

    def check(self) -> None:
        """Raise if an error has ended the thread.

        Raises:
          RuntimeError: the thread ended by a bug, or a process does not answer.
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
        except BaseException as error:  # `check` raises any error
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
                if step is None:  # all are uploaded
                    self._num_current = num_notified
                    pause_s, self._tries, self.problem = None, 0, ""
                    continue
                self._num_current = -1
                self._upload(step)
            except TakenOverError:
                break  # the fence reports it; writing is now forbidden
            except _LocalDamageError as error:
                self._leave_out(error.step, error.save_id, str(error))
            except EXPECTED as error:
                pause_s = self._failed(step, error)
                continue
            finally:
                self._held = None
            pause_s = None
            self._wake.set()  # there may be another step
        self._order(_STOP)

    def _failed(self, step: int | None, error: BaseException) -> float:
        """Report a failure once; return the seconds until the next try."""
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

    def _leave_out(self, step: int, save_id: str, reason: str) -> None:
        """Report once that a local step is damaged; this start does not upload it."""
        is_known = (step, save_id) in self._damaged
        if is_known or step not in self._local.steps():  # retention has deleted it
            return
        self._damaged[step, save_id] = reason
        self._tries, self.problem = 0, ""
        self.uploads.put(
            Upload(
                step=step,
                url=self._remote.url,
                error=f"{self._local.path(step)} is damaged: {reason}",
                is_tried_again=False,
            )
        )

    def _next(self) -> int | None:
        """Return the newest local step that must be uploaded; None if there is none."""
        if self._done is None:
            self._claim()
            self._done = dict(self._remote.commits())
        return max(self._wanted(self._done), default=None)

    def _wanted(self, there: Mapping[int, Commit]) -> set[int]:
        """Return the local steps that must be uploaded.

        These are the newest step, and the steps that the store's retention keeps.
        """
        here = self._good()
        done = {(step, commit.save_id) for step, commit in there.items()}
        losses = {step: commit.eval_loss for step, commit in there.items()}
        losses |= {step: loss for step, (_, loss) in here.items()}
        stays = self._retention.stays(losses) | {max(here, default=0)}
        return {s for s in stays & here.keys() if (s, here[s][0]) not in done}

    def _good(self) -> dict[int, tuple[str, float | None]]:
        """Return step -> (save id, loss), for local steps that may be restored.

        Steps known to be damaged are left out, so they never replace a good step.
        """
        refused, found = self._refused(), {}
        for step in self._local.steps():
            with contextlib.suppress(ValueError):
                try:
                    manifest = self._local.manifest(step)
                except DamagedError as error:
                    if (step, "") not in refused:
                        self._leave_out(step, "", str(error))
                    continue
                saved = (step, manifest.save_id)
                if saved not in refused and saved not in self._damaged:
                    loss = manifest.run.get("eval_loss")
                    found[step] = (manifest.save_id, loss)
        return found

    def _upload(self, step: int) -> None:
        """Upload a step on all processes, and commit it."""
        started_s = time.monotonic()
        assert self._done is not None
        self._fence.check()
        try:
            manifest = self._local.manifest(step)
        except DamagedError as error:
            raise _LocalDamageError(step, "", str(error)) from error
        expected = transfer.files_of(Path(self._local.path(step)))
        self._order(json.dumps([step, manifest.save_id]))
        own = self._send(step, manifest.save_id)
        files = self._merged(step, manifest.save_id, own)
        if lacking := sorted({*expected} - {*files}):
            raise OSError(
                f"{lacking[0]} of step {step} is not visible to the process that must "
                "upload it"
            )
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

    def _merged(self, step: int, save_id: str, own: str) -> dict[str, File]:
        """Return path -> file, for the files that all processes have uploaded.

        Raises:
          _LocalDamageError: a process has found the step damaged.
          OSError: a process could not upload its files.
        """
        files: dict[str, File] = {}
        answers = [json.loads(text) for text in self._agreement.all_of(own)]
        for rank, answer in enumerate(answers):
            if answer["damage"]:
                reason = f"process {rank}: {answer['damage']}"
                raise _LocalDamageError(step, save_id, reason)
        for rank, answer in enumerate(answers):
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
        """Upload this process's files; return files, damage and other error as JSON.

        The pieces of this process are compared with their checksums first.
        """
        rank, num = self._agreement.rank, self._agreement.num
        path, files, damage, problem = self._local.path(step), {}, "", ""
        folder = Path(path)
        try:
            if not (folder / MAIN_FILE).exists():  # a network file system can lag
                raise OSError(f"{folder} is not seen on its host")
            names = transfer.share(transfer.files_of(folder), rank, num)
            hashed = transfer.hashed_files(folder, names)
            local_check.check(path, save_id, rank, num)
            transfer.upload(self._remote, step, save_id, folder, hashed)
            files = hashed
        except DamagedError as error:
            damage = in_words(error)
        except EXPECTED as error:
            problem = in_words(error)
        sent = {name: dataclasses.asdict(file) for name, file in files.items()}
        return json.dumps({"damage": damage, "error": problem, "files": sent})


class _LocalDamageError(RuntimeError):
    """A step of the work dir differs from what was saved."""

    def __init__(self, step: int, save_id: str, reason: str) -> None:
        super().__init__(reason)
        self.step, self.save_id = step, save_id


def open_agreement() -> Agreement:
    """Open the agreement that the uploading threads use."""
    return Agreement("uploads", timeout_s=DAY_S)
