"""What a remote path holds: files with versions, and how their bytes are read."""

import dataclasses
from collections.abc import Callable, Sequence

from mjax.data.mirror.mirror import RemoteFile


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
