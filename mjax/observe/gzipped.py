"""Find, read and compress files that may already be compressed.

Input: a folder, or the path of a file. Output: the files of the folder by name, plain
or compressed; the contents of a file; or a compressed file in place of a plain one.

Compression writes a new file beside the plain file, with `.gz` added to the name, and
only then deletes the plain file. If the process is killed in between, both files
remain. The plain file is then the valid one, and is compressed again.
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
"""A gzip file holds its uncompressed size modulo this (RFC 1952)."""
_PIECE_BYTES = 2**16
"""Bytes to read at once. If a file is damaged, the contents of at most this many
compressed bytes before the damage are lost."""


def find(folder: Path, ending: str) -> dict[str, Path]:
    """Return name before compression -> path, sorted by name, for files of a folder.

    Args:
      folder: may be absent.
      ending: suffix of the names before compression.
    """
    found: dict[str, Path] = {}
    for path in sorted(folder.glob(f"*{ending}")):
        found[path.name] = path
    for path in sorted(folder.glob(f"*{ending}{SUFFIX}")):
        found.setdefault(path.name.removesuffix(SUFFIX), path)
    return {name: found[name] for name in sorted(found)}


def is_compressed(path: Path) -> bool:
    """Return whether a file is compressed."""
    return path.suffix == SUFFIX


def can_compress(path: Path, size: int) -> bool:
    """Return whether `compress` accepts a file of this size."""
    return not is_compressed(path) and size < _MAX_BYTES


def read(path: Path) -> tuple[bytes, str]:
    """Read a whole file, even if another process compresses it meanwhile.

    Returns:
      its contents, and its problem or "". If a compressed file is truncated or damaged,
      only the contents before the damage are returned.
    Raises:
      OSError: the file cannot be read.
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
        member = zlib.decompressobj(zlib.MAX_WBITS | 16)  # 16: expect a gzip header
        try:
            # Decompress in pieces: a call that raises returns nothing.
            while begin < len(data) and not member.eof:
                pieces.append(member.decompress(data[begin : begin + _PIECE_BYTES]))
                begin = min(len(data), begin + _PIECE_BYTES) - len(member.unused_data)
        except zlib.error as error:
            problem = f"is damaged: {error}"
        else:
            problem = "" if member.eof else "is truncated"
    return b"".join(pieces), problem


@contextlib.contextmanager
def opened(path: Path) -> Iterator[io.BufferedIOBase]:
    """Yield an open file from which the uncompressed bytes can be read.

    Raises:
      OSError: the file cannot be read, or is truncated or damaged. Damage is found only
        during reading.
    """
    try:
        with gzip.open(path, "rb") if is_compressed(path) else path.open("rb") as file:
            yield file
    except (EOFError, zlib.error) as error:
        raise OSError(f"it is truncated or damaged: {error}") from error


def size_of(path: Path) -> int:
    """Return the uncompressed size of a file, in bytes."""
    if not is_compressed(path):
        return path.stat().st_size
    with path.open("rb") as file:  # RFC 1952: the last four bytes have the size
        file.seek(-4, os.SEEK_END)
        return int.from_bytes(file.read(4), "little")


def compress(path: Path) -> None:
    """Replace a file by a compressed one; no process may be writing to the file.

    If the process is killed, all contents are still in at least one file.

    Raises:
      OSError: the disk is full, the file was deleted or written to during compression,
        or another process compresses it. This function has not changed the file.
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
    """Open the temporary file that will become `final`; yield the file and its path.

    Only one process may compress a file at a time.

    Raises:
      OSError: another process is compressing the file.
    """
    path = final.with_name(f"{final.name}.tmp")
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "wb") as raw:
        fcntl.flock(raw, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The previous owner of the lock may have renamed the file.
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
    """Sync a folder, so that a new name is on disk before another file is deleted."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
