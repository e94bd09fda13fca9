"""Write files of the cache atomically under a lock; verify checksums when reading.

Token files have one CRC32 per block of 64 KiB, verified when a process first reads the
block. Small files (manifests, tables, checksums) are verified when they are opened.
"""

import contextlib
import fcntl
import io
import json
import logging
import os
import pathlib
import re
import socket
import time
import zlib
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import numpy as np
from jaxtyping import UInt

BLOCK_BYTES = 1 << 16
"""Bytes of a token file per checksum. A random read of a mapped file loads twice as
many, the default read-ahead of Linux."""
_CHECKSUM_DTYPE = np.dtype("<u4")
_QUIET_S = 5.0
_POLL_S = 0.05
_log = logging.getLogger(__name__)


def cache_dir(configured: str | None) -> pathlib.Path:
    """Return the folder of token files.

    Args:
      configured: --data.cache-dir; None means `mjax/tokens` in the user's cache folder.
    """
    if configured is not None:
        return pathlib.Path(configured).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "mjax" / "tokens"


class DamagedFileError(RuntimeError):
    """A file of the cache is missing, truncated or altered."""


class UnwritableError(ValueError):
    """A folder of the cache is not writable, or its disk is full."""


@contextlib.contextmanager
def locked(path: pathlib.Path) -> Iterator[None]:
    """Lock a file or folder of the cache against other processes of the machine.

    The operating system releases the lock when the process that holds it dies. A
    process that waits more than `_QUIET_S` seconds logs once which process holds the
    lock.

    Raises:
      UnwritableError: the folder of `path` cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("a+")
        try:
            _wait(lock, path)  # released when the file is closed
            lock.truncate(0)
            lock.write(f"process {os.getpid()} of {socket.gethostname()}")
            lock.flush()
        except BaseException:
            lock.close()
            raise
    except OSError as error:
        raise unwritable(path.parent, error) from None
    with lock:
        yield


@contextlib.contextmanager
def locked_if_free(path: pathlib.Path) -> Iterator[bool]:
    """Take the lock of `locked` if it is free; yield whether it was taken.

    Raises:
      UnwritableError: the folder of `path` cannot be written.
    """
    try:
        lock = path.with_suffix(".lock").open("a+")
    except OSError as error:
        raise unwritable(path.parent, error) from None
    with lock:
        yield _taken(lock)


def _taken(lock: IO[str]) -> bool:
    """Take a lock if it is free; return whether it was taken."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait(lock: IO[str], path: pathlib.Path) -> None:
    """Take a lock. If another process holds it, wait, and log which one."""
    until_s = time.monotonic() + _QUIET_S
    while not _taken(lock):
        if time.monotonic() >= until_s:
            break
        time.sleep(_POLL_S)
    else:
        return
    lock.seek(0)
    holder = lock.read() or "another process"
    _log.info("waiting for %s, which writes %s", holder, path)
    fcntl.flock(lock, fcntl.LOCK_EX)


def unwritable(folder: pathlib.Path, error: OSError) -> UnwritableError:
    """Return the error for a cache folder that cannot be written."""
    return UnwritableError(
        f"the cache folder {folder} cannot be written ({error.strerror}); set "
        "--data.cache-dir to a folder that can be"
    )


def unreadable(path: pathlib.Path, error: OSError) -> ValueError:
    """Return the error for a file of the cache that exists but cannot be read."""
    return ValueError(
        f"the cache file {path} cannot be read ({error.strerror}); make it readable, "
        "or set --data.cache-dir to another folder"
    )


def temporary_parts(name: str) -> tuple[str, str] | None:
    """Split a temporary name into final name and host; None for other names."""
    match = re.fullmatch(r"(.+?)\.tmp-(.+)-[^-]*", name)
    return None if match is None else (match[1], match[2])


def temporary_prefix(name: str) -> str:
    """Return the prefix of the temporary names that this machine uses for `name`.

    The prefix contains the host name. So machines that share a cache never use the same
    temporary name, even if the file system's locks work only within one machine.
    """
    return f"{name}.tmp-{socket.gethostname()}-"


