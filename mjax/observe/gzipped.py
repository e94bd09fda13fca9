"""Files that may have been compressed: found, read and compressed in one place.

Enters: a folder, or the path of a file. Leaves: the files by name, plain or compressed;
what they hold; a compressed file in the place of a plain one.

A file is compressed beside itself, under its name with `.gz`, and only then deleted. A
process that is killed in between leaves both: the plain one counts, and is compressed
again.
"""

import contextlib
import fcntl
import gzip
import io
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

SUFFIX = ".gz"
_MAX_BYTES = 2**32
"""A gzip file has its size before compression modulo this (RFC 1952)."""
_PIECE_BYTES = 2**16
"""Read at once, chosen: of a damaged file so much is lost before the damage at most."""


def find(folder: Path, ending: str) -> dict[str, Path]:
    """Return the files of a folder by name, compressed or not; by name in order.

    Args:
      folder: may be absent.
      ending: of their names before compression.
    """
    found: dict[str, Path] = {}
    for path in sorted(folder.glob(f"*{ending}")):
        found[path.name] = path
    for path in sorted(folder.glob(f"*{ending}{SUFFIX}")):
        found.setdefault(path.name.removesuffix(SUFFIX), path)
    return {name: found[name] for name in sorted(found)}


def is_compressed(path: Path) -> bool:
    """Say whether a file is compressed."""
    return path.suffix == SUFFIX


def can_compress(path: Path, size: int) -> bool:
    """Say whether `compress` takes a file of this size."""
    return not is_compressed(path) and size < _MAX_BYTES


def read(path: Path) -> tuple[bytes, str]:
    """Read a whole file; one that has been compressed meanwhile, too.

    Returns:
      what it holds, and what is wrong with it: of a compressed file that was cut off or
      damaged, only what stands before that place is returned.
    Raises:
      OSError: it cannot be read.
    """
    if not is_compressed(path):
        try:
            return path.read_bytes(), ""
        except FileNotFoundError:
            path = path.with_name(path.name + SUFFIX)
            if not path.exists():
                raise
    data, pieces = path.read_bytes(), []
    begin, problem = 0, "" if data else "is empty"
    while begin < len(data) and not problem:
        member = zlib.decompressobj(zlib.MAX_WBITS | 16)  # 16: with a header of gzip
        try:
            # By pieces: one that raises returns nothing.
            while begin < len(data) and not member.eof:
                pieces.append(member.decompress(data[begin : begin + _PIECE_BYTES]))
                begin = min(len(data), begin + _PIECE_BYTES) - len(member.unused_data)
        except zlib.error as error:
            problem = f"is damaged: {error}"
        else:
            problem = "" if member.eof else "is cut off"
    return b"".join(pieces), problem


@contextlib.contextmanager
def opened(path: Path) -> Iterator[io.BufferedIOBase]:
    """Open a file to read bytes as they were before compression.

    Raises:
      OSError: it cannot be read, also while it is open: it was cut off or damaged.
    """
    try:
        with gzip.open(path, "rb") if is_compressed(path) else path.open("rb") as file:
            yield file
    except (EOFError, zlib.error) as error:
        raise OSError(f"it is cut off or damaged: {error}") from error


def size_of(path: Path) -> int:
    """Return the bytes of a file before compression."""
    if not is_compressed(path):
        return path.stat().st_size
    with path.open("rb") as file:  # RFC 1952: the last four bytes have the size
        file.seek(-4, os.SEEK_END)
        return int.from_bytes(file.read(4), "little")


def compress(path: Path) -> None:
    """Compress a file that nobody writes, and delete it.

    Killed at any moment, all of it is in one file at least.

    Raises:
      OSError: no room, the file is gone or was written to meanwhile, or another process
        compresses it; it stays as it was.
    """
    before = path.stat()
    final = path.with_name(path.name + SUFFIX)
    with _temporary(final) as (raw, temporary):
        with (
            path.open("rb") as source,
            gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=6, mtime=0) as target,
        ):
            shutil.copyfileobj(source, target, _PIECE_BYTES)
        raw.flush()
        os.fsync(raw.fileno())
        shutil.copystat(path, temporary)
        _check_unchanged(path, before)
        temporary.replace(final)
    _sync_folder(path.parent)
    _check_unchanged(path, before)
    path.unlink()


@contextlib.contextmanager
def _temporary(final: Path) -> Iterator[tuple[io.BufferedWriter, Path]]:
    """Open the file that becomes another one; one process at a time.

    Raises:
      OSError: another process has it.
    """
    path = final.with_name(f"{final.name}.tmp")
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "wb") as raw:
        fcntl.flock(raw, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever had the lock before may have moved the file to its place.
        if not os.path.samestat(os.fstat(raw.fileno()), path.stat()):
            raise BlockingIOError(f"another process compresses {final.name}")
        raw.truncate(0)
        try:
            yield raw, path
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _check_unchanged(path: Path, before: os.stat_result) -> None:
    now = path.stat()
    if (now.st_ino, now.st_size, now.st_mtime_ns) != (
        *(before.st_ino, before.st_size, before.st_mtime_ns),
    ):
        raise OSError("it was written to while it was compressed")


def _sync_folder(folder: Path) -> None:
    """Write to the disk that a file has its name, before another one is deleted."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
