"""Inputs of checks: commands and files, with limits of time and size.

Input: the description of a source. Output: a `Reading`. Commands run without a shell,
in the C locale, and are killed with their children at their time limit. A file or an
output of more than `MAX_BYTES` is truncated and marked so.
"""

import contextlib
import dataclasses
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Protocol, runtime_checkable

MAX_BYTES = 32 * 2**20
"""Maximum size of an output. `nvidia-smi -q -x` of eight GPUs has 0.5 MB."""
_CHUNK_BYTES = 2**16
_SMALL_BYTES = 2**16
"""Maximum size of each of several files. A file of /sys has at most a page."""
_SHOWN_CHARS = 200
C_LOCALE: Mapping[str, str] = MappingProxyType(
    {"LC_ALL": "C", "LANG": "C", "TZ": "UTC"}
)
"""Variables set for every command, to fix the language and time zone of its output."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """The output of a source."""

    text: str = ""
    num_bytes: int | None = None
    """Number of bytes that the source wrote; None: unknown. A shorter `text` is
    truncated."""
    status: int | None = 0
    """Exit status of a command; None after its time limit."""
    error: str = ""
    """The last part of a command's stderr."""
    absent: str = ""
    """Why there is nothing to read: no such command, file or device."""

    @property
    def cut(self) -> str:
        """Why the text is incomplete; empty if it is complete."""
        if self.status is None:
            return "its time limit passed"
        if self.num_bytes is not None:
            num = num_bytes_of(self.text)
            if num != self.num_bytes:
                return f"{num} of {self.num_bytes} bytes were read"
        return ""


def num_bytes_of(text: str) -> int:
    """Return the number of bytes of an output before it was decoded."""
    return len(text.encode(errors="surrogateescape"))


def whole(text: str) -> Reading:
    """Return the reading of a complete text."""
    return Reading(text=text, num_bytes=num_bytes_of(text))


@runtime_checkable
class Source(Protocol):
    """Something that can be read; equal sources are read once."""

    @property
    def shown(self) -> str:
        """Name for a person: the command line, or the path."""
        ...

    def read(self, limit_s: float) -> Reading:
        """Read the source, in limit_s seconds at most."""
        ...


@dataclasses.dataclass(frozen=True)
class Command:
    """The output of a program."""

    argv: tuple[str, ...]

    @property
    def shown(self) -> str:
        """The command line."""
        return " ".join(self.argv)

    def read(self, limit_s: float) -> Reading:
        """Run the program and read its output."""
        try:
            process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env=os.environ | C_LOCALE,
            )
        except FileNotFoundError:
            return Reading(absent=f"there is no command {self.argv[0]}")
        except OSError as error:
            return Reading(absent=f"{self.argv[0]} cannot be run: {error}")
        output = _drain(process, time.monotonic() + limit_s)
        return Reading(
            text=_decoded(output.out),
            num_bytes=output.num_bytes,
            status=None if output.is_late else process.returncode,
            error=_decoded(output.error).strip()[-_SHOWN_CHARS:],
        )


@dataclasses.dataclass(frozen=True)
class File:
    """The content of one file."""

    path: str

    @property
    def shown(self) -> str:
        """Path of the file."""
        return self.path

    def read(self, limit_s: float) -> Reading:
        """Read the file; files of /proc and /sys do not report their size."""
        del limit_s
        try:
            with Path(self.path).open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return Reading(absent=f"there is no {self.path}")
        except OSError as error:
            return Reading(absent=f"{self.path} cannot be read: {error.strerror}")
        return Reading(text=_decoded(data[:MAX_BYTES]), num_bytes=len(data))


