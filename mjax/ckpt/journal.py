"""The journal of a run's checkpoints in the work dir: one JSON object per line.

The work dir and the store of the checkpoints may be two file systems. The journal lists
steps that a store has lost completely, and damaged steps on a read-only store.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mjax import checked_json

STARTED = "started"
SAVED = "saved"
QUARANTINED = "quarantined"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One line of the journal; fields that its event does not use are empty."""

    event: str
    step: int
    save_id: str = ""
    reason: str = "the reason was not recorded"
    run_id: str = ""


class Journal:
    """The file checkpoints.jsonl; one process writes, all may read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Name the file; it need not exist."""
        self._path = Path(path)

    def write(self, event: str, step: int, **facts: Any) -> None:
        """Append an event and flush it to disk.

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

    def records(self) -> "Records":
        """Return the current content."""
        return Records(tuple(self._read()))

    def _read(self) -> Iterator[Record]:
        """Yield the records, oldest first."""
        if not self._path.exists():
            return
        known = {field.name for field in dataclasses.fields(Record)}
        for line in self._path.read_text(errors="replace").splitlines():
            # An invalid line was cut off by a kill or a full disk, or is damaged.
            with contextlib.suppress(ValueError):
                found = checked_json.read(line, dict[str, Any])
                fields = {k: v for k, v in found.items() if k in known}
                yield checked_json.check(fields, Record)

    def run_id(self, new: str) -> str:
        """Return the id of the run, which stays the same while its work dir exists.

        Args:
          new: becomes the id if the run has none yet.
        Raises:
          OSError: it has none yet, and the file cannot be written.
        """
        found = self.records().run_id
        if found is None:
            self.write(STARTED, 0, run_id=new)
        return found or new


@dataclasses.dataclass(frozen=True)
class Records:
    """The content of the journal at one time."""

    records: tuple[Record, ...] = ()

    @property
    def run_id(self) -> str | None:
        """The id of the run; None if it was not written yet, or was lost."""
        ids = (r.run_id for r in self.records if r.event == STARTED)
        return next((found for found in ids if found), None)

    @property
    def quarantined(self) -> dict[tuple[int, str], str]:
        """(step, save id) of the steps that must not be restored again, and why."""
        return {
            (r.step, r.save_id): r.reason
            for r in self.records
            if r.event == QUARANTINED
        }

    @property
    def last_saved(self) -> int | None:
        """The last step that was committed; None where there was none."""
        return max((r.step for r in self.records if r.event == SAVED), default=None)

    def why_foreign(self, step: int, save_id: str) -> str | None:
        """Say why this run cannot have saved a step of the store; None: it may have.

        A save id begins with the id of the run, so a step without a record of its own
        is still known: a run may be killed between a save and its record. Ids from
        before, without the run's, are compared with the records of the same step.

        Args:
          step: number of its folder.
          save_id: from its manifest.
        """
        if not save_id:  # its manifest cannot be read: it is damaged
            return None
        origin = origin_of(save_id)
        known = {
            origin_of(r.save_id)
            for r in self.records
            if r.event == SAVED and r.step == step and r.save_id
        }
        if self.run_id is not None and (origin != save_id or known):
            known.add(self.run_id)
        if not known or origin in known:
            return None
        return (
            f"another run saved it: its save id is {save_id}, those of this run begin "
            f"with {' or '.join(sorted(known))}"
        )

    def __contains__(self, saved: tuple[int, str]) -> bool:
        """Return whether (step, save id) is quarantined or belongs to another run."""
        return saved in self.quarantined or self.why_foreign(*saved) is not None


def new_save_id(origin: str, start: int) -> str:
    """Make an id of a save: the run, the start of the run, and a random part.

    Args:
      origin: the id of the run; for a copy of a step, the origin of its save id.
      start: number of the start of the run, above those of all earlier starts that it
        knows; for a copy of a step, that of its save id.
    """
    return f"{origin}-{start}-{secrets.token_hex(8)}"


def origin_of(save_id: str) -> str:
    """Return the run id with which a save id begins; an old save id is returned."""
    return save_id.partition("-")[0]


def start_of(save_id: str) -> int:
    """Return the number of the start that saved a step; 0 for an old save id."""
    parts = save_id.split("-")
    return int(parts[1]) if len(parts) == 3 and parts[1].isdecimal() else 0


def age_of(step: int, save_id: str) -> tuple[int, int]:
    """Return a sort key of steps: the newest step of the newest branch is the largest.

    A start that goes back to an older step begins a branch. Its steps may have lower
    numbers than those of the branch that it left.
    """
    return start_of(save_id), step
