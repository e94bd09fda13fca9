"""Heartbeats: each process regularly writes its state to a small file.

Input: files below `beats/` in the work dir, named HOST-RANK-GENERATION.json. Output:
the last beat of each process of the newest start, and which processes still beat.
This module changes no file; `encode` and `file_name` are for the writer.

A beat is one line of JSON. A Python thread in each process rewrites it in place every
second, so the rest of a longer, older line may follow it. The thread needs the
interpreter lock: a process stops beating if another thread holds that lock, if it is
stopped, or if its host is gone. A process that waits for others keeps beating. A reader
reads twice to see whether a process beats. It computes the time without progress from
readings of one clock, that of the process's host. So no clocks of different hosts are
compared.
"""

import time
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from mjax.observe.spans import VERSION, Header

FOLDER = "beats"
"""Folder of the heartbeats, in the work dir."""
_TRIES, _RETRY_S = 20, 0.005
_NUM_MISSED = 5
"""Consecutive missed beats after which a process counts as silent. An overloaded host
sometimes delays a thread by a second."""
_LOOK_S = 0.1


class Beat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a process at one beat."""

    n: int
    """Number of earlier beats."""
    whose: Header
    every_s: float
    """Seconds between beats."""
    wall_ns: int
    """Time of the write, since 1970."""
    monotonic_ns: int
    """Reading of the host's monotonic clock at the same time."""
    since_ns: int
    """Reading of the monotonic clock when the current activity of the process began."""
    phase: int
    """A `Phase` of `mjax.processes.progress`."""
    step: int
    """Optimizer steps that have been dispatched to the devices."""
    microstep: int
    """Progress within the phase, such as batches of an evaluation."""
    has_stepped: bool
    """Whether the first step of the process has ended."""
    entered: int
    """Number of operations begun. All processes of a run begin the same operations in
    the same order, so the process with the lowest count is behind; the lowest
    `microstep` breaks a tie."""
    doing: str
    """Name of the open span."""
    stack: str = ""
    """Stack of the main thread, innermost frame first, as faulthandler writes it;
    present only if the thread has not moved since the previous beat."""
    end: int | None = None
    """Exit code, in the last beat of a process that ended by itself."""
    again: int
    """Copy of `n`; if both are equal, the line was not read during a write."""


_decode = msgspec.json.Decoder(Beat).decode


def stem(header: Header) -> str:
    """Return HOST-RANK-GENERATION, with the host name percent-encoded."""
    host = urllib.parse.quote(header.host, safe="")
    return f"{host}-{header.rank}-{header.generation}"


def file_name(header: Header) -> str:
    """Return the name of the file of a process."""
    return f"{stem(header)}.json"


def encode(beat: Beat) -> bytes:
    """Encode a beat as a line of JSON."""
    return msgspec.json.encode(beat) + b"\n"


def read(path: Path, sleep: Callable[[float], None] = time.sleep) -> Beat | None:
    """Return the beat of a process.

    Returns:
      The beat; None if there is no beat yet, or if the process was stopped during a
      write.
    Raises:
      ValueError: the file cannot be read, or has another version.
    """
    problem = ""
    for _ in range(_TRIES):
        try:
            text, newline, _ = path.read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        try:
            beat = _decode(text) if newline else None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            beat, problem = None, str(error)
        if beat is not None and beat.n == beat.again:
            if beat.whose.version != VERSION:
                raise ValueError(
                    f"{path} is of version {beat.whose.version}, this mjax reads "
                    f"{VERSION}; read it with the mjax that wrote it"
                )
            return beat
        sleep(_RETRY_S)
    if problem:
        raise ValueError(f"{path} is not a beat: {problem}")
    return None


def read_run(work_dir: Path) -> tuple[dict[int, Beat], list[str]]:
    """Return the newest start's beats by rank, and messages on unreadable files."""
    found: dict[int, dict[int, Beat]] = {}
    problems: list[str] = []
    for path in sorted((work_dir / FOLDER).glob("*.json")):
        try:
            beat = read(path)
        except ValueError as error:
            problems.append(str(error))
            continue
        if beat is not None:
            found.setdefault(beat.whose.generation, {})[beat.whose.rank] = beat
    return found[max(found)] if found else {}, problems


def still_beating(
    work_dir: Path,
    before: Mapping[int, Beat],
    sleep: Callable[[float], None] = time.sleep,
) -> dict[int, Beat]:
    """Wait for the next beats; return those of the processes that beat again.

    Processes that ended by themselves are returned with their last beat.

    Args:
      work_dir: work dir of the run.
      before: previous beats, by rank.
      sleep: function that waits for a number of seconds.
    """
    again = {rank: beat for rank, beat in before.items() if beat.end is not None}
    every_s = max((beat.every_s for beat in before.values()), default=0.0)
    for _ in range(round(_NUM_MISSED * every_s / _LOOK_S) + 1):
        for rank in before.keys() - again.keys():
            path = work_dir / FOLDER / file_name(before[rank].whose)
            try:
                beat = read(path)
            except ValueError:
                continue
            if beat is not None and beat.n > before[rank].n:
                again[rank] = beat
        if len(again) == len(before):
            break
        sleep(_LOOK_S)
    return again
