"""Find and remove the folders of unfinished preparations.

A preparation tokenizes a corpus into a folder. Input: the folder of token files.
Output: folders in it that killed processes have left unfinished. A new preparation of
the same corpus would continue such a folder.
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
    """Folder of an unfinished preparation."""

    folder: pathlib.Path
    host: str
    """Host on which the preparation ran."""
    num_bytes: int
    age_s: float
    """Seconds since the folder was last written."""

    @property
    def line(self) -> str:
        """Description of the folder in one line."""
        return (
            f"{self.folder.name}  {self.num_bytes / 1e9:.2f} GB, last written "
            f"{duration(self.age_s)} ago on {self.host}"
        )


def find(cache_dir: pathlib.Path) -> list[LeftOver]:
    """List the folders that killed preparations have left, oldest first.

    A folder is not listed if a process of this host works on it, or if it cannot be
    read because another user owns it or it has just been completed.
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
    """Remove the folder of an unfinished preparation of this host.

    Returns:
      Whether the folder was removed. It is kept if a process works on it, or if it
      belongs to another host, whose processes are not visible here.
    Raises:
      ValueError: the folder cannot be removed.
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
