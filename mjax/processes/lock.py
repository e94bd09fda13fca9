"""A lock on a file that names its holder, so that a second start is refused.

Input: the path of the file, and the process that wants to hold it. Output: an flock on
the file, whose content is the holder as JSON. The kernel releases the lock when the
process ends, however it ends, so no lock outlives its process.

A lock only counts between processes of one host. On a network file system the lock of
a lost host may stay for minutes, and a process that lost the network to all hosts
except the store may keep its lock for good. So a process may replace the lock of
another host, and a launch may replace locks of its own older generations;
`mjax.ckpt.fence` then keeps the replaced process from saving. If the file system has no
locks, nothing is refused.
"""

import contextlib
import enum
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

TRAINING = Path("training.lock")
"""Path in the work dir of the lock that process 0 of a run holds."""
DRIVER = Path("launch") / "driver.lock"
"""Path in the work dir of the lock that the driver of a launch holds."""
ADDRESS = Path("launch") / "address.json"
"""Path in the work dir of the host and port at which the driver listens."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SETTLE_S, _POLL_S = 1.0, 0.02
"""Seconds to wait, and between tries, for a starting holder to write its name or an
ending holder to release the lock."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds a lock: the content of the file."""

    host: str
    """Host name."""
    boot: str
    """Boot id of the host, which its containers share; the host name if unknown."""
    pid: int
    launch: str = ""
    """Name of the launch that started the process; "" if none did."""
    generation: int = 0
    """Generation of the launch, from 1; 0 without a launch."""

    def replaces(self, found: "Holder") -> bool:
        """Return whether this process may replace the lock of the process `found`."""
        if found == UNKNOWN:
            return False
        is_older = found.generation < self.generation
        return found.boot != self.boot or (
            is_older and found.launch == self.launch != ""
        )


UNKNOWN = Holder(host="", boot="", pid=0)
"""The holder of a file that names none, for example because the disk is full."""


def this_process(launch: str = "", generation: int = 0) -> Holder:
    """Return this process as a holder; arguments as the fields of `Holder`."""
    host = socket.gethostname()
    try:
        boot = _BOOT.read_text().strip()
    except OSError:
        boot = host
    return Holder(
        host=host, boot=boot, pid=os.getpid(), launch=launch, generation=generation
    )


