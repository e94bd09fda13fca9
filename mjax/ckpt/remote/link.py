"""The object store of a run, as `manager` uses it.

Input: the --ckpt.remote flags, and the steps of the work dir. Output: the same steps in
the object store (`uploader`); or a newer step of the object store in the work dir
(`source`).
"""

import dataclasses
import queue
from collections.abc import Callable, Sequence

from mjax.ckpt import manifest
from mjax.ckpt.config import CkptConfig
from mjax.ckpt.journal import Journal, start_of
from mjax.ckpt.manifest import Manifest
from mjax.ckpt.recovery import Restored, Unfit
from mjax.ckpt.remote.fence import RemoteFence
from mjax.ckpt.remote.source import Source, outer_urls
from mjax.ckpt.remote.steps import RemoteSteps
from mjax.ckpt.remote.uploader import Upload, Uploader, open_agreement
from mjax.ckpt.remote.waiting import wait_for_uploads
from mjax.ckpt.store import Store
from mjax.processes.agreement import Agreement
from mjax.stores import address
from mjax.stores.objects import ObjectStore, UnavailableError
from mjax.stores.opened import open_store

FLAG = "--ckpt.remote"
_PATIENCE_S = 20


def opened(url: str, flag: str = FLAG) -> ObjectStore:
    """Return the object store of a URL; this makes no request.

    Raises:
      ValueError: the URL does not name an object store, or obstore is not installed.
    """
    return open_store(address.parse(url, flag), flag, patience_s=_PATIENCE_S)


