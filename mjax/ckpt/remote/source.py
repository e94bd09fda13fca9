"""Copy the newest step of an object store into the work dir, if it is newer.

Input: the steps of the object store, and those of the work dir. Output: the step as a
folder in the work dir, whose files match their SHA-256; it is then restored like any
other step. A step with a missing or changed object is skipped with a message, and the
previous step is used. All processes download about as many bytes each.

The newest step is the last step of the newest branch (`journal.age_of`), which may not
have the highest number. A run may resume from an older step while the store does not
answer, or on another machine. It then leaves the higher steps of the earlier branch,
which are put aside.
"""

import contextlib
import dataclasses
import json
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from mjax import checked_json
from mjax.ckpt.journal import Journal, age_of, start_of
from mjax.ckpt.manifest import DamagedError, Manifest
from mjax.ckpt.phases import in_words
from mjax.ckpt.recovery import LostError, Unfit
from mjax.ckpt.remote import transfer
from mjax.ckpt.remote.fence import OWNER_FILE
from mjax.ckpt.remote.steps import FOLDERS, Commit, RemoteSteps
from mjax.ckpt.store import Store, delete, manifest_in, pieces_in
from mjax.processes.agreement import Agreement
from mjax.stores import address
from mjax.stores.objects import (
    MissingError,
    ObjectStore,
    RefusedError,
    UnavailableError,
)

_DAMAGED, _FETCHED = "damaged", "fetched"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Order:
    """The step that process 0 orders all processes to download."""

    commit: Commit
    folder: str
    is_newer_branch: bool
    """Whether a later start saved the step than the starts that saved local steps."""


