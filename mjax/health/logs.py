"""The kernel log as a source: a command or a file, read as a stream.

Input: the output of `journalctl` or `dmesg`, or a file, of any length. Output: its
`Digest` as JSON. A log that reached its time limit, or whose last line is unterminated,
is incomplete.
"""

import dataclasses
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from mjax.health.log_digest import CHUNK_BYTES, Now, Scanner
from mjax.health.sources import C_LOCALE, Command, File, Reading, kill

_SHOWN_CHARS = 300


@dataclasses.dataclass(frozen=True)
class Log:
    """The kernel log, from the first of several sources that returns a line."""

    ways: tuple[Command | File, ...]
    is_severe: bool = False
    """Whether the source returns only lines of severe levels: it may be empty, and a
    line that matches no rule is reported as unlisted."""

    @property
    def shown(self) -> str:
        """Names of the sources, in the order in which they are tried."""
        return " or ".join(way.shown for way in self.ways)

    def read(self, limit_s: float) -> Reading:
        """Read the log; the text is a `Digest` as JSON."""
        until_s = time.monotonic() + limit_s
        reasons = []
        for way in self.ways:
            scanner = Scanner(way.shown, now(), is_severe=self.is_severe)
            reason = _feed(scanner, way, until_s)
            if reason is None:
                return Reading(status=None)
            if not reason and scanner.num_bytes == 0 and not self.is_severe:
                reason = f"{way.shown} gives no line"
            if not reason:
                return scanner.reading()
            reasons.append(reason)
        return Reading(absent="; ".join(reasons))


def now() -> Now:
    """Return the present time, since 1970 and since boot."""
    return Now(unix_s=time.time(), uptime_s=time.monotonic())


def _feed(scanner: Scanner, way: Command | File, until_s: float) -> str | None:
    """Read one source to its end.

    Returns:
      why the source could not be read; "" if it was read, None after the time limit.
    """
    if isinstance(way, File):
        return _feed_file(scanner, Path(way.path), until_s)
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                way.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env=os.environ | C_LOCALE,
            )
        except FileNotFoundError:
            return f"there is no command {way.argv[0]}"
        except OSError as error:
            return f"{way.argv[0]} cannot be run: {error.strerror}"
        try:
            for data in _chunks(process, until_s):
                scanner.feed(data)
            status = process.wait(max(0.0, until_s - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired):
            return None
        finally:
            _end(process)
        errors.seek(0)
        said = errors.read()[-_SHOWN_CHARS:].decode(errors="replace").strip()
    if status:
        return f"{way.shown} ended with {status}" + (f": {said}" if said else "")
    return ""


def _feed_file(scanner: Scanner, path: Path, until_s: float) -> str | None:
    try:
        with path.open("rb") as file:
            while data := file.read(CHUNK_BYTES):
                scanner.feed(data)
                if time.monotonic() > until_s:
                    return None
    except FileNotFoundError:
        return f"there is no {path}"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return ""


def _chunks(process: subprocess.Popen[bytes], until_s: float) -> Iterator[bytes]:
    """Yield the output of a process.

    Raises:
      TimeoutError: it did not end in time.
    """
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        os.set_blocking(process.stdout.fileno(), False)
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not selector.select(left_s):
                raise TimeoutError
            data = os.read(process.stdout.fileno(), CHUNK_BYTES)
            if not data:
                return
            yield data


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        kill(process)
    if process.stdout is not None:
        process.stdout.close()
