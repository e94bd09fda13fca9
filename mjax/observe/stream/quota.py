"""Quota on a host: compress the oldest files, or delete them if that is not enough.

Input: span files or logs of a host, the allowed actions for each, and a quota. Output:
a list of actions (pure), and their execution. A file that a process may still write is
never touched. Files that are not in the store are deleted only on request.
"""

import dataclasses
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from mjax.observe import gzipped

_RATIO = 5
"""Expected compression ratio, for planning. Span files of the demo shrink to a seventh;
the next round uses the actual size."""

_DELETED = ".deleted"
"""Folder below profile/ for a window that is being deleted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spool:
    """A span file, a log, or the folder of a recorded window, on this host."""

    path: Path
    disk_bytes: int
    modified_s: float
    is_closed: bool
    """Whether the writing process has ended, or a later one has replaced it."""
    is_stored: bool
    """Whether all complete lines of the file are in the store."""
    is_log: bool = False
    """Whether the file is a log, which may be compressed without being in the store."""

    @property
    def small_bytes(self) -> int:
        """Size after compression, if compression is allowed."""
        may = self.is_closed and (self.is_stored or self.is_log)
        if may and gzipped.can_compress(self.path, self.disk_bytes):
            return self.disk_bytes // _RATIO
        return self.disk_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Action:
    """An action on a file."""

    path: Path
    kind: Literal["compress", "delete", "drop"]
    """`drop` deletes a file that is not in the store."""


def plan(
    files: Sequence[Spool], quota_bytes: int, *, drop_unstored: bool = False
) -> tuple[list[Action], int]:
    """Choose actions that bring the files below a quota.

    Args:
      files: all files of the host.
      quota_bytes: limit of their total size.
      drop_unstored: whether to also delete closed files that are not stored.
    Returns:
      actions: in order. First the oldest files are deleted, as few as would be enough
        if all others were compressed. Then the oldest remaining files are compressed,
        as few as necessary.
      excess: bytes above the quota that remain after these actions.
    """
    oldest = sorted(files, key=lambda file: (file.modified_s, file.path))
    stored = [file for file in oldest if file.is_closed and file.is_stored]
    lost = [file for file in oldest if file.is_closed and not file.is_stored]
    small = {file.path: file.small_bytes for file in files}
    least = sum(small.values())
    actions: list[Action] = []
    kept = {file.path: file.disk_bytes for file in oldest}
    for file in stored + (lost if drop_unstored else []):
        if least <= quota_bytes:
            break
        least -= small[file.path]
        del kept[file.path]
        kind = "delete" if file.is_stored else "drop"
        actions.append(Action(path=file.path, kind=kind))
    excess = sum(kept.values()) - quota_bytes
    for path, size in kept.items():
        if excess > 0 and small[path] < size:
            actions.append(Action(path=path, kind="compress"))
            excess -= size - small[path]
    return actions, max(excess, 0)


def carry_out(action: Action) -> None:
    """Compress or delete a file.

    If the process is killed while it compresses, all lines are in at least one file.

    Raises:
      OSError: there is no space to compress, or the file is gone.
    """
    if action.kind == "compress":
        gzipped.compress(put_aside(action.path))
    elif action.path.is_dir():
        _delete_window(action.path)
    else:
        action.path.unlink(missing_ok=True)


def put_aside(path: Path) -> Path:
    """Rename a rotated log, so that the next rotation keeps it; return the new path.

    Raises:
      OSError: it is gone, or was written meanwhile.
    """
    if not path.name.endswith(".log.1"):
        return path
    modified_s = path.stat().st_mtime
    when = time.strftime("%Y%m%dT%H%M%S", time.gmtime(modified_s))
    kept = path.with_name(f"{path.name.removesuffix('1')}{when}")
    if kept.exists() or kept.with_name(kept.name + gzipped.SUFFIX).exists():
        raise FileExistsError(f"{kept.name} already exists")
    path.rename(kept)
    if kept.stat().st_mtime != modified_s:
        raise OSError("it has just been rotated")
    return kept


def _delete_window(path: Path) -> None:
    """Delete a folder in one step; after a kill, the next call deletes the rest."""
    step, generation = path.parent, path.parent.parent
    aside = generation.parent / _DELETED
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir()
    path.rename(aside / path.name)
    shutil.rmtree(aside)
    for folder in (step, generation):
        if not any(folder.iterdir()):
            folder.rmdir()
