"""The events of a run, from its driver and other sources: one JSON object per line.

Input: `events.jsonl` in the work dir, to which `mjax.launch.journal` appends. Output:
its events in file order, and problems of the file.
"""

from pathlib import Path
from typing import Any

import msgspec

NAME = "events.jsonl"
"""File of the events, in the work dir."""
DRIVER = "driver"
"""Source of the events of a launch."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a run."""

    time_ns: int
    """Time since 1970, by the clock of the writer."""
    monotonic_ns: int | None = None
    """Time by the monotonic clock of the same host, since the boot that the event
    `launch` names."""
    number: int | None = None
    """Consecutive number of the event in the journal of its source."""
    kind: str
    source: str = DRIVER
    generation: int | None = 0
    """Number of the start within the launch, from 1; 0 before the first start. None if
    the source does not know it, as the commands of `mjax.health` that watch a host."""
    severity: str = "info"
    """`debug`, `info`, `warning` or `error`."""
    host: str | None = None
    rank: int | None = None
    text: str = ""
    data: dict[str, Any] = {}


_decode = msgspec.json.Decoder(Event).decode


def read(work_dir: Path) -> tuple[list[Event], list[str]]:
    """Read the events of a run; its driver may still be writing.

    Returns:
      the events, none if there is no file; and descriptions of the lines that were left
      out, for people.
    Raises:
      ValueError: the file cannot be read.
    """
    path = work_dir / NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}; move it away, or check its "
            "permissions"
        ) from error
    *whole, rest = data.split(b"\n")
    found, problems = [], []
    for number, line in enumerate(whole, start=1):
        try:
            found.append(_decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            problems.append(f"{path}, line {number} is left out: {error}")
    if rest:
        problems.append(f"{path}, line {len(whole) + 1} is left out: it has no end")
    return found, problems
