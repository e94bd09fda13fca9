"""Read many small files as one text, or run a command for each of several devices.

Input: the text of a `Files` source, or the devices of a host. Output: the lines of
each file by its path; the output of each device after a line that names it.
"""

import dataclasses
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mjax.health.findings import UnreadableError, quoted
from mjax.health.sources import Command, Reading, whole

_HEAD = re.compile(r"^# (/[\w/.-]{1,100}) (-?[0-9]{1,3})$")
_NUMBER = re.compile(r"([0-9]+)")


def lines_of(text: str) -> Mapping[str, Sequence[str]]:
    """Return the lines of each file of a `Files` source by path, sorted by path.

    Numbers in paths sort as numbers: cpu2 is before cpu10.

    Raises:
      UnreadableError: it is not from a `Files` source, or a file cannot be read.
    """
    found: dict[str, list[str]] = {}
    for line in text.split("\n")[:-1]:
        path, tab, content = line.partition("\t")
        if not tab or not path.startswith("/"):
            raise UnreadableError(f"no path and tab in {quoted(line)}")
        if content.startswith("!"):
            raise UnreadableError(f"{path}: {content[1:]}")
        found.setdefault(path, []).append(content.removeprefix("\\"))
    if not found or not text.endswith("\n"):
        raise UnreadableError("it is empty, or ends early")
    return {path: found[path] for path in sorted(found, key=_natural)}


def _natural(name: str) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part.isdecimal() else (-1, part)
        for part in _NUMBER.split(name)
    ]


def values(text: str) -> Mapping[str, str]:
    """Return the content of each file of a `Files` source of one-line files, by path.

    Raises:
      UnreadableError: see `lines_of`; or a file has more than one line.
    """
    found = {}
    for path, lines in lines_of(text).items():
        if len(lines) != 1:
            raise UnreadableError(f"{path} has {len(lines)} lines")
        found[path] = lines[0].strip()
    return found


@dataclasses.dataclass(frozen=True)
class Each:
    """The output of a command for each device of a folder of /sys.

    Each output follows a line `# FOLDER/NAME STATUS`, such as `# /dev/nvme0 0`.
    """

    argv: tuple[str, ...]
    """Command line; the path or name of the device is added at the end."""
    pattern: str
    """Pattern of the devices' folders in /sys; the last part is the device's name."""
    folder: str = "/dev"
    """Folder of the device's path; empty: the command receives only the name."""

    @property
    def shown(self) -> str:
        """The command line."""
        return f"{' '.join(self.argv)} {self._given(Path(self.pattern).name)}"

    def read(self, limit_s: float) -> Reading:
        """Run the command for all devices, one after the other."""
        until_s = time.monotonic() + limit_s
        names = sorted(
            {path.name for path in Path("/").glob(self.pattern.lstrip("/"))},
            key=_natural,
        )
        if not names:
            return Reading(absent=f"there is no {self.pattern}")
        texts = []
        for name in names:
            command = Command((*self.argv, self._given(name)))
            reading = command.read(max(0.0, until_s - time.monotonic()))
            if reading.absent or reading.cut:
                return reading
            said = reading.text if reading.text.strip() else reading.error
            head = f"# {self.folder}/{name} {reading.status}"
            texts.append(f"{head}\n{said.rstrip()}\n")
        return whole("".join(texts))

    def _given(self, name: str) -> str:
        """Return the command's argument for a device."""
        return f"{self.folder}/{name}" if self.folder else name


def outputs(text: str) -> Iterator[tuple[str, str]]:
    """Yield (path of the device, output) for each device of an `Each` source.

    Raises:
      UnreadableError: it is not from an `Each` source, or a command has failed.
    """
    device, status, lines = "", "", []
    for line in [*text.splitlines(), "# /end 0"]:
        head = _HEAD.match(line)
        if head is None:
            lines.append(line)
            continue
        if not device and lines:
            raise UnreadableError(f"no device before {quoted(lines[0])}")
        if device and status != "0":
            said = " ".join(lines)[:200]
            raise UnreadableError(f"{device}: it ended with {status}: {said}")
        if device:
            yield device, "\n".join(lines)
        device, status, lines = head[1], head[2], []
