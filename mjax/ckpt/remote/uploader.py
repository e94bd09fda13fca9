"""The background thread of each process that copies saved steps into the store.

Input: steps that were committed in the work dir. Output: the same steps in the store.
Process 0 chooses a step, the newest that is not there first; each process compares the
pieces that it has written with their checksums and uploads its files; process 0
compares what is there with what was sent, and writes the commit. The training thread
only wakes the thread of process 0.

If anything fails, the step stays in the work dir, the reason is told once, and the
newest step is tried again after 1, 2, 4, ... 60 seconds. What is there already is not
sent again. While a step is being uploaded it is not deleted in the work dir; steps that
retention deletes there before their turn came are left out, and so are damaged steps.
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
    """None: the step is in the store."""
    upload_s: float = 0.0
    """Seconds of the last try."""
    num_bytes: int = 0
    """Bytes of all files."""
    tries: int = 1
    """Number of tries since the last step that was uploaded."""
    waited_s: float = 0.0
    """Seconds since the first of them."""
    is_tried_again: bool = True
    """After an error: False if the step is damaged, so another try is useless."""
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
        self._damaged: dict[tuple[int, str], str] = {}
        """(step, save id) of damaged local steps, and why; "": an unreadable id."""
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

    def hurry(self) -> None:
        """Let process 0 try again now, and not after its pause."""
        self._wake.set()

    def wait(self, timeout_s: int | float) -> bool:
        """Wait, on process 0, until nothing is left to upload; say whether it is so."""
        until_s = time.monotonic() + timeout_s
        while not self._is_current and self._thread.is_alive():
            if time.monotonic() >= until_s:
                break
            time.sleep(_POLL_S)
        return self._is_current

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs; it ends too if another start has taken over."""
        return self._thread.is_alive()

    @property
    def failure(self) -> str:
        """What has ended the thread of this process; "": nothing has."""
        return "" if self._failure is None else repr(self._failure)

    def left(self) -> list[int]:
        """Return the local steps that are still to be uploaded, on process 0."""
        return sorted(self._wanted(dict(self._done or {})))

    @property
    def damage(self) -> tuple[int, str] | None:
        """The newest local step and its damage, if it is known to be damaged."""
        newest = max(self._local.steps(), default=0)
        found = [why for (step, _), why in [*self._damaged.items()] if step == newest]
        return (newest, found[-1]) if found else None

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
            except TakenOverError:
                break  # the fence tells; nothing may be written any more
            except _LocalDamageError as error:
                self._leave_out(error.step, error.save_id, str(error))
            except EXPECTED as error:
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

    def _leave_out(self, step: int, save_id: str, reason: str) -> None:
        """Tell once that a local step is damaged; it is not uploaded by this start."""
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
        """Choose the step to upload: the newest first, then those that are kept."""
        if self._done is None:
            self._claim()
            self._done = dict(self._remote.commits())
        return max(self._wanted(self._done), default=None)

    def _wanted(self, there: Mapping[int, Commit]) -> set[int]:
        """Return the local steps that are to be uploaded.

        They are the newest, and those that the rules of the store keep.
        """
        here = self._good()
        done = {(step, commit.save_id) for step, commit in there.items()}
        losses = {step: commit.eval_loss for step, commit in there.items()}
        losses |= {step: loss for step, (_, loss) in here.items()}
        stays = self._retention.stays(losses) | {max(here, default=0)}
        return {s for s in stays & here.keys() if (s, here[s][0]) not in done}

    def _good(self) -> dict[int, tuple[str, float | None]]:
        """Return save id and loss of the steps of the work dir that may be restored.

        Steps that are known to be damaged are left out, so they replace no good step.
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

    def _merged(self, step: int, save_id: str, own: str) -> dict[str, File]:
        """Merge what all processes have sent.

        Raises:
          _LocalDamageError: one has found the step damaged.
          OSError: one could not send its files.
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
        """Upload the files of this process; return them, or what went wrong.

        Nothing is sent before the pieces of this process were compared.
        """
        rank, num = self._agreement.rank, self._agreement.num
        path, files, damage, problem = self._local.path(step), {}, "", ""
        folder = Path(path)
        try:
            if not (folder / MAIN_FILE).exists():  # a network file system may be late
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
    """A step of the work dir is not what was saved."""

    def __init__(self, step: int, save_id: str, reason: str) -> None:
        super().__init__(reason)
        self.step, self.save_id = step, save_id


def open_agreement() -> Agreement:
    """Open the agreement of the threads that upload."""
    return Agreement("uploads", timeout_s=DAY_S)
