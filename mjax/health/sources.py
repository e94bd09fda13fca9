"""Where checks read: commands and files, with limits of time and size.

Enters: the description of a source. Leaves: a `Reading`. Commands are run without a
shell, in the C locale, and killed with their children when their time is over. A file
or an output of more than `MAX_BYTES` is cut, and says so.
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
from typing import IO, Protocol, runtime_checkable

MAX_BYTES = 32 * 2**20
"""Of an output, chosen: `nvidia-smi -q -x` of eight GPUs has 0.5 MB."""
_CHUNK_BYTES = 2**16
_SHOWN_CHARS = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """What a source has said."""

    text: str = ""
    num_bytes: int | None = None
    """That the source has written; None if that is not known. Where `text` has fewer
    it was cut."""
    status: int | None = 0
    """Exit status of a command; None if its time was over."""
    error: str = ""
    """What a command wrote to stderr, the end of it."""
    absent: str = ""
    """Why there is nothing to read: no such command, file or device."""

    @property
    def cut(self) -> str:
        """Why the text is not whole; empty if it is."""
        if self.status is None:
            return "its time limit passed"
        if self.num_bytes is not None:
            num = len(self.text.encode(errors="surrogateescape"))
            if num != self.num_bytes:
                return f"{num} of {self.num_bytes} bytes were read"
        return ""


@runtime_checkable
class Source(Protocol):
    """Something that can be read; equal sources are read once."""

    @property
    def shown(self) -> str:
        """For a person: the command line, or the path."""
        ...

    def read(self, limit_s: float) -> Reading:
        """Read it, in limit_s seconds at most."""
        ...


@dataclasses.dataclass(frozen=True)
class Command:
    """The output of a program."""

    argv: tuple[str, ...]

    @property
    def shown(self) -> str:
        """Its command line."""
        return " ".join(self.argv)

    def read(self, limit_s: float) -> Reading:
        """Run it."""
        environment = os.environ | {"LC_ALL": "C", "LANG": "C", "TZ": "UTC"}
        try:
            process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env=environment,
            )
        except FileNotFoundError:
            return Reading(absent=f"there is no command {self.argv[0]}")
        except OSError as error:
            return Reading(absent=f"{self.argv[0]} cannot be run: {error}")
        out, num_bytes, error, is_over = _drain(process, time.monotonic() + limit_s)
        return Reading(
            text=_decoded(out),
            num_bytes=num_bytes,
            status=None if is_over else process.returncode,
            error=_decoded(error).strip()[-_SHOWN_CHARS:],
        )


@dataclasses.dataclass(frozen=True)
class File:
    """The content of one file."""

    path: str

    @property
    def shown(self) -> str:
        """Its path."""
        return self.path

    def read(self, limit_s: float) -> Reading:
        """Read it; files of /proc and /sys do not say how long they are."""
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

    A file with several lines has several of these. One that cannot be read is a line
    `path<tab>!reason`; what begins with ! or \\ in a file gets a \\ before it.
    """

    patterns: tuple[str, ...]

    @property
    def shown(self) -> str:
        """Its patterns."""
        return " ".join(self.patterns)

    def read(self, limit_s: float) -> Reading:
        """Read all that there are."""
        until_s = time.monotonic() + limit_s
        paths = {
            path
            for pattern in self.patterns
            for path in Path("/").glob(pattern.lstrip("/"))
        }
        if not paths:
            return Reading(absent=f"there is no {self.shown}")
        lines: list[str] = []
        for path in sorted(paths):
            if time.monotonic() > until_s:
                return Reading(text="".join(lines), status=None)
            lines += [f"{path}\t{line}\n" for line in _lines_of(path)]
        text = "".join(lines)
        num_bytes = len(text.encode(errors="surrogateescape"))
        return Reading(text=text, num_bytes=num_bytes)


@dataclasses.dataclass(frozen=True)
class Environment:
    """Variables of the environment whose names begin like this, as `NAME=value`."""

    prefixes: tuple[str, ...]

    @property
    def shown(self) -> str:
        """The names."""
        return " ".join(f"${prefix}*" for prefix in self.prefixes)

    def read(self, limit_s: float) -> Reading:
        """Read them; none is an empty text."""
        del limit_s
        return self.of(os.environ)

    def of(self, environment: Mapping[str, str]) -> Reading:
        """Read them there."""
        found = sorted(
            f"{name}={value}\n"
            for name, value in environment.items()
            if name.startswith(self.prefixes)
        )
        text = "".join(found)
        num_bytes = len(text.encode(errors="surrogateescape"))
        return Reading(text=text, num_bytes=num_bytes)


def _lines_of(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            text = _decoded(file.read(_CHUNK_BYTES))
    except OSError as error:
        return [f"!{error.strerror}"]
    lines = text.splitlines() or [""]
    return [f"\\{line}" if line.startswith(("!", "\\")) else line for line in lines]


def _decoded(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


def _drain(
    process: subprocess.Popen[bytes], until_s: float
) -> tuple[bytes, int, bytes, bool]:
    """Read a process to its end, or kill it.

    Returns:
      at most `MAX_BYTES` of its output, how many bytes there were, the end of stderr,
      and whether its time was over.
    """
    out, error, num_bytes, is_over = bytearray(), bytearray(), 0, False
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
                is_over = left_s <= 0
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
    if not is_over and num_bytes <= MAX_BYTES:
        try:
            process.wait(max(0.0, until_s - time.monotonic()))
            return bytes(out), num_bytes, bytes(error), False
        except subprocess.TimeoutExpired:
            is_over = True
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return bytes(out), num_bytes, bytes(error), is_over
