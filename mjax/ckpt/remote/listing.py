"""List and read the steps at a URL, for `python -m mjax.ckpt COMMAND URL`.

A URL is the --ckpt.remote of a run, or one step below it, `URL/120`. Nothing is changed
there. The journal of the run is not read, so the state of a step depends only on the
object store.
"""

import dataclasses
from pathlib import Path
from typing import Literal

from mjax.ckpt.manifest import DamagedError, Manifest
from mjax.ckpt.remote import transfer
from mjax.ckpt.remote.steps import Commit, RemoteSteps
from mjax.ckpt.store import Store, delete, manifest_in, pieces_in
from mjax.stores import address
from mjax.stores.opened import open_store

_PATIENCE_S = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteEntry:
    """One step of a listing."""

    name: str
    """The step's number, followed by its save id if the step was put aside."""
    state: Literal["good", "damaged", "newer", "quarantined"]
    """State according to the commit and checkpoint.json; the arrays were not read."""
    reason: str | None = None
    """Why the step is not good; None if it is."""
    num_bytes: int | None = None
    """Bytes of all arrays. This field and those below are None without a manifest."""
    num_leaves: int | None = None
    eval_loss: float | None = None
    written_at: float | None = None
    """Time of the commit in seconds since 1970, by the store's clock."""


def find(url: str) -> tuple[RemoteSteps, int | None]:
    """Open a URL; return its steps, and the step that the URL names, or None.

    A URL that ends in a number names a run, not a step, if steps exist below it.

    Raises:
      ValueError: the URL is invalid, obstore is not installed, or the store refuses
        access.
      UnavailableError: the store does not answer.
    """
    place = address.parse(url, "PATH")
    above, _, last = place.prefix.rpartition("/")
    remote = _open(place)
    if not last.isdecimal() or remote.steps() or remote.aside():
        return remote, None
    return _open(dataclasses.replace(place, prefix=above)), int(last)


def _open(place: address.Address) -> RemoteSteps:
    return RemoteSteps(open_store(place, "PATH", patience_s=_PATIENCE_S))


def choose(remote: RemoteSteps, only: int | None, step: int | None) -> list[int]:
    """Return the selected steps, oldest first.

    Args:
      remote: steps of the URL.
      only: step that the URL names; None if it names a run.
      step: --step; None selects all steps.
    Raises:
      ValueError: there is no step, or the selected step is absent.
    """
    steps, wanted = remote.steps(), step if only is None else only
    if not steps:
        raise ValueError(f"there is no checkpoint in {remote.url}")
    if step not in (None, wanted):
        raise ValueError(f"the URL names step {only}; leave out --step {step}")
    if wanted is not None and wanted not in steps:
        raise ValueError(
            f"there is no step {wanted} in {remote.url}, only "
            f"{', '.join(map(str, steps))}; give one of these as --step"
        )
    return steps if wanted is None else [wanted]


def entries(remote: RemoteSteps, only: int | None) -> list[RemoteEntry]:
    """List the steps from their commits, then the steps that were put aside.

    Raises:
      ValueError: there is no step of any kind, or not the step that the URL names.
    """
    aside = {} if only is not None else remote.aside()
    steps = remote.steps() if aside else choose(remote, only, None)
    return [
        *(_entry(remote, step) for step in steps),
        *(
            RemoteEntry(name=f"{step}.{save_id}", state="quarantined", reason=reason)
            for (step, save_id), reason in sorted(aside.items())
        ),
    ]


def _entry(remote: RemoteSteps, step: int) -> RemoteEntry:
    try:
        manifest = described(remote, step)[1]
    except DamagedError as error:
        return RemoteEntry(name=str(step), state="damaged", reason=str(error))
    except ValueError as error:
        return RemoteEntry(name=str(step), state="newer", reason=str(error))
    return RemoteEntry(
        name=str(step),
        state="good",
        num_bytes=manifest.num_bytes,
        num_leaves=len(manifest.leaves),
        eval_loss=manifest.run.get("eval_loss"),
        written_at=remote.written_at(step),
    )


def described(remote: RemoteSteps, step: int) -> tuple[Commit, Manifest]:
    """Return the commit and the manifest of a step.

    Raises:
      DamagedError: commit or manifest is missing, or is not what was written.
      ValueError: a newer version of mjax wrote the step.
    """
    commit = remote.commit(step)
    return commit, remote.manifest(commit)


def verify(remote: RemoteSteps, step: int) -> int:
    """Check the SHA-256 of every file of a step; return the number of bytes.

    Raises:
      DamagedError: a file is missing or differs.
    """
    commit, _ = described(remote, step)
    for name in commit.files:
        transfer.check(remote, commit, name)
    return commit.num_bytes


def fetch(remote: RemoteSteps, step: int, out: Store) -> Commit:
    """Copy a step to a folder of checkpoints, check its files; return its commit.

    Raises:
      DamagedError: a file is missing or its SHA-256 differs; the folder did not change.
      ValueError: the folder already has this step.
      OSError: the folder cannot be written.
    """
    if step in out.steps():
        raise ValueError(f"{out.path(step)} exists; give another folder")
    commit, _ = described(remote, step)
    folder = out.begin(step, commit.num_bytes)
    try:
        transfer.download(remote, commit, Path(folder), commit.files, option="OUT")
        pieces_in(folder, manifest_in(folder))
        out.commit(folder, step)
    except BaseException:
        delete(folder)
        raise
    return commit
