"""A save as a job, with its progress and its phases; independent of Orbax.

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
"""Whether process 0 acts alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A host copy that is to become a saved step."""

    step: int
    save_id: str
    copy: HostCopy | str
    """The host copy, or the reason why there is none; the attempt then fails."""
    run: Mapping[str, Any]
    """JSON facts that belong to the state."""
    max_attempts: int | None
    """Number of attempts before giving up; None tries until there is a newer job."""

    @property
    def leaves(self) -> Mapping[str, HostLeaf]:
        """The host copy of this process."""
        return {} if isinstance(self.copy, str) else self.copy.leaves

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, over all processes."""
        return sum(value.leaf.num_bytes for value in self.leaves.values())


@dataclasses.dataclass(kw_only=True)
class Progress:
    """Progress of one process in an attempt."""

    folder: epath.Path | None = None
    """Folder in which the step is written."""
    checksum_s: float = 0.0
    read_back_s: float = 0.0
