"""Read files that may be compressed (.gz, .zst) as a stream of bytes.

The content is decompressed while it is read, a fraction of a megabyte at a time. Both
formats mark the end of a stream and have checksums, so a truncated or damaged stream is
refused. A file may hold several streams, one after the other, but neither format stores
their number. So a file that is truncated between two streams is read as a shorter file.
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
_DAMAGED = (OSError, EOFError, zlib.error)  # errors that decompression raises


def ignore(num_bytes: int) -> None:
    """Do nothing: the default for `on_read`."""


def plain_name(name: str) -> str:
    """Return a file name without the suffix of its compression."""
    lower = name.lower()
    return next((name[: -len(s)] for s in SUFFIXES if lower.endswith(s)), name)


@contextlib.contextmanager
def opened(
    path: File, on_read: Callable[[int], None] = ignore
) -> Iterator[io.BufferedIOBase]:
    """Open a file for reading, decompressing it if its name ends in .gz or .zst.

    Args:
      path: path of the file.
      on_read: called after each read from the file, with the number of bytes read.
    Raises:
      UnreadableError: the file cannot be read.
      ValueError: the file is truncated, or is not of the format that its name says;
        also raised while the content is read. The message names the file and the byte.
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
    """A file that reports the bytes of each read."""

    def __init__(self, file: io.RawIOBase, on_read: Callable[[int], None]) -> None:
        self._file, self._on_read, self.num_read = file, on_read, 0
        self.failure: OSError | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            count = self._file.readinto(buffer) or 0
        except OSError as error:
            self.failure = error  # an error of the disk, not of the content
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
