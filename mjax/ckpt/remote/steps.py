"""The steps of a run in an object store.

    owner.json                           which start of the run may write, see `fence`
    commits/120.json                     written last: files of the step, SHA-256, sizes
    steps/120/<save id>/checkpoint.json  the files of the step as in the work dir
    steps/120/<save id>/pieces.0.json
    steps/120/<save id>/state/...
    aside/120.<save id>.json             a step that must not be restored, and why

A step exists if its commit exists, and the commit names every file with its checksum.
So no object needs to be renamed, and no listing needs to be complete. Objects without a
commit are left over from a process that died; they are deleted after the next upload.
If a step is saved again, the new save has another save id, so its files never mix with
those of the previous save.

A step is complete in the work dir before it is copied to the store, so an unreachable
store loses no step and delays none.
"""

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePosixPath

from mjax.ckpt.config import Retention
from mjax.ckpt.manifest import (
    MAIN_FILE,
    DamagedError,
    Manifest,
    read_manifest,
    seal,
    unseal,
)
from mjax.stores.objects import (
    ABSENT,
    Absent,
    ConflictError,
    MissingError,
    ObjectStore,
    Version,
)

FOLDERS = _COMMITS, _STEPS, _ASIDE = "commits", "steps", "aside"


@dataclasses.dataclass(frozen=True, kw_only=True)
class File:
    """Size and checksum of a file of a step."""

    num_bytes: int
    sha256: str
    """SHA-256 in hexadecimal."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Commit:
    """Content of commits/<step>.json."""

    step: int
    save_id: str
    files: Mapping[str, File]
    """Path in the step's folder -> file."""
    eval_loss: float | None
    """Held-out loss, for retention; None if the step was not evaluated."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self.files.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Aside:
    """Content of aside/<step>.<save id>.json."""

    step: int
    save_id: str
    reason: str


class RemoteSteps:
    """The steps below one URL.

    In addition to the errors that each method names, all methods raise RefusedError and
    UnavailableError of `stores.objects`.
    """

    def __init__(self, store: ObjectStore) -> None:
        """Keep the store; this makes no request."""
        self.store = store

    @property
    def url(self) -> str:
        """URL of the steps."""
        return self.store.url

    def steps(self) -> list[int]:
        """List the committed steps, including damaged ones, in increasing order."""
        names = [found.name for found in self.store.objects(_COMMITS)]
        stems = [name.removeprefix(f"{_COMMITS}/").split(".")[0] for name in names]
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def commit(self, step: int) -> Commit:
        """Read the commit of a step.

        Raises:
          DamagedError: the commit is missing, not what was written, or of another step.
          ValueError: a newer version of mjax wrote the commit.
        """
        return self.commit_and_version(step)[0]

    def commit_and_version(self, step: int) -> tuple[Commit, Version]:
        """Read the commit of a step and its object's version; errors as in `commit`."""
        name = _commit_name(step)
        where = f"{self.url}/{name}"
        try:
            data, version = self.store.read_versioned(name)
            found: Commit = unseal(data.decode(), where, Commit)
        except (MissingError, UnicodeDecodeError) as error:
            raise DamagedError(f"{where} is missing or not text") from error
        if found.step != step:
            raise DamagedError(f"{where} is of step {found.step}")
        for name in found.files:
            if PurePosixPath(name).is_absolute() or ".." in name.split("/"):
                raise DamagedError(f"{where} has a file outside of the step: {name}")
        return found, version

    def object_name(self, commit: Commit, file: str) -> str:
        """Return the name of the object that holds a file of a step."""
        return f"{self._folder(commit.step, commit.save_id)}/{file}"

    def manifest(self, commit: Commit) -> Manifest:
        """Read the manifest of a step, and check it against the commit.

        Raises:
          DamagedError: the manifest is missing, or differs.
          ValueError: a newer version of mjax wrote the manifest.
        """
        name = self.object_name(commit, MAIN_FILE)
        where = f"{self.url}/{name}"
        try:
            found = read_manifest(self.store.read(name).decode(), where)
        except (MissingError, UnicodeDecodeError) as error:
            raise DamagedError(f"{where} is missing or not text") from error
        if (found.step, found.save_id) != (commit.step, commit.save_id):
            raise DamagedError(f"{where} is of step {found.step}, {found.save_id}")
        return found

    def written_at(self, step: int) -> float:
        """Return the time of a commit in seconds since 1970, by the store's clock."""
        return self.store.find(_commit_name(step)).modified_s

    # ------------------------------------------------------------------------- writing

    def missing(self, commit: Commit) -> str:
        """Return a text on which files are missing or have a wrong size, or ""."""
        folder = self._folder(commit.step, commit.save_id)
        sizes = {o.name: o.num_bytes for o in self.store.objects(folder)}
        for file, expected in commit.files.items():
            found = sizes.get(self.object_name(commit, file))
            if found != expected.num_bytes:
                return f"{file} has {found} bytes there, not {expected.num_bytes}"
        return ""

    def write_commit(self, commit: Commit) -> None:
        """Commit a step whose files are all uploaded; it replaces any older save.

        Raises:
          ConflictError: another process committed this step at the same time.
        """
        expected: Version | Absent = ABSENT
        with contextlib.suppress(MissingError):
            _, expected = self.store.read_versioned(_commit_name(commit.step))
        text = seal(dataclasses.asdict(commit))
        try:
            self.store.write(
                _commit_name(commit.step), text.encode(), expected=expected
            )
        except ConflictError:
            # The answer to an earlier attempt at this request may have been lost.
            if self.store.read(_commit_name(commit.step)) != text.encode():
                raise

    def put_aside(self, commit: Commit, reason: str) -> str:
        """Withdraw a step's commit, keeping its files; return the new object's URL."""
        name = f"{_ASIDE}/{commit.step}.{commit.save_id}.json"
        body = Aside(step=commit.step, save_id=commit.save_id, reason=reason)
        self.store.write(name, seal(dataclasses.asdict(body)).encode())
        self.store.delete([_commit_name(commit.step)])
        return f"{self.url}/{name}"

    def aside(self) -> dict[tuple[int, str], str]:
        """Return (step, save id) -> reason, for the steps that were put aside."""
        found = {}
        for entry in [*self.store.objects(_ASIDE)]:
            with contextlib.suppress(MissingError, DamagedError, UnicodeDecodeError):
                text = self.store.read(entry.name).decode()
                body: Aside = unseal(text, entry.name, Aside)
                found[body.step, body.save_id] = body.reason
        return found

    def prune(self, retention: Retention, *, newest: int) -> list[int]:
        """Delete the steps that no rule keeps; return the deleted steps.

        Commits that cannot be read stay, and do not count for the rules.

        Args:
          retention: rules for keeping steps.
          newest: step that was committed last; it is kept whatever its number.
        """
        commits = dict(self.commits())
        losses = {step: commit.eval_loss for step, commit in commits.items()}
        doomed = sorted(losses.keys() - retention.stays(losses) - {newest})
        for step in doomed:
            self.store.delete([_commit_name(step)])
            self._delete_folder(self._folder(step, commits[step].save_id))
        return doomed

    def clean(self, keep: Collection[tuple[int, str]]) -> None:
        """Delete the files of saves without a commit, unless they were put aside.

        Args:
          keep: (step, save id) of saves to keep, because they may still be uploaded.
        """
        kept = {(commit.step, commit.save_id) for _, commit in self.commits()}
        kept |= {*self.aside(), *keep}
        steps = {*self.steps()}
        for step in self.store.folders(_STEPS):
            if not step.isdecimal():
                continue
            for save_id in self.store.folders(f"{_STEPS}/{step}"):
                number = int(step)
                # If the commit of a step cannot be read, its save id is unknown, so all
                # saves of the step are kept.
                is_unknown = number in steps and all(s != number for s, _ in kept)
                if (number, save_id) not in kept and not is_unknown:
                    self._delete_folder(self._folder(number, save_id))

    def commits(self) -> Iterator[tuple[int, Commit]]:
        """Yield (step, commit) for readable commits, in increasing order."""
        for step in self.steps():
            with contextlib.suppress(DamagedError, ValueError):
                yield step, self.commit(step)

    def commits_and_damage(self) -> Iterator[tuple[int, Commit | str]]:
        """Yield (step, commit or text of its damage), in increasing order.

        Raises:
          ValueError: a newer version of mjax wrote a commit.
        """
        for step in self.steps():
            try:
                yield step, self.commit(step)
            except DamagedError as error:
                yield step, str(error)

    def _delete_folder(self, folder: str) -> None:
        self.store.delete([found.name for found in self.store.objects(folder)])

    def _folder(self, step: int, save_id: str) -> str:
        return f"{_STEPS}/{step}/{save_id}"


def _commit_name(step: int) -> str:
    return f"{_COMMITS}/{step}.json"
