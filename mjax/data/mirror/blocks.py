"""Blocks on a host's disk: checked when read, the least recently read evicted first.

A block is one file: the SHA-256 of its bytes, then the bytes. It is renamed to its name
when complete, so a killed process leaves no partial block. Processes of the host use
locks of the operating system, which are released when their holder dies. A stopped but
live process delays other processes only for a bounded time.
"""

import contextlib
import errno
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
from typing import IO, NamedTuple

DIGEST_BYTES = 32
"""Size of the SHA-256 in front of each block, in bytes."""
_LOCK_S = 30.0  # maximum wait for a lock that is held for at most one write
_LOCK_POLL_S = 0.01
_LONG_S = 60.0  # a longer wait for the rate limit is logged
_HELD = "in_use.lock"
_OURS = re.compile(r"[\w-]+\.(block|lock)|\w+\.\d+\.\d+\.[\w.-]+\.tmp|rate\.time")
_log = logging.getLogger(__name__)


class InUseError(ValueError):
    """The blocks cannot be removed, because a live process uses them."""


class BlockStore:
    """The blocks of one data set in a folder, which several processes may open."""

    def __init__(self, folder: pathlib.Path, limit_bytes: int | None = None) -> None:
        """Open or create the folder, and protect it from `purge` until `close`.

        Args:
          folder: folder of only this data set.
          limit_bytes: maximum size of all blocks; above it, the least recently read
            blocks are removed. None keeps all.
        Raises:
          OSError: the folder cannot be created, or holds no blocks and is read-only.
        """
        self._folder, self._limit_bytes = folder, limit_bytes
        self._said: set[str] = set()
        self._rate_read = _Read(0.0, 0)
        self.closed = threading.Event()
        self._held = self._hold()
        fcntl.flock(self._held, fcntl.LOCK_SH)
        self._remove_left_over()

    def _hold(self) -> IO[str]:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return (self._folder / _HELD).open("a")
        except OSError as error:
            try:
                held = (self._folder / _HELD).open("r")
            except OSError:
                raise error from None
            self._say_once("can only be read", error)
            return held

    def close(self) -> None:
        """End all waits, and allow `purge` to remove the folder."""
        self.closed.set()
        self._held.close()

    @contextlib.contextmanager
    def locked(self, name: str, wait_s: float = _LOCK_S) -> Iterator[None]:
        """Hold a lock against other processes and threads of this host.

        If the disk is full or read-only, or the lock is not released within `wait_s`,
        the body runs without the lock. A block may then be fetched twice, but no read
        fails.

        Args:
          name: name of the lock: a block, or another action, such as `rate`.
          wait_s: maximum wait for the lock, in seconds.
        Raises:
          OSError: the store was closed meanwhile.
        """
        with contextlib.ExitStack() as held:
            try:
                lock = held.enter_context((self._folder / f"{name}.lock").open("a"))
                self._take(lock, wait_s)
            except OSError as error:
                self.check_open()
                self._say_once("cannot be locked", error)
            yield

    def _take(self, lock: IO[str], wait_s: float) -> None:
        """Take a lock.

        Raises:
          OSError: the file cannot be locked, another process has not released it in
            time, or the store was closed.
        """
        until_s = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.check_open()
                if time.monotonic() >= until_s:
                    raise TimeoutError(
                        errno.ETIMEDOUT,
                        f"a process has held {lock.name} for {wait_s:g} s",
                    ) from None
                self.closed.wait(_LOCK_POLL_S)
            else:
                return

    def check_open(self) -> None:
        """Raise OSError if this store was closed."""
        if self.closed.is_set():
            raise OSError(f"the blocks in {self._folder} were closed")

    def read(self, name: str) -> bytes | None:
        """Return a block as `sealed` returns it.

        Returns:
          The block; None if it is absent or unreadable, or was damaged and is removed.
        """
        path = self._folder / f"{name}.block"
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._say_once("cannot be read", error)
            return None
        if not is_whole(content):
            _log.warning("block %s is damaged; it is fetched again", path)
            self.remove(name)
            return None
        with contextlib.suppress(OSError):  # read-only: no block is evicted either
            os.utime(path)
        return content

    def remove(self, name: str) -> None:
        """Remove a block, if it exists and the disk allows it."""
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

    def write(self, name: str, content: bytes) -> None:
        """Store a block; if the disk fails, only log this once.

        Args:
          name: name of the block.
          content: the block as `sealed` returns it.
        """
        own = f"{os.getpid()}.{threading.get_ident()}.{socket.gethostname()}"
        temporary = self._folder / f"{name}.{own}.tmp"
        try:
            with self._room(len(content)), temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                temporary.replace(self._folder / f"{name}.block")
        except OSError as error:
            with contextlib.suppress(OSError):  # read-only
                temporary.unlink(missing_ok=True)
            self._say_once("cannot be kept", error)

    def _remove_left_over(self) -> None:
        """Remove temporary files that killed processes of this host have left."""
        for left in self._folder.glob(f"*.{socket.gethostname()}.tmp"):
            if not pathlib.Path(f"/proc/{left.name.split('.')[1]}").exists():
                with contextlib.suppress(OSError):  # read-only
                    left.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _room(self, num_bytes: int) -> Iterator[None]:
        """Evict blocks until `num_bytes` fit, under a lock that all writers take."""
        if self._limit_bytes is None:
            yield
            return
        with self.locked("room"):
            found = [(p.stat(), p) for p in self._folder.glob("*.block")]
            used = sum(stat.st_size for stat, _ in found)
            for stat, path in sorted(found, key=lambda f: f[0].st_mtime_ns):
                if used + num_bytes <= self._limit_bytes:
                    break
                path.unlink(missing_ok=True)
                used -= stat.st_size
            yield

    def wait_for(self, num_bytes: int, bytes_per_s: float) -> None:
        """Wait until this host may read `num_bytes` from the remote.

        All processes of the host take turns: a file holds the time and the size of the
        last read. The clock is the host's time since boot; a time from before a reboot
        is ignored. No process holds a lock while waiting.

        Args:
          num_bytes: bytes of the read that follows.
          bytes_per_s: rate limit of this host. It also determines how long a read of
            another process delays this one.
        Raises:
          OSError: the store was closed meanwhile.
        """
        is_said = False
        while (wait_s := self._take_turn(num_bytes, bytes_per_s)) > 0:
            if wait_s > _LONG_S and not is_said:
                _log.info(
                    "waiting %.0f s: the rate limit of this host is %.3g bytes per "
                    "second (--data.cache.mib-per-s, divided by the number of hosts)",
                    *(wait_s, bytes_per_s),
                )
                is_said = True
            self.closed.wait(wait_s)
            self.check_open()

    def _take_turn(self, num_bytes: int, bytes_per_s: float) -> float:
        """Take the turn and return 0, or return the seconds to wait for the turn."""
        with self.locked("rate"):
            path, now = self._folder / "rate.time", time.monotonic()
            last = self._rate_read
            with contextlib.suppress(OSError, ValueError):
                start_s, size = path.read_text().split()
                last = max(last, _Read(float(start_s), int(size)))
            if not last.start_s <= now:  # from before a reboot, or not a number
                last = _Read(0.0, 0)
            wait_s = last.start_s + last.num_bytes / bytes_per_s - now
            if wait_s > 0:
                return wait_s
            self._rate_read = _Read(now, num_bytes)
            try:
                path.write_text(f"{now!r} {num_bytes}")
            except OSError as error:  # this process still keeps to its rate
                self._say_once("cannot share a rate limit", error)
            return 0.0


