"""Keep the finished parts of a long preparation on disk, and log its progress.

Input: results by name, during the work. Output: the same results, for a process that
continues after this one was killed; and a line of progress every few seconds.
"""

import logging
import pathlib
import time
from collections.abc import Callable
from typing import Any

from mjax.data import cache_files

_STATE = "unfinished.json"
_LINE_S = 5.0
SAVE_S = 10.0
"""Maximum seconds of work that a killed process loses."""
_log = logging.getLogger(__name__)


class Unfinished:
    """Results of the work in a folder; each change replaces their file atomically."""

    def __init__(
        self,
        folder: pathlib.Path,
        versions: list[str],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Read the results of an earlier process.

        Args:
          folder: existing folder of the work.
          versions: versions of the software that determines the result. Work of other
            versions is not continued.
          check: called before a result is kept; raises if the input of the work has
            changed.
        Raises:
          ValueError: the file cannot be read.
        """
        self._folder, self._versions, self._check = folder, versions, check
        self._facts: dict[str, Any] = {}
        self._saved = time.monotonic()
        try:
            found = cache_files.read_json(folder / _STATE)
        except cache_files.DamagedFileError:
            return
        if found["versions"] != versions:
            _log.warning(
                "%s was begun by %s, this is %s; it starts over",
                *(folder, " ".join(found["versions"]), " ".join(versions)),
            )
            return
        self._facts = found["facts"]

    def get(self, name: str) -> Any:
        """Return a result; None if it does not exist yet."""
        return self._facts.get(name)

    def put(self, name: str, fact: Any) -> None:
        """Keep a result, a JSON value, replacing an older one of this name.

        Raises:
          ValueError: `check` raised; the older results are kept.
        """
        self._check()
        self._facts[name] = fact
        content = {"versions": self._versions, "facts": self._facts}
        with cache_files.written_whole(self._folder / _STATE) as temporary:
            cache_files.write_json(temporary, content)
        self._saved = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether SAVE_S seconds have passed since the last `put`."""
        return time.monotonic() - self._saved >= SAVE_S


def remove(folder: pathlib.Path) -> None:
    """Delete the results kept in a folder, because its work is complete."""
    (folder / _STATE).unlink(missing_ok=True)


class Meter:
    """Logs the progress of work every few seconds."""

    def __init__(self, work: str, total_bytes: int, *, num_bytes: int = 0) -> None:
        """Start measuring.

        Args:
          work: name of the work, such as "tokenizing".
          total_bytes: bytes of the whole work.
          num_bytes: bytes that an earlier process has done.
        """
        self._work, self._total_bytes = work, total_bytes
        self._num_before = self._num_bytes = num_bytes
        self._num_documents = self._num_tokens = 0
        self._begun = self._logged = time.monotonic()

    def add(self, num_bytes: int, *, documents: int = 0, tokens: int = 0) -> None:
        """Add the work done since the last call."""
        self._num_bytes += num_bytes
        self._num_documents += documents
        self._num_tokens += tokens
        now = time.monotonic()
        if now - self._logged >= _LINE_S:
            self._logged = now
            _log.info("%s", self.line(now - self._begun))

    def line(self, elapsed_s: float) -> str:
        """Return the line of progress after elapsed_s seconds of this process."""
        rate = (self._num_bytes - self._num_before) / elapsed_s
        left = ""  # unknown until something is read
        if rate > 0:
            left_s = max(self._total_bytes - self._num_bytes, 0) / rate
            left = f"{duration(left_s)} left"
        share = self._num_bytes / max(self._total_bytes, 1)
        parts = [
            f"{self._num_bytes / 1e9:.2f} of {self._total_bytes / 1e9:.2f} GB "
            f"({share:.0%})",
            f"{self._num_documents:,} documents" if self._num_documents else "",
            f"{rate / 1e6:.1f} MB/s",
            f"{self._num_tokens / elapsed_s:,.0f} tokens/s" if self._num_tokens else "",
            left,
        ]
        return f"{self._work}: {', '.join(part for part in parts if part)}"


def duration(seconds: float) -> str:
    """Return a duration as text, in seconds, minutes, hours or days."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes / 60:.1f} h" if minutes < 2880 else f"{minutes / 1440:.0f} days"
