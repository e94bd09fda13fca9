"""Settings that are the same on all hosts of a mirror."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class MirrorConfig:
    """Settings that are the same on all hosts of a mirror."""

    addresses: Mapping[str, tuple[str, int]]
    """Host -> (address, port) of its server."""
    token: str
    """Secret of the run; requests without it are refused."""
    num_replicas: int = 3
    """Number of hosts that keep each block."""
    block_bytes: int = 64 << 20
    """Bytes per block; the last block of a file may have fewer."""
    bytes_per_s: float | None = None
    """Rate limit on reading the remote, for all hosts together; None sets no limit."""
    timeout_s: float = 10.0
    """Seconds without a byte after which a host counts as lost. While it reads the
    remote, a host answers that it is busy."""
    block_timeout_s: float = 120.0
    """Seconds for a whole block, after which a host that still sends counts as lost."""

    def __post_init__(self) -> None:
        if self.block_bytes < 1 or min(self.timeout_s, self.block_timeout_s) <= 0:
            raise ValueError(
                "block_bytes must be at least 1, and timeout_s and block_timeout_s "
                f"above 0, got {self.block_bytes}, {self.timeout_s} and "
                f"{self.block_timeout_s}"
            )
        if not self.token:
            raise ValueError("the token of a mirror is empty; give the run's secret")
        if self.bytes_per_s is not None and self.bytes_per_s <= 0:
            raise ValueError(f"bytes_per_s must be above 0, got {self.bytes_per_s}")
