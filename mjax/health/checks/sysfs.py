"""Small files of /sys and /proc, and limits for counters since boot.

Input: the text of `sources.Files`, lines `path<tab>content`. Output: a `Tree`.

Kernel counters start at boot, or when a driver is loaded, and are not cleared. A fixed
limit would fail a host forever after one bad day, so the limits of such counters grow
with the time since boot: `at_start + max_per_hour * hours`. `at_start` allows for
events while links train and drivers load.

Source of the format of /proc/uptime: proc_uptime(5).
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence

from mjax.health.findings import UnreadableError
from mjax.health.settings import Settings

UPTIME = "/proc/uptime"
_UPTIME = re.compile(r"([0-9]{1,12})\.[0-9]{1,3} [0-9]{1,15}\.[0-9]{1,3}")
_NUMBER = re.compile(r"[0-9]{1,20}")
_S_PER_HOUR = 3600
_SHOWN_CHARS = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree:
    """Files by path: their content, or why it cannot be read."""

    values: Mapping[str, str]
    errors: Mapping[str, str]
    paths: Sequence[str]
    """All paths, including those of unreadable files, in numerical order."""

    def has(self, path: str) -> bool:
        """Return whether a file exists, readable or not."""
        return path in self.values or path in self.errors

    def read(self, path: str) -> str:
        """Return the content of a file, its lines joined by newlines.

        Raises:
          UnreadableError: it does not exist, or cannot be read.
        """
        if path in self.values:
            return self.values[path]
        raise UnreadableError(f"{path}: {self.errors.get(path, 'it is not there')}")

    def number(self, path: str) -> int:
        """Return the integer in a file; raises as `read`."""
        text = self.read(path)
        if not _NUMBER.fullmatch(text):
            raise UnreadableError(
                f"{path}: expected a number, got {text[:_SHOWN_CHARS]!r}"
            )
        return int(text)


@functools.lru_cache(16)
def tree(text: str) -> Tree:
    """Parse the text of `sources.Files`.

    Raises:
      UnreadableError: a line has no path.
    """
    values: dict[str, str] = {}
    errors: dict[str, str] = {}
    for line in text.splitlines():
        path, tab, content = line.partition("\t")
        if not tab or not path.startswith("/"):
            raise UnreadableError(f"expected a path, got {line[:_SHOWN_CHARS]!r}")
        if content.startswith("!"):
            errors[path] = content[1:]
            continue
        content = content.removeprefix("\\")
        values[path] = f"{values[path]}\n{content}" if path in values else content
    paths = sorted({*values, *errors}, key=natural)
    return Tree(values=values, errors=errors, paths=paths)


def natural(text: str) -> list[tuple[int, str]]:
    """Return a key that sorts mlx5_10 after mlx5_9."""
    pieces = re.split(r"([0-9]+)", text)
    return [(int(p[:20]) if p[:1] in "0123456789" and p else -1, p) for p in pieces]


def hours_up(files: Tree) -> float:
    """Return the hours since boot, from /proc/uptime.

    Raises:
      UnreadableError: it does not exist, or is in another format.
    """
    text = files.read(UPTIME)
    found = _UPTIME.fullmatch(text)
    if found is None:
        raise UnreadableError(f"{UPTIME}: {text[:_SHOWN_CHARS]!r}")
    return int(found[1]) / _S_PER_HOUR


def allowed(settings: Settings, check: str, hours: float) -> float:
    """Return the number of events since boot that the limits of a check allow."""
    at_start = settings.limit(check, "at_start")
    return at_start + settings.limit(check, "max_per_hour") * hours
