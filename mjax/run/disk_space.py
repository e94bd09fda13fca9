"""Say that a disk is full, with the path, the free bytes and the way on.

Input: an OSError of a write. Output: an error for the user. A run that meets a full
disk at its start ends: what it saved earlier stays, and the same command resumes it.
During training a failed save is tried again, see `run.loop`.
"""

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class NoSpaceError(RuntimeError):
    """A disk or a quota is full."""


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Replace errors of a full disk inside a with statement; pass on all others.

    Args:
      folder: folder that is written, for errors that name no file.
    Raises:
      NoSpaceError: the disk or the quota is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        path = Path(error.filename or folder)
        there = path if path.is_dir() else path.parent
        free = f"{shutil.disk_usage(there).free:,}" if there.is_dir() else "unknown"
        raise NoSpaceError(
            f"cannot write {path}: {error.strerror}, {free} bytes are free; make room "
            "there, then the same command resumes the run; what is saved stays"
        ) from error