@dataclasses.dataclass(frozen=True)
class Files:
    """Many small files, as lines `path<tab>content`, sorted by path.

    A file with several lines gives several such lines. An unreadable file gives a line
    `path<tab>!reason`; a line of a file that begins with ! or \\ is prefixed with \\.
    """

    patterns: tuple[str, ...]
    present: tuple[str, ...] = ()
    """Patterns of files that are listed but not read, such as devices: lines `path`."""

    @property
    def shown(self) -> str:
        """Patterns of the paths."""
        return " ".join((*self.patterns, *self.present))

    def read(self, limit_s: float) -> Reading:
        """Read all existing files."""
        until_s = time.monotonic() + limit_s
        paths, listed = _matching(self.patterns), _matching(self.present)
        if not paths and not listed:
            return Reading(absent=f"there is no {self.shown}")
        lines = [f"{path}\n" for path in sorted(listed)]
        for path in sorted(paths):
            if time.monotonic() > until_s:
                return Reading(text="".join(lines), status=None)
            lines += [f"{path}\t{line}\n" for line in _lines_of(path)]
        return whole("".join(lines))


@dataclasses.dataclass(frozen=True)
class Environment:
    """Environment variables whose names begin with given prefixes, as `NAME=value`."""

    prefixes: tuple[str, ...]

    @property
    def shown(self) -> str:
        """Prefixes of the names of the variables."""
        return " ".join(f"${prefix}*" for prefix in self.prefixes)

    def read(self, limit_s: float) -> Reading:
        """Read the variables; if there are none, the text is empty."""
        del limit_s
        return self.of(os.environ)

    def of(self, environment: Mapping[str, str]) -> Reading:
        """Read the variables of a given environment."""
        found = sorted(
            f"{name}={value}\n"
            for name, value in environment.items()
            if name.startswith(self.prefixes)
        )
        return whole("".join(found))


def _matching(patterns: tuple[str, ...]) -> set[Path]:
    return {p for each in patterns for p in Path("/").glob(each.lstrip("/"))}


def _lines_of(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            data = file.read(_SMALL_BYTES + 1)
    except OSError as error:
        return [f"!{error.strerror}"]
    if len(data) > _SMALL_BYTES:
        return [f"!it has more than {_SMALL_BYTES} bytes"]
    lines = _decoded(data).splitlines() or [""]
    return [f"\\{line}" if line.startswith(("!", "\\")) else line for line in lines]


def _decoded(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Output:
    """The output of a process."""

    out: bytes
    """At most `MAX_BYTES`."""
    num_bytes: int
    """Bytes written to stdout, kept or not."""
    error: bytes
    """The end of stderr."""
    is_late: bool
    """Whether the program reached the time limit before it ended."""


def _drain(process: subprocess.Popen[bytes], until_s: float) -> _Output:
    """Read the output of a process up to its end, `MAX_BYTES` or the time limit."""
    out, error, num_bytes, is_late = bytearray(), bytearray(), 0, False
    assert process.stdout is not None
    assert process.stderr is not None
    pipes: list[IO[bytes]] = [process.stdout, process.stderr]
    with selectors.DefaultSelector() as selector, process.stdout, process.stderr:
        for pipe in pipes:
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            left_s = until_s - time.monotonic()
            if left_s <= 0 or num_bytes > MAX_BYTES:
                is_late = left_s <= 0
                break
            for key, _ in selector.select(left_s):
                data = os.read(key.fd, _CHUNK_BYTES)
                if not data:
                    selector.unregister(key.fileobj)
                elif key.fileobj is process.stdout:
                    num_bytes += len(data)
                    out += data[: max(0, MAX_BYTES - len(out))]
                else:
                    error = (error + data)[-_CHUNK_BYTES:]
    if is_late or num_bytes > MAX_BYTES:
        kill(process)
    else:
        is_late = not _has_ended(process, until_s)
    return _Output(
        out=bytes(out), num_bytes=num_bytes, error=bytes(error), is_late=is_late
    )


def _has_ended(process: subprocess.Popen[bytes], until_s: float) -> bool:
    """Return whether a process ends in time; otherwise kill it."""
    try:
        process.wait(max(0.0, until_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        kill(process)
        return False
    return True


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with its children, and collect its status."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
