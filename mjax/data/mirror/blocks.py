"""Blocks on the disk of one host: checked when read, replaced whole, evicted by age.

A block is one file: the SHA-256 of its bytes, then the bytes. It appears under its name
by a rename, so a killed process leaves no partial block. Processes of the host agree by
locks of the operating system, which end with their holder.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import pathlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

_DIGEST_BYTES = 32
_HELD = "in_use.lock"
_OURS = re.compile(r"[\w-]+\.(block|lock)|\w+\.\d+\.\d+\.[\w.-]+\.tmp|rate\.time")
_log = logging.getLogger(__name__)


class InUseError(ValueError):
    """The blocks cannot be removed: a live process holds them."""


class BlockStore:
    """The blocks of one data set in a folder; several processes may open it."""

    def __init__(self, folder: pathlib.Path, limit_bytes: int | None = None) -> None:
        """Open or make the folder, and protect it from `purge` until `close`.

        Args:
          folder: folder of this data set alone.
          limit_bytes: maximum size; above it, the least recently read blocks are
            removed. None keeps all.
        Raises:
          OSError: the folder cannot be made.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._limit_bytes = folder, limit_bytes
        self._said: set[str] = set()
        self._rate_turn, self._rate_until = threading.Lock(), 0.0
        self._held = (folder / _HELD).open("a")
        fcntl.flock(self._held, fcntl.LOCK_SH)
        self._remove_left_over()

    def close(self) -> None:
        """Let `purge` remove the folder."""
        self._held.close()

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Keep other processes and threads of this host from fetching a block.

        On a disk that is full or read-only there is no lock: a block may be fetched
        twice, but no read fails.
        """
        with contextlib.ExitStack() as held:
            try:
                lock = held.enter_context((self._folder / f"{name}.lock").open("a"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                self._say_once("cannot be locked", error)
            yield

    def read(self, name: str) -> bytes | None:
        """Return a block; None if it is absent, or damaged and now removed."""
        path = self._folder / f"{name}.block"
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._say_once("cannot be read", error)
            return None
        data = unsealed(content)
        if data is None:
            _log.warning("block %s is damaged; it is fetched again", path)
            self.remove(name)
        else:
            with contextlib.suppress(OSError):  # read-only: nothing is evicted either
                os.utime(path)
        return data

    def remove(self, name: str) -> None:
        """Remove a block, if it is here and the disk allows it."""
        try:
            (self._folder / f"{name}.block").unlink(missing_ok=True)
        except OSError as error:
            self._say_once("cannot be removed", error)

    def _say_once(self, what: str, error: OSError) -> None:
        if what not in self._said:
            _log.warning(
                "blocks %s in %s (%s); they are read from other hosts or the remote",
                *(what, self._folder, error.strerror),
            )
        self._said.add(what)

    def write(self, name: str, data: bytes) -> None:
        """Store a block; if the disk fails, log it once and raise nothing."""
        own = f"{os.getpid()}.{threading.get_ident()}.{socket.gethostname()}"
        temporary = self._folder / f"{name}.{own}.tmp"
        try:
            self._make_room(len(data) + _DIGEST_BYTES)
            with temporary.open("wb") as file:
                file.write(sealed(data))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._folder / f"{name}.block")
        except OSError as error:
            with contextlib.suppress(OSError):  # read-only
                temporary.unlink(missing_ok=True)
            self._say_once("cannot be kept", error)

    def _remove_left_over(self) -> None:
        """Remove what killed processes of this host have left."""
        for left in self._folder.glob(f"*.{socket.gethostname()}.tmp"):
            if not pathlib.Path(f"/proc/{left.name.split('.')[1]}").exists():
                with contextlib.suppress(OSError):  # read-only
                    left.unlink(missing_ok=True)

    def _make_room(self, num_bytes: int) -> None:
        if self._limit_bytes is None:
            return
        with self.locked("room"):
            found = [(p.stat(), p) for p in self._folder.glob("*.block")]
            used = sum(stat.st_size for stat, _ in found)
            for stat, path in sorted(found, key=lambda f: f[0].st_mtime_ns):
                if used + num_bytes <= self._limit_bytes:
                    break
                path.unlink(missing_ok=True)
                used -= stat.st_size

    def wait_for(self, num_bytes: int, bytes_per_s: float) -> None:
        """Wait until this host may read so many bytes from the remote.

        All processes of the host take turns by a time in a file, on the clock that
        starts with the host; a time from before a reboot is ignored.
        """
        with self._rate_turn, self.locked("rate"):
            path = self._folder / "rate.time"
            start, until = 0.0, 0.0
            with contextlib.suppress(OSError, ValueError):
                start, until = map(float, path.read_text().split())
            if start > time.monotonic():
                until = 0.0
            until = max(until, self._rate_until)
            if time.monotonic() < until:
                time.sleep(until - time.monotonic())
            now = time.monotonic()
            self._rate_until = now + num_bytes / bytes_per_s
            try:
                path.write_text(f"{now!r} {self._rate_until!r}")
            except OSError as error:  # this process still keeps to its share
                self._say_once("cannot share a rate limit", error)


class Kept(NamedTuple):
    """Contents of a folder."""

    num_blocks: int
    num_bytes: int
    """Bytes on disk, including the checksums of the blocks."""
    is_held: bool
    """Whether a live process has the folder open."""


def kept(folder: pathlib.Path) -> Kept:
    """Describe the contents of a folder without reading blocks.

    Raises:
      ValueError: this is no folder of blocks, or it cannot be read.
    """
    num_blocks = num_bytes = 0
    with _held_alone(folder) as is_alone:
        for path in folder.glob("*.block"):
            with contextlib.suppress(FileNotFoundError):  # a live run has evicted it
                num_bytes += path.stat().st_size
                num_blocks += 1
    return Kept(num_blocks, num_bytes, not is_alone)


def purge(folder: pathlib.Path) -> int:
    """Remove all blocks of a data set, and no other file; return their bytes.

    Raises:
      InUseError: a live process has it open.
      ValueError: this is no folder of blocks, or a file cannot be removed.
    """
    num_bytes = 0
    with _held_alone(folder) as is_alone:
        if not is_alone:
            raise InUseError(
                f"{folder} is held by a live run; end the run, then purge again"
            )
        for path in folder.iterdir():
            if path.name != _HELD and _OURS.fullmatch(path.name):
                num_bytes += path.stat().st_size if path.suffix == ".block" else 0
                path.unlink()
    return num_bytes


@contextlib.contextmanager
def _held_alone(folder: pathlib.Path) -> Iterator[bool]:
    """Keep other processes from opening a folder that no live process has open."""
    try:
        with (folder / _HELD).open("r") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
    except FileNotFoundError:
        raise ValueError(
            f"{folder} holds no blocks of a mirror ({_HELD} is missing); give the "
            "folder of one data set"
        ) from None
    except OSError as error:
        raise ValueError(
            f"{error.filename or folder} cannot be read or removed ({error.strerror}); "
            "change its permissions"
        ) from None


def sealed(data: bytes) -> bytes:
    """Return a block as it is kept and sent: SHA-256, then the bytes."""
    return hashlib.sha256(data).digest() + data


def unsealed(content: bytes) -> bytes | None:
    """Return the bytes of a block; None if they do not match their SHA-256."""
    data = content[_DIGEST_BYTES:]
    is_whole = hashlib.sha256(data).digest() == content[:_DIGEST_BYTES]
    return data if is_whole else None
