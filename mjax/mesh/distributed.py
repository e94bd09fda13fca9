"""Start a run of several processes."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How processes find each other; all None in a run of one process."""

    coordinator: str | None = None
    """host:port of process 0."""
    num_processes: int | None = None
    """Processes in the run."""
    process_id: int | None = None
    """Index of this process, from 0."""
    timeout_s: int = 300
    """Seconds to wait for the coordinator."""
