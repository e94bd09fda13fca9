"""Copy the files of a step between a folder and an object store; check their SHA-256.

Each process uploads the files that it wrote, because they are still in its host's page
cache. For a download, the files are divided among the processes. Both need memory for
only a few parts of one file (`stores.objects.CHUNK_BYTES` each).
"""

import contextlib
import errno
import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from mjax.ckpt.manifest import DamagedError
from mjax.ckpt.remote.steps import Commit, File, RemoteSteps
from mjax.stores.objects import ConflictError, MissingError

_SHA256 = "sha256"
# Matches the files that one process wrote. The names are those of `manifest.part_name`
# and of `layout.part_dir`, which would import jax.
_OF_PROCESS = re.compile(r"state/ocdbt\.process_([0-9]+)/|pieces\.([0-9]+)\.json$")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)
_TRIES = 2
"""Number of downloads with a wrong SHA-256 after which an object counts as damaged."""


def files_of(folder: Path) -> list[str]:
    """Return the paths of all files of a step, relative to its folder and sorted."""
    found = [
        (Path(path) / name).relative_to(folder).as_posix()
        for path, _, names in os.walk(folder)
        for name in names
    ]
    return sorted(found)


def share(files: Iterable[str], rank: int, num_processes: int) -> list[str]:
    """Return the files that a process must upload: those that it wrote.

    Process 0 merged and committed the step, so it uploads the files that belong to no
    process. If more processes wrote the step than exist now, their files are
    distributed round-robin.
    """
    return [file for file in files if _writer(file) % num_processes == rank]


def _writer(file: str) -> int:
    """Return the rank of the process that wrote a file of a step."""
    found = _OF_PROCESS.match(file)
    return int(found[1] or found[2]) if found else 0


def hashed(path: Path) -> File:
    """Read a file and return its size and SHA-256.

    Raises:
      OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, _SHA256)
        return File(num_bytes=file.tell(), sha256=digest.hexdigest())


def hashed_files(folder: Path, names: Iterable[str]) -> dict[str, File]:
    """Return name -> size and SHA-256, of files of a step; errors as in `hashed`."""
    return {name: hashed(folder / name) for name in names}


def upload(
    remote: RemoteSteps,
    step: int,
    save_id: str,
    folder: Path,
    files: Mapping[str, File],
) -> None:
    """Copy files of a local step to the object store, except those already there.

    Each object is written atomically, with the SHA-256 of the file in its metadata. An
    object with the same size and SHA-256 is not sent again, so an interrupted upload
    continues with the first missing file.

    Args:
      remote: steps of the object store.
      step: number of the step.
      save_id: id of the step's save.
      folder: folder of the local step.
      files: files to copy, as `hashed_files` returns them.
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
    remote: RemoteSteps,
    commit: Commit,
    folder: Path,
    names: Iterable[str],
    *,
    option: str,
) -> None:
    """Copy files of a step from the object store to a folder; check their SHA-256.

    Args:
      remote: steps of the object store.
      commit: commit of the step.
      folder: folder of the local step.
      names: paths of the files in the folder.
      option: flag or argument that sets the folder, named in errors.
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
            if error.errno is None:  # from the store, with a complete message
                raise
            raise OSError(
                f"cannot write {target}: {error.strerror}; "
                f"{_remedy(error, folder.parent)}, or give another {option}"
            ) from error


def _remedy(error: OSError, folder: Path) -> str:
    if error.errno in _NO_SPACE:
        return f"make room in {folder}"
    if error.errno in _NO_PERMISSION:
        return f"make {folder} writable"
    return f"check the disk of {folder}"


def check(
    remote: RemoteSteps, commit: Commit, name: str, target: Path | None = None
) -> None:
    """Read a file of a step from the object store, and check its SHA-256.

    Args:
      remote: steps of the object store.
      commit: commit of the step, with the expected size and SHA-256.
      name: path of the file in the step's folder.
      target: local file to write; None writes no file.
    Raises:
      DamagedError, OSError: as in `download`.
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
    """Return the files that a process must download; all get about as many bytes."""
    loads = [0] * num_processes
    chosen = []
    for name, file in sorted(files.items(), key=lambda item: -item[1].num_bytes):
        lightest = loads.index(min(loads))
        loads[lightest] += file.num_bytes + 1
        if lightest == rank:
            chosen.append(name)
    return chosen
