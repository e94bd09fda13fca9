"""Files of a step between a local folder and an object store, with their SHA-256.

Each process uploads the files that it has written, which are in its host's cache of
files, and downloads its share of those that are missing. Memory is that of a few parts
of one file (`stores.objects.CHUNK_BYTES`).
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from mjax.ckpt.manifest import DamagedError
from mjax.ckpt.remote.steps import Commit, File, RemoteSteps
from mjax.stores.objects import ConflictError, MissingError

_SHA256 = "sha256"
# As `layout.part_dir`, which imports jax, and `manifest.part_name` name them.
_OF_PROCESS = re.compile(r"state/ocdbt\.process_([0-9]+)/|pieces\.([0-9]+)\.json$")
_TRIES = 2
"""Downloads of a file that arrives changed, before the object counts as damaged."""


def files_of(folder: Path) -> list[str]:
    """List the files of a step by their path in its folder."""
    found = [
        (Path(path) / name).relative_to(folder).as_posix()
        for path, _, names in os.walk(folder)
        for name in names
    ]
    return sorted(found)


def share(files: Iterable[str], rank: int, num_processes: int) -> list[str]:
    """Return the files that a process uploads: those that it has written.

    Process 0 merged and committed the step, so it uploads files that belong to no
    process. If more processes wrote the step than there are now, their files are
    distributed round-robin.
    """
    return [file for file in files if _writer(file) % num_processes == rank]


def _writer(file: str) -> int:
    """Return the process that has written a file of a step."""
    found = _OF_PROCESS.match(file)
    return int(found[1] or found[2]) if found else 0


def hashed(path: Path) -> File:
    """Read a file and return its size and SHA-256.

    Raises:
      OSError: it cannot be read.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, _SHA256)
        return File(num_bytes=file.tell(), sha256=digest.hexdigest())


def hashed_files(folder: Path, names: Iterable[str]) -> dict[str, File]:
    """Return size and SHA-256 of files of a local step, by name; raises as `hashed`."""
    return {name: hashed(folder / name) for name in names}


def upload(
    remote: RemoteSteps,
    step: int,
    save_id: str,
    folder: Path,
    files: Mapping[str, File],
) -> None:
    """Copy files of a local step into the store; those that are there already stay.

    An object carries the SHA-256 that was taken before the upload, and appears whole.
    So an interrupted upload continues with the first missing file.

    Args:
      remote: the steps.
      step: number of the step.
      save_id: id of its save.
      folder: folder of the local step.
      files: files to copy, see `hashed_files`.
    Raises:
      OSError: a file cannot be read, or the store does not answer.
    """
    for name, file in files.items():
        commit = Commit(step=step, save_id=save_id, files={}, eval_loss=None)
        target = remote.object_name(commit, name)
        with contextlib.suppress(MissingError):
            found = remote.store.find(target)
            if (found.num_bytes, found.facts.get(_SHA256)) == (
                file.num_bytes,
                file.sha256,
            ):
                continue
        remote.store.upload(target, folder / name, facts={_SHA256: file.sha256})


def download(
    remote: RemoteSteps, commit: Commit, folder: Path, names: Iterable[str]
) -> None:
    """Copy files of a step from the store into a local folder, and compare them.

    Raises:
      DamagedError: an object is missing, or is not what was uploaded.
      OSError: a file cannot be written, or the store does not answer.
    """
    for name in names:
        target = folder / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            check(remote, commit, name, target)
        except OSError as error:
            if error.errno is None:  # of the store, whose message is complete
                raise
            raise OSError(
                f"cannot write {target}: {error.strerror}; make room in "
                f"{folder.parent}, or give another --ckpt.dir"
            ) from error


def check(
    remote: RemoteSteps, commit: Commit, name: str, target: Path | None = None
) -> None:
    """Read a file of a step from the store and compare it with its SHA-256.

    Args:
      remote: the steps.
      commit: commit of the step.
      name: name of the file.
      target: local file to write; None writes no file.
    Raises:
      DamagedError, OSError: as `download`.
    """
    expected = commit.files[name]
    where = f"{remote.url}/{remote.object_name(commit, name)}"
    reason = ""
    for _ in range(_TRIES):
        try:
            found = _copy(remote, remote.object_name(commit, name), target)
        except MissingError as error:
            raise DamagedError(f"{where} is missing") from error
        except ConflictError as error:
            raise DamagedError(f"{where} was replaced while it was read") from error
        if found == expected:
            return
        reason = "differs from what was uploaded (SHA-256)"
        if found.num_bytes != expected.num_bytes:
            reason = f"has {found.num_bytes} bytes, not {expected.num_bytes}"
    raise DamagedError(f"{where} {reason}")


def _copy(remote: RemoteSteps, name: str, target: Path | None) -> File:
    digest, num_bytes = hashlib.new(_SHA256), 0
    with open(target or os.devnull, "wb") as file:
        for chunk in remote.store.stream(name):
            digest.update(chunk)
            num_bytes += len(chunk)
            file.write(chunk)
    return File(num_bytes=num_bytes, sha256=digest.hexdigest())


def spread(files: Mapping[str, File], rank: int, num_processes: int) -> list[str]:
    """Return the files that a process downloads: about as many bytes for each."""
    loads = [0] * num_processes
    chosen = []
    for name, file in sorted(files.items(), key=lambda item: -item[1].num_bytes):
        lightest = loads.index(min(loads))
        loads[lightest] += file.num_bytes + 1
        if lightest == rank:
            chosen.append(name)
    return chosen
