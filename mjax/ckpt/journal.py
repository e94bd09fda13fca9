"""What happened to a run's checkpoints, one JSON object a line, in the work dir.

The work dir and the store of the checkpoints may be two file systems. The journal knows
of steps that a store has lost altogether, and of damaged ones on a store that cannot be
changed.
"""

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STARTED = "started"
SAVED = "saved"
QUARANTINED = "quarantined"


class Journal:
    """The file checkpoints.jsonl; one process writes, all may read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Name the file; it need not exist."""
        self._path = Path(path)

    def write(self, event: str, step: int, **facts: Any) -> None:
        """Append what happened and bring it to the disk.

        Raises:
          OSError: it cannot be written.
        """
        record = {"event": event, "step": step, "time": time.strftime("%FT%T%z")}
        # A line that a full disk cut off before is ended first.
        data = "\n" + json.dumps(record | facts) + "\n"
        with self._path.open("a") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def events(self, event: str) -> Iterator[dict[str, Any]]:
        """Yield what was written under a name, oldest first."""
        if not self._path.exists():
            return
        for line in self._path.read_text(errors="replace").splitlines():
            # What is no record was cut off by a kill or a full disk, or is damaged.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                if record["event"] == event and isinstance(record["step"], int):
                    yield record

    def run_id(self) -> str:
        """Return the name of the run, the same as long as its work dir lives.

        Raises:
          OSError: it has none yet, and the file cannot be written.
        """
        for record in self.events(STARTED):
            return record["run_id"]
        self.write(STARTED, 0, run_id=secrets.token_hex(8))
        return self.run_id()

    def quarantined(self) -> dict[tuple[int, str], str]:
        """Return (step, save id) of what must not be restored again, and why."""
        return {
            (r["step"], r["save_id"]): r["reason"] for r in self.events(QUARANTINED)
        }

    def last_saved(self) -> int | None:
        """Return the last step that was committed; None where there was none."""
        return max((r["step"] for r in self.events(SAVED)), default=None)
