"""Settings that are the same on all hosts of a mirror."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class MirrorConfig:
    """Settings that are the same on all hosts of a mirror."""

    addresses: Mapping[str, tuple[str, int]]
    """Address and port of the server of each host."""
    token: str
    """Secret of the run; a request without it is refused."""
    num_replicas: int = 3
    """Hosts that keep each block."""
    block_bytes: int = 64 << 20
    """Bytes per block; the last of a file may have fewer."""
    bytes_per_s: float | None = None
    """Rate limit of all hosts together on the remote; None sets no limit."""
    timeout_s: float = 10.0
    """Seconds without a byte until a host counts as lost. A host that reads the remote
    meanwhile says that it is alive."""
    block_timeout_s: float = 120.0
    """The same for a host that does send, but not a whole block."""

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
