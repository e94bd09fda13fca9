"""A save as a job, its progress and its phases; independent of Orbax.

Input: a host copy. Output: the job that `saving` queues and `orbax_save` carries out.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from etils import epath

from mjax.ckpt.host_copy import HostCopy, HostLeaf

PHASES = {
    "folder": True,
    "written": False,
    "merged": True,
    "checked": False,
    "committed": True,
}
"""Name of each phase, in order -> whether process 0 acts alone in it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The host copy of one step, to be written to the store."""

    step: int
    save_id: str
    copy: HostCopy | str
    """The host copy, or the error text with which every attempt fails."""
    run: Mapping[str, Any]
    """JSON metadata to store with the state."""
    max_attempts: int | None
    """Number of attempts before giving up; None retries until there is a newer job."""

    @property
    def leaves(self) -> Mapping[str, HostLeaf]:
        """Leaf name -> its pieces in the host copy of this process."""
        return {} if isinstance(self.copy, str) else self.copy.leaves

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, over all processes."""
        return sum(value.leaf.num_bytes for value in self.leaves.values())


@dataclasses.dataclass(kw_only=True)
class Progress:
    """Progress of one attempt, on one process."""

    folder: epath.Path | None = None
    """Unfinished folder that the step is written to; None before it exists."""
    checksum_s: float = 0.0
    """Seconds that this process spent on the checksums of its pieces."""
    read_back_s: float = 0.0
    """Seconds that this process spent on reading its pieces back."""
