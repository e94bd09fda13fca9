"""The journal of a run's checkpoints in the work dir: one JSON object per line.

The work dir and the folder of checkpoints may be on two file systems. So the journal
still lists steps if their folder is lost, and can quarantine damaged steps of a folder
that is read-only.
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
    """One line of the journal; fields that the event does not use are empty."""

    event: str
    step: int
    save_id: str = ""
    reason: str = "the reason was not recorded"
    run_id: str = ""


class Journal:
    """The file checkpoints.jsonl: one process writes it, all may read it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Store the path of the file, which need not exist.

        Raises:
          ValueError: the path is a folder.
        """
        self._path = Path(path)
        if self._path.is_dir():
            raise ValueError(
                f"{self._path} is a folder, not the record of the run's checkpoints; "
                "move it away, and put the file back if there was one"
            )

    def write(self, event: str, step: int, **facts: Any) -> None:
        """Append an event with further fields of `Record`, and flush it to disk.

        Raises:
          OSError: the file cannot be written.
        """
        record = {"event": event, "step": step, "time": time.strftime("%FT%T%z")}
        # First end a line that a full disk has truncated.
        data = "\n" + json.dumps(record | facts) + "\n"
        with self._path.open("a") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def records(self) -> "Records":
        """Read the file and return its records.

        Raises:
          OSError: the file cannot be read.
        """
        return Records(tuple(self._read()))

    def _read(self) -> Iterator[Record]:
        """Yield the records, oldest first."""
        if not self._path.exists():
            return
        known = {field.name for field in dataclasses.fields(Record)}
        for line in self._path.read_text(errors="replace").splitlines():
            # An invalid line was truncated by a kill or a full disk, or is damaged.
            with contextlib.suppress(ValueError):
                found = checked_json.read(line, dict[str, Any])
                fields = {k: v for k, v in found.items() if k in known}
                yield checked_json.check(fields, Record)

    def run_id(self, new: str) -> str:
        """Return the id of the run, which stays the same while its work dir exists.

        Args:
          new: the id to give the run if it has none yet.
        Raises:
          OSError: the run has no id yet, and the file cannot be written.
        """
        found = self.records().run_id
        if found is None:
            self.write(STARTED, 0, run_id=new)
        return found or new


@dataclasses.dataclass(frozen=True)
class Records:
    """The records of the journal at one time."""

    records: tuple[Record, ...] = ()

    @property
    def run_id(self) -> str | None:
        """The id of the run; None if it is not written yet, or was lost."""
        ids = (r.run_id for r in self.records if r.event == STARTED)
        return next((found for found in ids if found), None)

    @property
    def quarantined(self) -> dict[tuple[int, str], str]:
        """(step, save id) of each step that must not be restored -> the reason."""
        return {
            (r.step, r.save_id): r.reason
            for r in self.records
            if r.event == QUARANTINED
        }

    @property
    def last_saved(self) -> int | None:
        """The highest step that was committed; None if there is none."""
        return max((r.step for r in self.records if r.event == SAVED), default=None)

    def why_foreign(self, step: int, save_id: str) -> str | None:
        """Return why this run cannot have saved a step; None if it may have.

        A save id begins with the id of the run. So a step that has no record is still
        recognised, for example if the run was killed between a save and its record. Old
        save ids, which lack the run's id, are compared with the records of the same
        step.

        Args:
          step: the step's number, from the name of its folder.
          save_id: the step's save id, from its manifest.
        """
        if not save_id:  # the manifest cannot be read: the step is damaged
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
    """Return a new save id: run id, number of the start, and a random part.

    Args:
      origin: the id of the run; for a copy of a step, `origin_of` the step's save id.
      start: number of this start of the run, larger than all start numbers in the
        journal and the saved steps; for a copy of a step, `start_of` the step's save
        id.
    """
    return f"{origin}-{start}-{secrets.token_hex(8)}"


def origin_of(save_id: str) -> str:
    """Return the run id with which a save id begins, or an old save id unchanged."""
    return save_id.partition("-")[0]


def start_of(save_id: str) -> int:
    """Return the number of the start that saved the step; 0 for an old save id."""
    parts = save_id.split("-")
    return int(parts[1]) if len(parts) == 3 and parts[1].isdecimal() else 0


def age_of(step: int, save_id: str) -> tuple[int, int]:
    """Return a sort key: the newest step of the newest branch has the largest key.

    A start that resumes from an older step begins a branch. The steps of the new branch
    may have lower numbers than those of the branch that it left.
    """
    return start_of(save_id), step
