"""Hash files with SHA-256, reading each file only once until it changes.

The cache folder keeps a table of hashes. Its key is a file's device, inode, size and
time of status change (ctime). The kernel sets ctime whenever content, name or times
change, and no program can set it. A file that changed within the last two seconds is
not added: the file system's clock may be too coarse to show another change.
"""

import hashlib
import logging
import os
import pathlib
import time
from collections.abc import Callable, Sequence

from mjax.data import cache_files
from mjax.data.unfinished import SAVE_S, Meter

_TABLE = "file_hashes.json"
_SETTLED_NS = 2_000_000_000  # FAT's clock is the coarsest: 2 s
_log = logging.getLogger(__name__)

State = tuple[int, int, int, int]
"""State of a file: device, inode, size in bytes, ctime in nanoseconds."""


def hash_files(
    paths: Sequence[pathlib.Path], cache_dir: pathlib.Path
) -> dict[pathlib.Path, str]:
    """Return path -> hexadecimal SHA-256; read only files that are not in the table.

    If several processes of a machine hash the same files, the first one does so and the
    others wait.

    Args:
      paths: paths of regular files.
      cache_dir: folder of the table of hashes. If it is not writable, the files are
        hashed at every start.
    Raises:
      ValueError: a file cannot be read, or changes while it is read.
    """
    table = cache_dir / _TABLE
    known, states = _read(table), {path: _state_of(path) for path in paths}
    if all(state in known for state in states.values()):
        return {path: known[state] for path, state in states.items()}
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(cache_dir, os.W_OK)
    except OSError:
        is_writable = False
    if not is_writable:
        _log.warning("hashes of files cannot be remembered in %s", cache_dir)
        return _hash_missing(paths, known)
    with cache_files.locked(table):
        known = _read(table)  # another process may have hashed the same files
        num_known = len(known)
        try:
            return _hash_missing(paths, known, table)
        finally:  # after an interrupt, hashes computed so far are kept
            if len(known) > num_known:
                _write(table, known)


def _hash_missing(
    paths: Sequence[pathlib.Path],
    known: dict[State, str],
    table: pathlib.Path | None = None,
) -> dict[pathlib.Path, str]:
    """Hash the files that are not in the table; add all but those changed just now.

    Args:
      paths: paths of the files.
      known: hashes of the table; new hashes are added in place.
      table: file in which hashes are saved every SAVE_S seconds, so a killed process
        loses little; None saves nothing.
    Returns:
      Path -> hexadecimal SHA-256, for all paths.
    """
    found, saved = {}, time.monotonic()
    sizes = {path: _state_of(path)[2] for path in paths}
    meter = Meter("hashing", sum(sizes.values()))
    for path in paths:
        meter.add(sizes[path])
        if table is not None and time.monotonic() - saved >= SAVE_S:
            _write(table, known)
            saved = time.monotonic()
        state = _state_of(path)
        if state not in known:
            started_ns = time.time_ns()
            digest = _hash(path, state)
            if state[3] > started_ns - _SETTLED_NS:
                found[path] = digest
                continue
            known[state] = digest
        found[path] = known[state]
    return found


def _hash(path: pathlib.Path, state: State) -> str:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if _state_of(path) != state:
        raise changed(path)
    return digest


class TouchedError(ValueError):
    """A file was changed while it was read, but now has its old content again."""


class Unchanged:
    """Detects changes of files during a long read, even changes that were undone."""

    def __init__(self, paths: Sequence[pathlib.Path]) -> None:
        """Record the present state of the files.

        Raises:
          ValueError: a file cannot be read.
        """
        self._states = {path: _state_of(path) for path in paths}

    def check(self, has_content: Callable[[], None]) -> None:
        """Refuse files that were changed since this object was created.

        Args:
          has_content: function that raises ValueError if the content of a file changed.
        Raises:
          TouchedError: a file was changed, but its content is as before; the content
            may have been different when it was read.
          ValueError: from `has_content`, or a file cannot be read.
        """
        for path, state in self._states.items():
            if _state_of(path) != state:
                has_content()
                raise TouchedError(
                    f"{path} was changed while it was read, and changed back or "
                    "touched; start again when nothing writes to the corpus, what was "
                    "prepared before that is kept"
                )


def changed(path: pathlib.Path) -> ValueError:
    """Return the error for a file that changed while it was read."""
    return ValueError(
        f"{path} changed while it was read; start again when nothing writes to the "
        "corpus"
    )


def _state_of(path: pathlib.Path) -> State:
    try:
        stat = path.stat()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_ctime_ns


def _read(table: pathlib.Path) -> dict[State, str]:
    """Return the hashes of the table; empty if it is missing or damaged."""
    if not table.exists():
        return {}
    try:
        rows = cache_files.read_json(table)
    except cache_files.DamagedFileError as error:
        _log.warning("%s; files are hashed again", error)
        return {}
    return {(device, inode, size, ctime): d for device, inode, size, ctime, d in rows}


def _write(table: pathlib.Path, known: dict[State, str]) -> None:
    """Write the table, with only the newest state of each file."""
    newest = {(state[0], state[1]): (*state, digest) for state, digest in known.items()}
    with cache_files.written_whole(table) as temporary:
        cache_files.write_json(temporary, list(newest.values()))
