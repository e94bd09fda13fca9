"""Bring the newest step of an object store into the work dir, if it is newer.

Input: the steps there, and those of the work dir. Output: the step as a folder of the
work dir, in the files that were saved, each compared with its SHA-256; it is then
restored like any other. A step with a missing or changed object is skipped with a
message, and the previous one is used. All processes download, each about as many bytes.

The newest step is that of the newest branch (`journal.age_of`), not the one with the
highest number: a run that fell back while the store did not answer, or on another
machine, has left the higher steps of the earlier branch. They are put aside.
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
    """The step that all processes download."""

    commit: Commit
    folder: str
    is_newer_branch: bool
    """Whether a later start than those of all local steps saved it."""


class Source:
    """The object store as a source of steps; every process makes the same calls."""

    def __init__(
        self,
        remote: RemoteSteps,
        local: Store,
        journal: Journal,
        agreement: Agreement,
        unfit: Unfit,
        outer: Sequence[ObjectStore],
    ) -> None:
        """Look nowhere yet; other arguments as for `Recovery`.

        Args:
          remote: steps of the run.
          local: steps of the work dir.
          journal: journal of the run.
          agreement: agreement of the training threads.
          unfit: decides which steps the run must not use.
          outer: see `outer_urls`.
        """
        self._outer = outer
        self._remote, self._local, self._journal = remote, local, journal
        self._agreement, self._unfit = agreement, unfit
        self.is_away = False
        """Whether the store did not answer at the start, on process 0."""
        self._refused: dict[int, tuple[Commit | None, str]] = {}
        self._listed: dict[int, Commit | str] = {}
        self.fetched: dict[int, Commit] = {}
        """Steps that were downloaded into the work dir."""
        self.branch_step: int | None = None
        """The last of them that is of a newer branch than the work dir."""
        self.left_branch: list[str] = []
        """Steps of the work dir whose branch was left, and why; on process 0."""

    def look(self) -> None:
        """See that the store may be used by this run; on process 0.

        A small object is written and deleted: who may read may not always write. A
        store that does not answer is an error only if the work dir has no step.

        Raises:
          ValueError: it refuses, holds the steps of another run, or is inside another
            run's URL.
          RuntimeError: it does not answer.
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
        """Check that the newest step there, if any, may be of this run; on process 0.

        Raises:
          ValueError: another run saved it, or a newer version of mjax; or the URL is
            inside that of another run.
          UnavailableError: the store does not answer.
        """
        self._check_outside()
        for step in reversed(self._remote.steps()):
            with contextlib.suppress(DamagedError):
                self._check_own(self._remote.commit(step))
                return

    def _check_outside(self) -> None:
        """Refuse a URL among the objects of another run, which may delete them."""
        for outer in self._outer:
            # Who may only use this URL may be refused above it.
            with contextlib.suppress(MissingError, RefusedError):
                outer.find(OWNER_FILE)
                raise ValueError(
                    f"--ckpt.remote {self._remote.url} is inside {outer.url}, which "
                    f"has the checkpoints of a run. Give {outer.url} to go on with "
                    "that run, or a URL outside of it for another run"
                )

    def newest(self) -> tuple[Commit, Manifest] | None:
        """Return the newest step there, if it is newer than all of the work dir.

        On process 0. Steps that are damaged, or that the run must not use, are passed
        over.

        Raises:
          ValueError: another run saved it, or a newer version of mjax.
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
                if step in self.fetched:  # and the restore has put it aside
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
        """Return the commits there, those of the newest branch first.

        They are read once. Commits that cannot be read are refused if their step is
        higher than all local ones.
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
        """Bring the newest usable step into the work dir; say whether one was brought.

        Raises:
          ValueError, RuntimeError: as `newest`; or the work dir has no space.
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
        """Download the share of this process; return damage and trouble."""
        rank, num = self._agreement.rank, self._agreement.num
        names = transfer.spread(order.commit.files, rank, num)
        try:
            transfer.download(self._remote, order.commit, Path(order.folder), names)
        except DamagedError as error:
            return str(error), ""
        except (OSError, ValueError, RuntimeError) as error:
            return "", in_words(error)
        return "", ""

    def _end(self, order: _Order, answers: list[str]) -> str:
        """Let the step appear in the work dir, or delete what was downloaded."""
        folder, commit = epath.Path(order.folder), order.commit
        found = [json.loads(text) for text in answers]
        trouble = next((trouble for _, trouble in found if trouble), "")
        damage = next((damage for damage, _ in found if damage), "")
        try:
            if not (trouble or damage):
                pieces_in(folder, manifest_in(folder))
                self._leave_branch(commit.step)  # first: a kill would let them win
                self._local.commit(folder, commit.step)
                return _FETCHED
        except DamagedError as error:
            damage = f"{self._remote.url}: {error}"
        except OSError as error:  # the disk is full, or fails
            trouble = in_words(error)
        delete(folder)
        if trouble:
            raise RuntimeError(
                f"step {commit.step} of {self._remote.url} cannot be fetched: {trouble}"
            )
        self._refused[commit.step] = (commit, damage)
        return _DAMAGED

    def _leave_branch(self, step: int) -> None:
        """Move the local steps above a newer one of the store out of its way."""
        for old in [*self._local_steps()]:
            if old > step:
                why = f"a later start went on from an older step, to step {step}"
                where = self._local.quarantine(old, why, is_damaged=False)
                self.left_branch.append(f"{where}: {why}")

    def check_lost(self) -> None:
        """Check that the run may begin at step 0, since no step is of use.

        Raises:
          LostError: the store has steps, and all were passed over.
        """
        if found := self.refused():
            raise LostError(
                f"no checkpoint in {self._remote.url} is of use:\n  "
                + "\n  ".join(found)
                + "\nPut back a copy, or give another --ckpt.remote to begin anew"
            )

    def refused(self) -> list[str]:
        """Say which steps were passed over, and why; on process 0."""
        return [
            f"step {step} of {self._remote.url}: {why}"
            for step, (_, why) in sorted(self._refused.items())
        ]

    def put_aside(self, restored_step: int | None) -> None:
        """Note the steps that were passed over in the store; on process 0.

        The fence must be claimed. They would take the place of good ones otherwise.

        Args:
          restored_step: step from which this start goes on, 0 for a new run; steps
            above it are of a branch that was left. None: nothing was restored yet.
        """
        told = {*self._refused}
        commits = dict(self._remote.commits())
        if self.is_away:  # nothing was passed over yet
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
        """Return the steps of the work dir whose manifests are good."""
        refused, found = self._journal.records().quarantined, {}
        for step in self._local.steps():
            with contextlib.suppress(DamagedError, ValueError):
                manifest = self._local.manifest(step)
                if (step, manifest.save_id) not in refused:
                    found[step] = manifest
        return found


def outer_urls(url: str, flag: str) -> list[str]:
    """Return the URLs of runs whose objects would contain a URL, if they are runs.

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
    with contextlib.suppress(OSError):  # nobody reads stderr
        print(f"warning: {text}", file=sys.stderr, flush=True)
