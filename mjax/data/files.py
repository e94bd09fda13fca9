"""Files of a corpus, on a disk of this host or remote.

A remote file is read in blocks; only one block is in memory at a time.
"""

import dataclasses
import io
import pathlib
from collections.abc import Callable
from typing import Any, Literal


class UnreadableError(ValueError):
    """A file of the corpus cannot be read now, because of its disk or store."""


@dataclasses.dataclass(frozen=True, eq=False)
class RemotePath:
    """A remote file, with those methods of a path that file readers use."""

    url: str
    num_bytes: int
    block_bytes: int
    """Size of each read in bytes; the last read of a file may be smaller."""
    read_range: Callable[[int, int], bytes]
    """Takes start and length in bytes, and returns the bytes. Raises OSError if they
    cannot be read now, and ValueError if they never can be."""
    sha256: Callable[[], str]
    """Returns the hexadecimal SHA-256 of the content, reading the file if necessary.
    Errors as in `read_range`."""

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """Last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """Suffix of the name, with its dot."""
        return pathlib.PurePosixPath(self.name).suffix

    def open(
        self, mode: Literal["rb"] = "rb", buffering: Literal[0] = 0
    ) -> io.RawIOBase:
        """Open the file for reading, from its first byte.

        Raises:
          UnreadableError: raised by reads, if `read_range` raises OSError.
        """
        return _Reader(self)


File = pathlib.Path | RemotePath


def size_of(file: File) -> int:
    """Return the size of a file in bytes.

    Raises:
      OSError: the file on the disk is not accessible.
    """
    return file.num_bytes if isinstance(file, RemotePath) else file.stat().st_size


class _Reader(io.RawIOBase):
    """The content of a remote file."""

    def __init__(self, path: RemotePath) -> None:
        self._path, self._at = path, 0
        self._start, self._block = 0, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {
            io.SEEK_SET: 0,
            io.SEEK_CUR: self._at,
            io.SEEK_END: self._path.num_bytes,
        }
        self._at = max(0, base[whence] + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = self._path.num_bytes
        if self._at >= size:
            return 0
        if not self._start <= self._at < self._start + len(self._block):
            self._start = self._at // self._path.block_bytes * self._path.block_bytes
            self._block = b""  # freed before the next block is read
            try:
                self._block = self._path.read_range(
                    self._start, min(self._path.block_bytes, size - self._start)
                )
            except OSError as error:
                raise UnreadableError(
                    f"{self._path} cannot be read: {error.strerror or error}"
                ) from None
        at = self._at - self._start
        data = memoryview(self._block)[at : at + len(buffer)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