class Source:
    """The object store as a source of steps; all processes make the same calls."""

    def __init__(
        self,
        remote: RemoteSteps,
        local: Store,
        journal: Journal,
        agreement: Agreement,
        unfit: Unfit,
        outer: Sequence[ObjectStore],
    ) -> None:
        """Store the arguments; this makes no request.

        Args:
          remote: steps of the run in the object store.
          local: steps of the work dir.
          journal: journal of the run.
          agreement: agreement of the training threads.
          unfit: function that decides which steps the run must not use.
          outer: stores of the URLs that `outer_urls` returns.
        """
        self._outer = outer
        self._remote, self._local, self._journal = remote, local, journal
        self._agreement, self._unfit = agreement, unfit
        self.is_away = False
        """On process 0, whether the store did not answer in `look`."""
        self._refused: dict[int, tuple[Commit | None, str]] = {}
        self._listed: dict[int, Commit | str] = {}
        self.fetched: dict[int, Commit] = {}
        """Step that was downloaded into the work dir -> its commit."""
        self.branch_step: int | None = None
        """The last fetched step whose branch is newer than the work dir's branch."""
        self.left_branch: list[str] = []
        """On process 0, one text per local step whose branch was left, with the
        reason."""

    def look(self) -> None:
        """Check that this run may use the store; on process 0.

        A small object is written and deleted, because permission to read does not imply
        permission to write. A store that does not answer is an error only if the work
        dir has no step.

        Raises:
          ValueError: the store refuses access, holds the steps of another run, or is
            inside another run's URL.
          RuntimeError: the store does not answer.
        """
        probe = f"probe-{secrets.token_hex(4)}"
        try:
            self._check_outside()
            self._remote.store.write(probe, b"")
            self._remote.store.delete([probe])
            self.check_own()
        except UnavailableError as error:
            if not self._local_steps():
                raise RuntimeError(
                    f"{error}; whether this run has a checkpoint there is not known. "
                    "Start again when the store answers, or leave out --ckpt.remote"
                ) from error
            self.is_away = True
            _warn(
                f"{error}; the run goes on from the work dir, and uploads when the "
                "store answers"
            )

    def check_own(self) -> None:
        """Check that this run can have saved the store's newest step; on process 0.

        Raises:
          ValueError: another run or a newer version of mjax saved the step, or the URL
            is inside another run's URL.
          UnavailableError: the store does not answer.
        """
        self._check_outside()
        for step in reversed(self._remote.steps()):
            with contextlib.suppress(DamagedError):
                self._check_own(self._remote.commit(step))
                return

    def _check_outside(self) -> None:
        """Refuse a URL inside another run's URL: that run might delete its objects."""
        for outer in self._outer:
            # Credentials may be for this URL only: a refusal above it is no error.
            with contextlib.suppress(MissingError, RefusedError):
                outer.find(OWNER_FILE)
                raise ValueError(
                    f"--ckpt.remote {self._remote.url} is inside {outer.url}, which "
                    f"has the checkpoints of a run. Give {outer.url} to go on with "
                    "that run, or a URL outside of it for another run"
                )

    def newest(self) -> tuple[Commit, Manifest] | None:
        """Return the store's newest step if it is newer than all local steps.

        Call this on process 0. Steps that are damaged, or that the run must not use,
        are skipped.

        Raises:
          ValueError: another run or a newer version of mjax saved the step.
          RuntimeError: the store does not answer.
        """
        if self.is_away:
            return None
        local = self._local_steps()
        ages = [age_of(step, manifest.save_id) for step, manifest in local.items()]
        try:
            for commit in self._newest_first(above=max(local, default=0)):
                step = commit.step
                if age_of(step, commit.save_id) <= max(ages, default=(0, 0)):
                    return None
                if step in self._refused:
                    continue
                if step in self.fetched:  # the restore has put it aside
                    why = "it has the bytes that were uploaded, but is damaged"
                    self._refused[step] = (self.fetched[step], why)
                    continue
                if found := self._usable(commit):
                    return found
        except UnavailableError as error:
            raise RuntimeError(
                f"{error}; start again when the store answers"
            ) from error
        return None

    def _newest_first(self, *, above: int) -> list[Commit]:
        """Return the commits of the store, those of the newest branch first.

        The store is read at the first call only. A commit that cannot be read is
        refused if its step is above `above`.
        """
        if not self._listed:
            self._listed = dict(self._remote.commits_and_damage())
        for step, damage in self._listed.items():
            if isinstance(damage, str) and step > above:
                self._refused[step] = (None, damage)
        found = [c for c in self._listed.values() if isinstance(c, Commit)]
        return sorted(found, key=lambda c: age_of(c.step, c.save_id), reverse=True)

    def _usable(self, commit: Commit) -> tuple[Commit, Manifest] | None:
        try:
            self._check_own(commit)
            manifest = self._remote.manifest(commit)
        except DamagedError as error:
            self._refused[commit.step] = (commit, str(error))
            return None
        if why := self._unfit(commit.step, manifest.run):
            self._refused[commit.step] = (commit, why)
            return None
        return commit, manifest

    def fetch(self) -> bool:
        """Copy the newest usable step to the work dir; return whether one was copied.

        Raises:
          ValueError, RuntimeError: as in `newest`; or the work dir has no space.
        """
        while text := self._agreement.decide(self._begin):
            order: _Order = checked_json.read(text, _Order)
            answers = self._agreement.all_of(json.dumps(self._download(order)))
            end = self._agreement.decide(lambda o=order, a=answers: self._end(o, a))
            if end == _FETCHED:
                self.fetched[order.commit.step] = order.commit
                if order.is_newer_branch:
                    self.branch_step = order.commit.step
                return True
        return False

    def _begin(self) -> str:
        found = self.newest()
        if found is None:
            return ""
        commit, _ = found
        starts = [start_of(found.save_id) for found in self._local_steps().values()]
        folder = self._local.begin(commit.step, commit.num_bytes)
        order = _Order(
            commit=commit,
            folder=str(folder),
            is_newer_branch=bool(starts) and start_of(commit.save_id) > max(starts),
        )
        return json.dumps(dataclasses.asdict(order))

    def _download(self, order: _Order) -> tuple[str, str]:
        """Download this process's files; return (damage, other error), "" if none."""
        rank, num = self._agreement.rank, self._agreement.num
        names = transfer.spread(order.commit.files, rank, num)
        try:
            transfer.download(
                self._remote,
                order.commit,
                Path(order.folder),
                names,
                option="--ckpt.dir",
            )
        except DamagedError as error:
            return str(error), ""
        except (OSError, ValueError, RuntimeError) as error:
            return "", in_words(error)
        return "", ""

    def _end(self, order: _Order, answers: list[str]) -> str:
        """Commit the downloaded step in the work dir, or delete it.

        Args:
          order: the order that all processes have carried out.
          answers: results of `_download` on each process, as JSON.
        Returns:
          `_FETCHED`, or `_DAMAGED` if the step in the object store is damaged.
        Raises:
          RuntimeError: a process could not download its files, or the disk failed.
        """
        folder, commit = epath.Path(order.folder), order.commit
        found = [json.loads(text) for text in answers]
        trouble = next((trouble for _, trouble in found if trouble), "")
        damage = next((damage for damage, _ in found if damage), "")
        try:
            if not (trouble or damage):
                pieces_in(folder, manifest_in(folder))
                self._leave_branch(commit.step)  # first, see its docstring
                self._local.commit(folder, commit.step)
                return _FETCHED
        except DamagedError as error:
            damage = f"{self._remote.url}: {error}"
        except OSError as error:  # the disk is full, or has failed
            trouble = in_words(error)
        delete(folder)
        if trouble:
            raise RuntimeError(
                f"step {commit.step} of {self._remote.url} cannot be fetched: {trouble}"
            )
        self._refused[commit.step] = (commit, damage)
        return _DAMAGED

    def _leave_branch(self, step: int) -> None:
        """Quarantine the local steps above `step`, a step of a newer branch.

        Call this before the step is committed: after a kill, a restart would otherwise
        resume from the local steps, because their numbers are higher.
        """
        for old in [*self._local_steps()]:
            if old > step:
                why = f"a later start went on from an older step, to step {step}"
                where = self._local.quarantine(old, why, is_damaged=False)
                self.left_branch.append(f"{where}: {why}")

    def check_lost(self) -> None:
        """Check that no step was skipped, so the run may begin at step 0.

        Raises:
          LostError: the store has steps, but all were skipped.
        """
        if found := self.refused():
            raise LostError(
                f"no checkpoint in {self._remote.url} is of use:\n  "
                + "\n  ".join(found)
                + "\nPut back a copy, or give another --ckpt.remote to begin anew"
            )

    def refused(self) -> list[str]:
        """Return one text per skipped step, with the reason; on process 0."""
        return [
            f"step {step} of {self._remote.url}: {why}"
            for step, (_, why) in sorted(self._refused.items())
        ]

    def put_aside(self, restored_step: int | None) -> None:
        """Put aside, in the store, the steps that were skipped; on process 0.

        Otherwise retention would keep them in place of good steps. The fence must be
        claimed.

        Args:
          restored_step: step from which this start continues, 0 for a new run; steps
            above it are on a branch that was left. None if nothing was restored yet.
        """
        told = {*self._refused}
        commits = dict(self._remote.commits())
        if self.is_away:  # nothing was checked yet
            for commit in commits.values():
                self._usable(commit)
            self.is_away = False
        for step in sorted(commits.keys() - self._refused.keys()):
            if restored_step is not None and step > restored_step:
                why = f"the run went on from step {restored_step}, on a newer branch"
                self._refused[step] = (commits[step], why)
        for step in sorted(self._refused.keys() - told):
            why = self._refused[step][1]
            _warn(f"step {step} of {self._remote.url} is put aside there: {why}")
        for step, (commit, why) in [*self._refused.items()]:
            if commit is not None:
                self._remote.put_aside(commit, why)
            del self._refused[step]

    def _check_own(self, commit: Commit) -> None:
        records = self._journal.records()
        if why := records.why_foreign(commit.step, commit.save_id):
            raise ValueError(
                f"--ckpt.remote {self._remote.url} has the steps of another run: {why}"
                ". Give another URL, or a new --work-dir to go on with that run"
            )

    def _local_steps(self) -> Mapping[int, Any]:
        """Return step -> manifest, for local steps whose manifests are good."""
        refused, found = self._journal.records().quarantined, {}
        for step in self._local.steps():
            with contextlib.suppress(DamagedError, ValueError):
                manifest = self._local.manifest(step)
                if (step, manifest.save_id) not in refused:
                    found[step] = manifest
        return found


def outer_urls(url: str, flag: str) -> list[str]:
    """Return the URLs that would contain this URL if they were URLs of runs.

    `URL/steps/7` and `URL/7` are inside `URL`.
    """
    place = address.parse(url, flag)
    parts = place.prefix.split("/")
    inside = [i for i, part in enumerate(parts) if part in FOLDERS]
    inside += [len(parts) - 1] * parts[-1].isdecimal()
    return [
        dataclasses.replace(place, prefix="/".join(parts[:i])).url for i in inside if i
    ]


def _warn(text: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be closed
        print(f"warning: {text}", file=sys.stderr, flush=True)