class _Read(NamedTuple):
    """A read from the remote."""

    start_s: float
    """Start of the read in seconds since the host's boot."""
    num_bytes: int


class Kept(NamedTuple):
    """Contents of a folder of blocks."""

    num_blocks: int
    num_bytes: int
    """Bytes on disk, including the checksums of the blocks."""
    is_held: bool
    """Whether the folder is open in a live process."""


def kept(folder: pathlib.Path) -> Kept:
    """Describe the contents of a folder without reading blocks.

    Raises:
      ValueError: the folder has no blocks, or cannot be read.
    """
    num_blocks = num_bytes = 0
    with _held_alone(folder) as is_alone:
        for path in folder.glob("*.block"):
            with contextlib.suppress(FileNotFoundError):  # evicted by a live run
                num_bytes += path.stat().st_size
                num_blocks += 1
    return Kept(num_blocks, num_bytes, not is_alone)


def purge(folder: pathlib.Path) -> int:
    """Remove the files of a block store, and no others; return the bytes of the blocks.

    Raises:
      InUseError: a live process has the folder open.
      ValueError: the folder has no blocks, or a file cannot be removed.
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
    """Lock a folder against `BlockStore`; yield False if a live process has it open."""
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
    """Return a block in the format of disk and network: SHA-256, then the bytes."""
    return hashlib.sha256(data).digest() + data


def is_whole(content: bytes) -> bool:
    """Return whether the bytes of a sealed block match their SHA-256."""
    data = memoryview(content)[DIGEST_BYTES:]
    return hashlib.sha256(data).digest() == content[:DIGEST_BYTES]
