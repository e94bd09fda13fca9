"""Read the content of files that may be compressed (.gz, .zst) as a stream of bytes.

The content is decompressed while it is read, a fraction of a megabyte at a time. Both
formats mark where a stream ends, and have checksums, so a stream that is cut off or
damaged is refused. A file may hold several streams, one after the other, and neither
format says how many: a file that is cut between two of them is read as a shorter file.
"""

import contextlib
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from mjax.data.files import File, UnreadableError, size_of

SUFFIXES = (".gz", ".zst")
"""Suffixes of compressed files."""
_BUFFER_BYTES = 1 << 18
_DAMAGED = (OSError, EOFError, zlib.error)  # what decompression raises


def ignore(num_bytes: int) -> None:
    """Do nothing with the number of bytes that were read."""


def plain_name(name: str) -> str:
    """Return the name of a file without the suffix of its compression."""
    lower = name.lower()
    return next((name[: -len(s)] for s in SUFFIXES if lower.endswith(s)), name)


@contextlib.contextmanager
def opened(
    path: File, on_read: Callable[[int], None] = ignore
) -> Iterator[io.BufferedIOBase]:
    """Open the content of a file, decompressed if its name ends in .gz or .zst.

    Args:
      path: path of the file.
      on_read: called with the number of bytes whenever some are read from the file.
    Raises:
      UnreadableError: it cannot be read.
      ValueError: it is cut off, or is not of the format that its name
        says; also while the content is read. The message names the file and the byte.
    """
    try:
        with path.open("rb", buffering=0) as file:
            counted = _Counted(file, on_read)
            content = _decompressed(counted, path)
            with io.BufferedReader(content, _BUFFER_BYTES) as reader:
                yield reader
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}") from None


def _decompressed(file: "_Counted", path: File) -> io.RawIOBase:
    match path.suffix.lower():
        case ".gz":
            return _Checked(gzip.GzipFile(fileobj=file), file, path)
        case ".zst":
            try:
                import pyarrow
            except ImportError:
                raise ValueError(
                    f"{path}: reading .zst needs pyarrow; pip install 'mjax[data]'"
                ) from None
            handle = pyarrow.PythonFile(file, "r")
            return _Checked(pyarrow.CompressedInputStream(handle, "zstd"), file, path)
        case _:
            return file


class _Counted(io.RawIOBase):
    """A file whose reads are reported."""

    def __init__(self, file: io.RawIOBase, on_read: Callable[[int], None]) -> None:
        self._file, self._on_read, self.num_read = file, on_read, 0
        self.failure: OSError | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            count = self._file.readinto(buffer) or 0
        except OSError as error:
            self.failure = error  # of the disk, not of what is on it
            raise
        self.num_read += count
        self._on_read(count)
        return count


class _Checked(io.RawIOBase):
    """Decompressed content; damage raises a ValueError with its position."""

    def __init__(self, content: Any, file: _Counted, path: File) -> None:
        self._content, self._file, self._path = content, file, path

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return self._content.readinto(buffer)
        except _DAMAGED as error:
            if self._file.failure is not None:
                raise self._file.failure from None
            size, byte = size_of(self._path), self._file.num_read
            kind = self._path.suffix
            if isinstance(error, EOFError) or "Truncated" in str(error):
                what = f"is cut off: its {kind} stream does not end by byte {size}"
            else:
                what = f"is not intact {kind}: {error}, at or before byte {byte}"
            raise ValueError(
                f"{self._path} {what} of the compressed file; copy or download it "
                "again, or leave it out"
            ) from None