class Link:
    """The object store of one run; all processes make the same calls in order."""

    def __init__(
        self,
        config: CkptConfig,
        local: Store,
        journal: Journal,
        agreement: Agreement,
        unfit: Unfit,
    ) -> None:
        """Open the store; this makes no request.

        Args:
          config: config in which `remote` is set.
          local: steps of the work dir.
          journal: journal of the run.
          agreement: agreement of the training threads.
          unfit: function that decides which steps the run must not use.
        Raises:
          ValueError: obstore is not installed.
        """
        assert config.remote is not None
        self._config, self._local, self._journal = config, local, journal
        self._agreement, self._of_uploads = agreement, open_agreement()
        self._remote = RemoteSteps(opened(config.remote))
        outer = [opened(url) for url in outer_urls(config.remote, FLAG)]
        self._source = Source(self._remote, local, journal, agreement, unfit, outer)
        self._uploader: Uploader | None = None
        self.fence = RemoteFence(self._remote.store)
        """Fence of this start; the next save that is due reports its problem."""
        self.last_start = 0
        """The largest start number in the store when it was claimed."""
        self._restored_step: int | None = None

    # ----------------------------------------------------------------------- restoring

    def check_empty(self) -> str:
        """Refuse a store that has steps, for a run from scratch; on process 0.

        Returns:
          "", because `Agreement.decide` sends a text to the other processes.
        """
        self._source.look()
        if self._source.is_away:
            raise RuntimeError(
                f"{self._remote.url} does not answer, and --restart-from-scratch "
                f"cannot move its steps aside; give another {FLAG} with it"
            )
        if steps := self._remote.steps():
            raise ValueError(
                f"--restart-from-scratch cannot move {self._remote.url} aside, which "
                f"has step {steps[-1]}; give another {FLAG} with it"
            )
        return ""

    def newest(self) -> Manifest | None:
        """Return the newest step's manifest, if the step is newer than local ones.

        Raises:
          ValueError, RuntimeError: as in `Source.look` and `Source.newest`.
        """

        def find() -> str:
            self._source.look()
            found = self._source.newest()
            return "" if found is None else manifest.write_manifest(found[1])

        text = self._agreement.decide(find)
        return manifest.read_manifest(text, self._remote.url) if text else None

    @property
    def branch_step(self) -> int | None:
        """The fetched step if its branch is newer than the work dir's, or None."""
        return self._source.branch_step

    def fetch(self) -> bool:
        """Copy the newest step to the work dir; return whether one was copied."""
        return self._source.fetch()

    def check_lost(self) -> None:
        """Refuse to begin at step 0 if steps were skipped; see `Source.check_lost`."""

        def check() -> str:
            self._source.check_lost()
            return ""

        self._agreement.decide(check)

    def described(
        self, restored: Restored | None, put_aside: Sequence[str]
    ) -> Restored | None:
        """Return a restored state whose source and skipped steps name the object store.

        Raises:
          LostError: nothing was restored, and all steps of the store were skipped.
        """
        self._restored_step = 0 if restored is None else restored.step
        if restored is None:
            self.check_lost()
            return None
        source = restored.source
        if restored.step in self._source.fetched:
            source = f"{source}, which was copied from {self._remote.url}"
        told = (*put_aside, *self._source.left_branch, *self._source.refused())
        return dataclasses.replace(restored, source=source, put_aside=told)

    # ----------------------------------------------------------------------- uploading

    def start(self, launch: str, generation: int) -> None:
        """Claim the store, and start uploading; arguments as in `Fence.claim`.

        A store that does not answer is claimed as soon as it answers. Its steps above
        the restored step are then put aside, because the run has left their branch.

        Raises:
          RuntimeError: a later start has claimed the store.
          ValueError: the store refuses access, or holds the steps of another run.
        """

        def claim() -> None:
            if not self.fence.is_claimed:
                self._source.check_own()  # `look` may have got no answer
                ids = [commit.save_id for _, commit in self._remote.commits()]
                self.last_start = max(map(start_of, ids), default=0)
                self.fence.claim(launch, generation)
            self._source.put_aside(self._restored_step)

        def act() -> str:
            if self._source.is_away:
                return ""  # the uploader retries and reports; training does not wait
            try:
                claim()
            except UnavailableError:
                return ""  # the uploader retries and reports
            return ""

        self._agreement.decide(act)
        self._uploader = Uploader(
            self._local,
            self._remote,
            self.fence,
            self._config.remote_retention,
            self._of_uploads,
            refused=self._journal.records,
            claim=claim,
        )

    def held(self) -> set[int]:
        """Return the steps that must stay in the work dir while they are uploaded."""
        return set() if self._uploader is None else self._uploader.held()

    def notify(self) -> None:
        """Tell the uploader that a step was saved in the work dir."""
        if self._uploader is not None:
            self._uploader.notify()

    def uploads(self) -> list[Upload]:
        """Return outcomes of uploads since the last call; empty except on process 0.

        Raises:
          RuntimeError: the uploader's thread has failed.
        """
        found: list[Upload] = []
        if self._uploader is not None:
            self._uploader.check()
            while True:
                try:
                    found.append(self._uploader.uploads.get_nowait())
                except queue.Empty:
                    break
        return found

    def finish(self, stopped_s: Callable[[], float | None]) -> str:
        """Wait for the uploads; return a text on what is missing, or "".

        Args:
          stopped_s: as in `wait_for_uploads`.
        """
        uploader = self._uploader
        if uploader is None:
            return ""
        return wait_for_uploads(
            uploader,
            self._agreement,
            wait_s=self._config.remote_wait_s,
            stop_wait_s=self._config.remote_stop_wait_s,
            stopped_s=stopped_s,
            missing=lambda why: self._missing(uploader, why),
        )

    def _missing(self, uploader: Uploader, why: str) -> str:
        """Return a text on which steps are not in the store; "" if `why` is empty."""
        folder, damage = self._local.directory, uploader.damage
        if damage is not None and not why:
            return (
                f"checkpoint {damage[0]} is not in {self._remote.url}, it is damaged: "
                f"{damage[1]}. It is in {folder}; the same command restores the newest "
                "intact step"
            )
        if not why:
            return ""
        steps = uploader.left() or [max(self._local.steps(), default=0)]
        names, is_one = ", ".join(map(str, steps)), len(steps) == 1
        return (
            f"{'checkpoint' if is_one else 'checkpoints'} {names} "
            f"{'is' if is_one else 'are'} not in {self._remote.url}, "
            f"{self.fence.problem or why}. {'It is' if is_one else 'They are'} in "
            f"{folder}; the same command uploads {'it' if is_one else 'them'}"
        )

    def close(self) -> None:
        """Stop uploading; steps that are not uploaded yet stay in the work dir."""
        if self._uploader is not None:
            self._uploader.close()
