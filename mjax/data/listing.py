"""The files of a remote path, with their versions and a function that reads them."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence

from mjax.data.mirror.mirror import RemoteFile

_MAX_NAMED = 10  # names of left-out files to log
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listing:
    """The files of one remote path, before any of them is read."""

    base: str
    """URL to which file names are relative."""
    origin: str
    """The path, with the version that is read."""
    files: Sequence[RemoteFile]
    """The files, with names relative to `base`."""
    read_range: Callable[[str, int, int], bytes]
    """Takes name, start and length in bytes, and returns bytes; see `mirror.Remote`."""
    remember: Callable[[], None]
    """Called when all files are downloaded; keeps the listing for offline starts."""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """URL of each file in an object store -> text with its size and version; empty if
    `origin` determines both, as a commit does."""


def log_left_out(path: str, left_out: Sequence[str]) -> None:
    """Log once which files of a remote path are not read.

    Args:
      path: remote path, as given by the flag.
      left_out: names of these files.
    """
    if left_out:
        named, more = ", ".join(left_out[:_MAX_NAMED]), len(left_out) - _MAX_NAMED
        _log.warning(
            "--data.path: left out of %s: %s%s",
            *(path, named, f" and {more} more files" if more > 0 else ""),
        )
