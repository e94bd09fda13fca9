"""Room on the host: files of spans that were stored are compressed, then deleted.

Enters: the files of a host, how far each is stored, and a quota. Leaves: what to do,
the oldest first, as a list (pure), and its execution. A file that is not stored to its
last line, or that a process may still write, is never touched, unless a flag says so.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from mjax.observe import gzipped

_RATIO = 5
"""By how much compression is expected to shrink a file, to plan with. Files of spans of
the demo shrink by 7; the next round counts what came out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spool:
    """One file of spans on this host."""

    path: Path
    disk_bytes: int
    modified_s: float
    is_closed: bool
    """Its process has ended, or a later one has taken its place."""
    is_stored: bool
    """All its whole lines are in the store."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Action:
    """What to do with a file."""

    path: Path
    kind: Literal["compress", "delete", "drop"]
    """`drop` deletes what is not stored."""


def plan(
    files: Sequence[Spool], quota_bytes: int, *, drop_unstored: bool = False
) -> tuple[list[Action], int]:
    """Choose what brings the files below a quota.

    Args:
      files: all files of spans of the host.
      quota_bytes: of all together.
      drop_unstored: also delete closed files that are not stored.
    Returns:
      actions: in order. Compression comes first, of as many files as are needed;
        deletion only if compressing all of them would not do.
      excess: bytes above the quota that remain.
    """
    excess = sum(file.disk_bytes for file in files) - quota_bytes
    actions: list[Action] = []
    oldest = sorted(files, key=lambda file: (file.modified_s, file.path))
    stored = [file for file in oldest if file.is_closed and file.is_stored]
    plain = [
        file for file in stored if gzipped.can_compress(file.path, file.disk_bytes)
    ]
    gain = sum(file.disk_bytes - file.disk_bytes // _RATIO for file in plain)
    if 0 < excess <= gain:
        for file in plain:
            if excess > 0:
                actions.append(Action(path=file.path, kind="compress"))
                excess -= file.disk_bytes - file.disk_bytes // _RATIO
        return actions, max(excess, 0)
    lost = [file for file in oldest if file.is_closed and not file.is_stored]
    for file in stored + (lost if drop_unstored else []):
        if excess > 0:
            kind = "delete" if file.is_stored else "drop"
            actions.append(Action(path=file.path, kind=kind))
            excess -= file.disk_bytes
    return actions, max(excess, 0)


def carry_out(action: Action) -> None:
    """Compress or delete a file; killed at any moment, its lines are in one file.

    Raises:
      OSError: no room to compress, or the file is gone.
    """
    if action.kind != "compress":
        action.path.unlink(missing_ok=True)
        return
    gzipped.compress(action.path)
