"""Preparations that never ended: folders beside the token files, found and removed.

Enters: the folder of token files. Leaves: what killed processes have left in it that no
process continues by itself, because nobody has asked for the same corpus since.
"""

import contextlib
import pathlib
import shutil
import socket
import time
from typing import NamedTuple

from mjax.data import cache_files
from mjax.data.unfinished import duration


class LeftOver(NamedTuple):
    """What is left of a preparation."""

    folder: pathlib.Path
    host: str
    """On which it ran."""
    num_bytes: int
    age_s: float
    """Seconds since it was last written."""

    @property
    def line(self) -> str:
        """For a person."""
        return (
            f"{self.folder.name}  {self.num_bytes / 1e9:.2f} GB, last written "
            f"{duration(self.age_s)} ago on {self.host}"
        )


def find(cache_dir: pathlib.Path) -> list[LeftOver]:
    """List what killed preparations have left, the oldest first.

    Folders that a process of this host works on are not listed, nor those that cannot
    be looked into: they end or belong to someone else.
    """
    found = []
    for folder in sorted(cache_dir.glob("*.tmp-*")):
        parts = cache_files.temporary_parts(folder.name)
        if parts is None or not folder.is_dir():
            continue
        with contextlib.suppress(OSError, cache_files.UnwritableError):
            with cache_files.locked_if_free(cache_dir / parts[0]) as is_free:
                stats = [file.stat() for file in [folder, *folder.iterdir()]]
            if is_free:
                num_bytes = sum(stat.st_size for stat in stats)
                age_s = time.time() - max(stat.st_mtime for stat in stats)
                found.append(LeftOver(folder, parts[1], num_bytes, age_s))
    return sorted(found, key=lambda left: -left.age_s)


def remove(left: LeftOver) -> bool:
    """Remove what is left of a preparation of this host.

    Returns:
      whether it was removed: not if a process works on it now, or if it is of another
      host, whose processes cannot be seen from here.
    Raises:
      ValueError: it cannot be removed.
    """
    if left.host != socket.gethostname():
        return False
    parts = cache_files.temporary_parts(left.folder.name)
    assert parts is not None
    try:
        path = left.folder.with_name(parts[0])
        with cache_files.locked_if_free(path) as is_free:
            if is_free:
                shutil.rmtree(left.folder)
        return is_free
    except OSError as error:
        raise cache_files.unwritable(left.folder.parent, error) from None
