"""Let only the latest start of a run change the folder of its steps.

Input: the folder. Output: the file `owner.json` in it, which names process 0 of the
latest start. A process of an earlier start may still run, for example because it lost
the network to all hosts except the store. It finds another name in the file and is
refused. The name is read just before a save begins and before it is committed. An
action that began before the name was replaced still completes.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import socket
import time

from etils import epath

from mjax import checked_json
from mjax.ckpt.errors import FinalError

_FILE = "owner.json"


class TakenOverError(FinalError):
    """Another start of the run now owns the folder, and no retry changes that."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Owner:
    """Content of owner.json: a start of a run, identified by its process 0."""

    owner: str
    launch: str
    generation: int
    host: str
    pid: int
    time: str

    def is_later(self, launch: str, generation: int) -> bool:
        """Return whether this owner is a later generation of the given launch."""
        return self.launch == launch != "" and self.generation > generation


def new_owner(launch: str, generation: int) -> Owner:
    """Return this process as an owner; arguments as in `Fence.claim`."""
    return Owner(
        owner=secrets.token_hex(8),
        launch=launch,
        generation=generation,
        host=socket.gethostname(),
        pid=os.getpid(),
        time=time.strftime("%FT%T%z"),
    )


class Fence:
    """The fence of one folder, in one process."""

    def __init__(self, folder: epath.Path) -> None:
        """Store the path, which need not exist. Nothing is refused until `claim`."""
        self._folder, self._owner = folder, ""
        self.problem: str | None = None
        """Text that names the start that has taken over; None if none was seen."""

    def claim(self, launch: str, generation: int) -> None:
        """Make this start the owner of the folder.

        Args:
          launch: id of the launch that started this process; "" if there is none.
          generation: generation of the launch.
        Raises:
          TakenOverError: a later generation of the same launch owns the folder.
          OSError: the folder cannot be written.
        """
        found = self._read()
        if found is not None and found.is_later(launch, generation):
            self._refuse(found)
        ours = new_owner(launch, generation)
        self._folder.mkdir(parents=True, exist_ok=True)
        new = self._folder / f"{_FILE}.{ours.owner}"
        try:
            new.write_text(json.dumps(dataclasses.asdict(ours)) + "\n")
            new.replace(self._folder / _FILE)
        except OSError:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            raise
        self._owner = ours.owner

    def check(self) -> None:
        """Check that this start still owns the folder.

        Raises:
          TakenOverError: another start owns the folder.
          OSError: the file system does not answer.
        """
        if not self._owner:
            return
        found = self._read()
        # If the file is missing, the folder was deleted or moved, so there is no owner.
        if found is not None and found.owner != self._owner:
            self._refuse(found)

    def _refuse(self, found: Owner) -> None:
        self.problem = (
            f"another start of this run has taken over {self._folder}: process "
            f"{found.pid} on {found.host} at {found.time}"
        )
        raise TakenOverError(self.problem)

    def _read(self) -> Owner | None:
        try:
            text = (self._folder / _FILE).read_bytes()
            return checked_json.read(text, Owner)
        except (FileNotFoundError, ValueError):
            return None
