"""The files of a remote path, with their versions and a function that reads them."""

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
    """URL to which the names of files are relative."""
    origin: str
    """The path with the version that is read."""
    files: Sequence[RemoteFile]
    """Files, with names relative to `base`."""
    read_range: Callable[[str, int, int], bytes]
    """Takes name, start and length, see `mirror.Remote`."""
    remember: Callable[[], None]
    """Called when all files have arrived; keeps the listing for a start offline."""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Size and version of each file in a store, in words, by URL; empty if the origin
    determines both, as a commit does."""


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
