"""Let only the latest start of a run write below a URL.

This is `mjax.ckpt.fence` for an object store. A start replaces the owner's name only if
the object still has the version that the start has read. So if two starts claim the URL
at the same time, the second start sees that the first has claimed it.
"""

import dataclasses
import json

from mjax import checked_json
from mjax.ckpt.fence import Owner, TakenOverError, new_owner
from mjax.stores.objects import (
    ABSENT,
    Absent,
    ConflictError,
    MissingError,
    ObjectStore,
    Version,
)

OWNER_FILE = "owner.json"
_TRIES = 5


class RemoteFence:
    """The fence of one URL, on process 0."""

    def __init__(self, store: ObjectStore) -> None:
        """Keep the store; nothing is refused until `claim`."""
        self._store, self._owner = store, ""
        self.problem: str | None = None
        """Text that names the start that has taken over; None if none was seen."""

    @property
    def is_claimed(self) -> bool:
        """Whether this start has claimed the URL."""
        return bool(self._owner)

    def claim(self, launch: str, generation: int) -> None:
        """Make this start the owner of the URL.

        Args:
          launch: id of the launch that started this process; "" if there is none.
          generation: generation of the launch.
        Raises:
          TakenOverError: a later generation of the same launch owns the URL.
          RuntimeError: other starts claim the URL again and again.
        """
        ours = new_owner(launch, generation)
        text = (json.dumps(dataclasses.asdict(ours)) + "\n").encode()
        for _ in range(_TRIES):
            found, version = self._read()
            if found is not None and found.is_later(launch, generation):
                self._refuse(found)
            try:
                self._store.write(OWNER_FILE, text, expected=version)
            except ConflictError:  # another start claims the URL, or an answer was lost
                if self._read()[0] != ours:
                    continue
            self._owner = ours.owner
            return
        raise RuntimeError(
            f"{self._store.url}/{OWNER_FILE} was replaced {_TRIES} times while it was "
            "claimed; several runs begin at once: give each its own --ckpt.remote"
        )

    def check(self) -> None:
        """Check that this start still owns the URL.

        Raises:
          TakenOverError: another start owns the URL.
        """
        if not self._owner:
            return
        found, _ = self._read()
        # If the object is missing, it was deleted, so there is no owner.
        if found is not None and found.owner != self._owner:
            self._refuse(found)

    def _refuse(self, found: Owner) -> None:
        self.problem = (
            f"another start has taken over {self._store.url}: process {found.pid} on "
            f"{found.host} at {found.time}"
        )
        raise TakenOverError(self.problem)

    def _read(self) -> tuple[Owner | None, Version | Absent]:
        try:
            text, version = self._store.read_versioned(OWNER_FILE)
        except MissingError:
            return None, ABSENT
        try:
            return checked_json.read(text, Owner), version
        except ValueError:
            return None, version
