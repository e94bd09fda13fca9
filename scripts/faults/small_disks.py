"""Small file systems for runs: mount, fill, freeze, or turn them read-only.

Mounting needs root and the right to mount a tmpfs or, with a loop device, ext4.
"""

import contextlib
import errno
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_LIMIT_S = 300.0
"""Time limit of a remount, and of filling a file system."""


@contextlib.contextmanager
def tmpfs(path: Path, size_mb: int) -> Iterator[None]:
    """Mount a file system of a given size.

    Raises:
      RuntimeError: mounting is refused.
    """
    path.mkdir(parents=True)
    options = f"size={size_mb}M"
    _mount("-t", "tmpfs", "-o", options, "tmpfs", str(path))
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@contextlib.contextmanager
def ext4(path: Path, size_mb: int) -> Iterator[None]:
    """Mount a file system that `frozen` can stop; its blocks are in memory.

    Raises:
      RuntimeError: mounting is refused, for example because there is no loop device.
    """
    path.mkdir(parents=True)
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as image:
        image.truncate(size_mb * 2**20)
        # Without blocks reserved for root, who runs this: a full disk is full.
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-F", image.name], check=True)
        _mount("-o", "loop", image.name, str(path))
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", str(path)], check=True)


@contextlib.contextmanager
def frozen(path: Path) -> Iterator[None]:
    """Block every write to a file system of `ext4` inside a with statement."""
    subprocess.run(["fsfreeze", "-f", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "-u", str(path)], check=True)


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(
            f"mount {' '.join(arguments)} is refused: {done.stderr.strip()}; this "
            "script needs root and the right to mount"
        )


def fill(folder: Path, left_bytes: int) -> Path:
    """Write a file that leaves this many free bytes; return its path."""
    path = folder / "filler"
    until_s = time.perf_counter() + _LIMIT_S
    with path.open("wb") as file:
        while True:
            found = os.statvfs(folder)
            size = found.f_bavail * found.f_frsize - left_bytes
            try:
                os.posix_fallocate(file.fileno(), 0, size)
                return path
            except OSError as error:  # a run has written between the two calls
                if error.errno != errno.ENOSPC or time.perf_counter() > until_s:
                    raise


def remount(store: Path, how: str) -> None:
    """Change a file system to ro or rw, as soon as no file is being written there."""
    until_s = time.perf_counter() + _LIMIT_S
    while True:
        try:
            return _mount("-o", f"remount,{how}", str(store))
        except RuntimeError:
            if time.perf_counter() > until_s:
                raise
            time.sleep(0.01)
