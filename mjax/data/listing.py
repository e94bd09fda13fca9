"""What a remote path holds: files with versions, and how their bytes are read."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence

from mjax.data.mirror.mirror import RemoteFile

_MAX_NAMED = 10  # of what is left out
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listing:
    """The files of one remote path, none of them read yet."""

    base: str
    """URL that the names of files are relative to."""
    origin: str
    """The path with the version that is read."""
    files: Sequence[RemoteFile]
    """Names are relative to base."""
    read_range: Callable[[str, int, int], bytes]
    """Takes name, start and length, see `mirror.Remote`."""
    remember: Callable[[], None]
    """Keeps the listing for a start without the remote: all files have arrived."""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Of each file in a store, by URL, its size and version in words; empty where the
    origin tells both, as a commit does."""


def log_left_out(path: str, left_out: Sequence[str]) -> None:
    """Say once what of a remote path is not read.

    Args:
      path: as the flag names it.
      left_out: names of files.
    """
    if left_out:
        named, more = ", ".join(left_out[:_MAX_NAMED]), len(left_out) - _MAX_NAMED
        _log.warning(
            "--data.path: left out of %s: %s%s",
            *(path, named, f" and {more} more files" if more > 0 else ""),
        )
