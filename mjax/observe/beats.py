"""Heartbeats: the state that each process wrote at its last beat, in a small file.

Enters: files below `beats/` in the work dir, named HOST-RANK-GENERATION.json. Leaves:
the last beat of each process of the newest start, and which processes still beat.
This module changes no file; `encode` and `file_name` are for the writer.

A Python thread in each process rewrites its beat in place every second: a line of JSON.
The rest of a longer, older line may follow it. The thread needs the interpreter lock.
So a process stops beating if it holds that lock, if it is stopped, or if its host is
gone. A process that waits for others goes on beating. A reader looks twice to see
whether a process beats. How long a process has stood still follows from its own clock.
Neither compares the clocks of hosts.
"""

import time
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from mjax.observe.spans import VERSION, Header

FOLDER = "beats"
"""In the work dir."""
_TRIES, _RETRY_S = 20, 0.005
_NUM_MISSED = 5
"""Beats that a process must miss in a row to count as silent. Chosen: an overloaded
host delays a thread by a second at times."""
_LOOK_S = 0.1


class Beat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a process at one beat."""

    n: int
    """Beats before this one."""
    whose: Header
    every_s: float
    """Seconds between beats."""
    wall_ns: int
    """Time of the write, since 1970."""
    monotonic_ns: int
    """The monotonic clock at the same time."""
    since_ns: int
    """When its present activity began, by the same clock."""
    phase: int
    """A `Phase` of `mjax.processes.progress`."""
    step: int
    """Optimizer steps that have been dispatched to the devices."""
    microstep: int
    """Marks within the phase: batches of an evaluation."""
    has_stepped: bool
    """Its first step has ended."""
    entered: int
    """How many operations it has begun. All processes of a run begin the same ones in
    the same order: the process with the lowest count is behind, and of equal ones the
    process with the lowest `microstep`."""
    doing: str
    """Name of the open span."""
    stack: str = ""
    """Stack of the main thread, innermost frame first, as faulthandler writes it; only
    if the thread has stood still since the beat before."""
    end: int | None = None
    """Exit code: the last beat of a process that ended by itself."""
    again: int
    """`n` again: shows that the line was not read while it was written."""


_decode = msgspec.json.Decoder(Beat).decode


def stem(header: Header) -> str:
    """Return HOST-RANK-GENERATION; a host may have any name."""
    host = urllib.parse.quote(header.host, safe="")
    return f"{host}-{header.rank}-{header.generation}"


def file_name(header: Header) -> str:
    """Return the name of the file of a process."""
    return f"{stem(header)}.json"


def encode(beat: Beat) -> bytes:
    """Write a beat, with the end of its line."""
    return msgspec.json.encode(beat) + b"\n"


def read(path: Path, sleep: Callable[[float], None] = time.sleep) -> Beat | None:
    """Return the beat of a process.

    Returns:
      None if there is none yet, or if the process was stopped while it wrote.
    Raises:
      ValueError: the file cannot be read, or is of another version.
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
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
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
        raise ValueError(f"{path} is no beat: {problem}")
    return None


def read_run(work_dir: Path) -> tuple[dict[int, Beat], list[str]]:
    """Return the beats of the newest start, by rank, and what could not be read."""
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
    """Return the next beat of each process that beats again; wait for it.

    Processes that have ended by themselves count as they are.

    Args:
      work_dir: of the run.
      before: the last beats, by rank.
      sleep: waits.
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