@contextlib.contextmanager
def written_whole(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a temporary path, and rename it to `path` at the end, atomically.

    The caller must hold the lock of `path`, because temporary files of killed processes
    are removed first.

    Raises:
      UnwritableError: the folder of `path` cannot be written.
    """
    prefix = temporary_prefix(path.name)
    temporary = path.with_name(f"{prefix}{os.getpid()}")
    try:
        for abandoned in path.parent.glob(f"{prefix}*"):
            abandoned.unlink()
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise unwritable(path.parent, error) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def read_bytes(path: pathlib.Path) -> bytes:
    """Return the content of a file of the cache.

    Raises:
      DamagedFileError: the file is missing, or is not a regular file.
      ValueError: the file cannot be read.
    """
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise DamagedFileError(f"{path}: {error.strerror}") from None
    except OSError as error:
        raise unreadable(path, error) from None


def write_json(path: pathlib.Path, content: Any) -> None:
    """Write a JSON object in two lines: the CRC32 of the second line, the content."""
    body = f'"content": {json.dumps(content)}}}\n'.encode()
    path.write_bytes(b'{"crc32": %d,\n' % zlib.crc32(body) + body)


def read_json(path: pathlib.Path) -> Any:
    """Return the content of a file that `write_json` wrote.

    Raises:
      DamagedFileError: the file is missing, truncated or altered.
      ValueError: the file cannot be read.
    """
    first, _, body = read_bytes(path).partition(b"\n")
    if first != b'{"crc32": %d,' % zlib.crc32(body):
        raise DamagedFileError(f"{path} does not match its checksum")
    return json.loads(first + body)["content"]


def checksums_path(path: pathlib.Path) -> pathlib.Path:
    """Return the path of the block checksums of a file."""
    return path.with_suffix(".crc32")


class Written(NamedTuple):
    """Progress of writing a file with checksums."""

    num_bytes: int = 0
    crc: int = 0
    """CRC32 of the bytes in the last block, if that block is not full."""


class BlockWriter:
    """Writes a file, and the checksums of its blocks to a second file."""

    def __init__(self, path: pathlib.Path, written: Written | None = None) -> None:
        """Begin an empty file, or continue one.

        Args:
          path: path of the file.
          written: result of an earlier `sync`; bytes written after that `sync` are
            truncated. None begins an empty file.
        Raises:
          DamagedFileError: the file has fewer bytes than `written`.
        """
        written = written or Written()
        num_blocks, self._num_in_block = divmod(written.num_bytes, BLOCK_BYTES)
        self._crc = written.crc
        self._file = _opened_at(path, written.num_bytes)
        size = num_blocks * _CHECKSUM_DTYPE.itemsize
        try:
            self._checksums = _opened_at(checksums_path(path), size)
        except DamagedFileError:
            self._file.close()
            raise

    def __enter__(self) -> "BlockWriter":
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        with self._file, self._checksums:
            if kind is None and self._num_in_block:
                self._end_block()

    def write(self, data: bytes) -> None:
        """Append bytes to the file."""
        self._file.write(data)
        start = 0
        while start < len(data):
            part = data[start : start + BLOCK_BYTES - self._num_in_block]
            start += len(part)
            self._crc = zlib.crc32(part, self._crc)
            self._num_in_block += len(part)
            if self._num_in_block == BLOCK_BYTES:
                self._end_block()

    def sync(self) -> Written:
        """Flush both files to disk; return the progress, for a later writer."""
        for file in (self._file, self._checksums):
            file.flush()
            os.fsync(file.fileno())
        return Written(self._file.tell(), self._crc)

    def _end_block(self) -> None:
        self._checksums.write(np.array(self._crc, _CHECKSUM_DTYPE).tobytes())
        self._crc = self._num_in_block = 0


def _opened_at(path: pathlib.Path, size: int) -> io.BufferedRandom:
    """Open a file for writing after its first `size` bytes."""
    file = path.open("r+b" if size else "w+b")
    if os.fstat(file.fileno()).st_size < size:
        file.close()
        raise DamagedFileError(f"{path} has less than the {size} bytes written to it")
    file.truncate(size)
    file.seek(size)
    return file


class MappedTokens:
    """A file of token ids, mapped into memory; each block is verified when first read.

    Slices are views into the mapped memory, like those of a numpy array.
    """

    def __init__(
        self,
        path: pathlib.Path,
        dtype: np.dtype,
        num_tokens: int,
        checksums: bytes,
    ) -> None:
        """Map a file.

        Args:
          path: path of the file.
          dtype: dtype of the token ids.
          num_tokens: number of tokens in the file.
          checksums: content of the checksum file that `BlockWriter` wrote.
        Raises:
          DamagedFileError: the file is missing, or has another size.
          ValueError: the file cannot be read.
        """
        expected = num_tokens * dtype.itemsize
        try:
            size = path.stat().st_size
            if size != expected:
                raise DamagedFileError(f"{path} has {size} bytes instead of {expected}")
            # A plain array over the mapped memory, because slices of np.memmap are
            # slow. An empty file cannot be mapped.
            mapped = np.memmap(path, dtype, "r") if expected else np.zeros(0, dtype)
        except FileNotFoundError:
            raise DamagedFileError(f"{path} is missing") from None
        except OSError as error:
            raise unreadable(path, error) from None
        self._path, self._tokens = path, mapped.view(np.ndarray)
        self._checksums = np.frombuffer(checksums, _CHECKSUM_DTYPE)
        self._is_unread = bytearray(b"\1" * len(self._checksums))

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the token ids."""
        return self._tokens.dtype

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: slice) -> UInt[np.ndarray, "_"]:
        """Return consecutive tokens.

        Raises:
          DamagedFileError: the bytes do not match their checksum.
        """
        start, stop, step = index.indices(len(self._tokens))
        if step != 1:
            raise ValueError(f"a slice of tokens must have step 1, got {step}")
        itemsize = self._tokens.itemsize
        first, end = start * itemsize // BLOCK_BYTES, -(-stop * itemsize // BLOCK_BYTES)
        block = self._is_unread.find(1, first, end)
        while block >= 0:
            self._check(block)
            block = self._is_unread.find(1, block + 1, end)
        return self._tokens[start:stop]

    def __array__(
        self, dtype: np.dtype | None = None, copy: bool | None = None
    ) -> np.ndarray:
        return np.array(self[:], dtype, copy=copy)

    def _check(self, block: int) -> None:
        start = block * BLOCK_BYTES
        data = memoryview(self._tokens).cast("B")[start : start + BLOCK_BYTES]
        if zlib.crc32(data) != self._checksums[block]:
            raise DamagedFileError(
                f"{self._path} is damaged: bytes {start} to {start + len(data) - 1} do "
                f"not match their checksum; delete the folder {self._path.parent} "
                "and start the run again, which builds it again"
            )
        self._is_unread[block] = 0
