"""Signs of life: what each process said of itself at its last beat, in a small file.

Enters: files below `beats/` in the work dir, named HOST-RANK-GENERATION.json. Leaves:
the last beat of each process of the newest start, and which processes still beat.
Nothing here changes a file, but for the writer's `encode` and `file_name`.

A thread of Python in each process writes its beat anew every second, in place: a line
of JSON, behind whose end there may be the rest of a longer one. The thread needs the
interpreter lock. So a process that holds it, that is stopped, or whose host is gone
stops beating, while one that waits for others goes on. Whether a process beats is seen
by looking twice, and how long it has stood still is by its own clock: neither compares
the clocks of hosts.
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
"""Beats that a process must miss in a row to be called silent. Chosen: a host with too
much to do delays a thread by a second at times."""
_LOOK_S = 0.1


class Beat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a process said of itself."""

    n: int
    """Beats before this one."""
    whose: Header
    every_s: float
    """Seconds between beats."""
    wall_ns: int
    """Since 1970, when it was written."""
    monotonic_ns: int
    """At the same time."""
    since_ns: int
    """When what the process is doing began, by the same clock."""
    phase: int
    """A `Phase` of `mjax.processes.progress`."""
    step: int
    """Optimizer steps that have been dispatched to the devices."""
    microstep: int
    """Marks within the phase: batches of an evaluation."""
    has_stepped: bool
    """Its first step has ended."""
    entered: int
    """How often it has begun something. All processes of a run begin the same things in
    the same order: the least, and of equal ones the least `microstep`, is behind."""
    doing: str
    """Name of the span that is open."""
    stack: str = ""
    """Of the main thread, innermost frame first, if it stood still since the beat
    before; as faulthandler writes it."""
    end: int | None = None
    """Exit code: the last beat of a process that ended by itself."""
    again: int
    """`n` once more: the line was not read while it was written."""


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