class Lock:
    """The lock of one file, in one process."""

    def __init__(self, path: Path) -> None:
        """Store the path; nothing is read or locked before `take`."""
        self._path = path
        self._file: IO[bytes] | None = None

    def take(self, ours: Holder) -> Holder | None:
        """Create the file if it is absent, and hold it if no other process does.

        A process that holds it already keeps it. If the file was deleted or moved, the
        new file is held instead.

        Args:
          ours: this process.
        Returns:
          The other process that holds the file, `UNKNOWN` if the file names none. None
          if this process now holds it, the file cannot be written, or its file system
          has no locks.
        """
        if self._file is not None and _is_at(self._file, self._path):
            return None
        self.release()
        until_s = time.monotonic() + _SETTLE_S
        while True:
            try:
                file = _opened(self._path, os.O_CREAT)
            except OSError:  # the next write to the folder reports the cause
                return None
            tried = _try_lock(file, fcntl.LOCK_EX)
            if tried is _Tried.LOCKED and _is_at(file, self._path):
                self._file = file
                self.name(ours)
                return None
            found = _read(file)
            file.close()
            if tried is _Tried.UNSUPPORTED:
                return None
            if tried is _Tried.LOCKED:  # another process has just replaced the file
                continue
            if found is not None and ours.replaces(found):
                try:
                    self._path.unlink(missing_ok=True)
                except OSError:
                    return None
            elif _is_settled(found, until_s):
                return found or UNKNOWN

    def name(self, ours: Holder) -> None:
        """Replace the name of the holder in the file; nothing happens if not held."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk; the lock itself is held
                os.ftruncate(self._file.fileno(), 0)
                os.pwrite(self._file.fileno(), msgspec.json.encode(ours) + b"\n", 0)

    def release(self) -> None:
        """Stop holding the file, which stays."""
        if self._file is not None:
            self._file.close()
            self._file = None


def holder_of(path: Path) -> Holder | None:
    """Return the process of this host that holds a file; None if none does.

    Nothing is created or changed. A lock of another host counts as free; see the
    docstring of the module.
    """
    until_s = time.monotonic() + _SETTLE_S
    while True:
        try:
            file = _opened(path)
        except OSError:
            return None
        with file:
            # A shared lock, so that several processes may look at once.
            if _try_lock(file, fcntl.LOCK_SH) is not _Tried.BUSY:
                return None
            found = _read(file)
        if found is not None and found.boot != this_process().boot:
            return None
        if _is_settled(found, until_s):
            return found or UNKNOWN


@contextlib.contextmanager
def driving(work_dir: Path) -> Iterator[None]:
    """Hold the work dir for a driver of a launch, until the end of the with statement.

    Ranks of an earlier driver may still run there; the new driver takes them over.

    Raises:
      ValueError: another driver of this host holds the work dir, or a trainer that was
        started by hand trains in it.
      OSError: the work dir cannot be created.
    """
    found = holder_of(work_dir / TRAINING)
    if found is not None and not found.launch:
        raise ValueError(problem_of_training(work_dir, found))
    path = work_dir / DRIVER
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = Lock(path)
    found = lock.take(this_process())
    if found is not None:
        raise ValueError(_problem_of_driver(work_dir, found))
    try:
        yield
    finally:
        lock.release()


def refuse_driver(work_dir: Path) -> None:
    """Refuse a work dir in which a launch runs whose driver is on this host.

    Raises:
      ValueError: a driver runs there; the message has its process and its address.
    """
    found = holder_of(work_dir / DRIVER)
    if found is not None:
        raise ValueError(_problem_of_driver(work_dir, found))


def problem_of_training(work_dir: Path, found: Holder, step: int | None = None) -> str:
    """Return why nothing else can train in a work dir, and what to do.

    Args:
      work_dir: the work dir.
      found: the process that trains there.
      step: its last known step; None if unknown.
    """
    place = f"{work_dir}{'' if step is None else f' (step {step})'}"
    if found == UNKNOWN:
        return f"another process is training in {place}; use another --work-dir"
    who = f"process {found.pid} on {found.host}"
    if found.launch:
        return (
            f"{who}, which a launch has started, is training in {place}; stop the "
            f"launch ({_stop(work_dir)}) or use another --work-dir"
        )
    return (
        f"{who} is training in {place}; stop it (kill -INT {found.pid}) or use another "
        "--work-dir"
    )


def _problem_of_driver(work_dir: Path, found: Holder) -> str:
    who = "another process"
    if found != UNKNOWN:
        who = f"process {found.pid} on {found.host}"
    with contextlib.suppress(OSError, ValueError):  # no address yet
        host, port = json.loads((work_dir / ADDRESS).read_text())
        who += f", at {host}:{port}"
    return (
        f"a launch is running in {work_dir}: its driver is {who}; stop it "
        f"({_stop(work_dir)}) or use another --work-dir"
    )


def _stop(work_dir: Path) -> str:
    return f"python -m mjax.launch stop --work-dir {work_dir}"


class _Tried(enum.Enum):
    """Outcome of one try to lock a file."""

    LOCKED = enum.auto()
    BUSY = enum.auto()
    UNSUPPORTED = enum.auto()


def _try_lock(file: IO[bytes], operation: int) -> _Tried:
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return _Tried.BUSY
    except OSError:  # of the kind ENOLCK, EOPNOTSUPP or ENOSYS, by file system
        return _Tried.UNSUPPORTED
    return _Tried.LOCKED


def _opened(path: Path, flags: int = 0) -> IO[bytes]:
    """Open the file for writing, as flock on network file systems requires it.

    Python opens it so that no child process inherits the descriptor; in a child the
    lock would outlive its holder.
    """
    descriptor = os.open(path, os.O_RDWR | flags, 0o644)
    return os.fdopen(descriptor, "r+b", buffering=0)


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _read(file: IO[bytes]) -> Holder | None:
    """Return the holder that the file names; None if it names none."""
    try:
        return msgspec.json.decode(os.pread(file.fileno(), 4096, 0), type=Holder)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _is_settled(found: Holder | None, until_s: float) -> bool:
    """Return whether a name read from a locked file is final; otherwise wait a little.

    A new holder locks the file before it writes its name. The process that the file
    names may be in another container, where it cannot be seen.
    """
    if time.monotonic() > until_s or (found is not None and _is_alive(found.pid)):
        return True
    time.sleep(_POLL_S)
    return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # a process of another user
        return True
    return True
