"""Tuned numbers of the attention backends, with where and when they were tuned."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockedTuning:
    """Sizes for the blocked backend."""

    block: int
    """Queries, and keys, per tile; a shorter sequence is a single tile."""

    def __post_init__(self):
        if self.block < 1:
            raise ValueError(
                f"block must be at least 1, got block={self.block}: use 64"
            )


BLOCKED_CPU = BlockedTuning(block=64)
"""2-core x86 CPU (AVX2), 2026-11: among 32, 64, 128 and 256 the fastest forward +
backward, or within noise of it, for B 1-32, T 128-2048, H 32-64, float32 and
bfloat16, full causal and window T / 4."""

BLOCKED_GPU = BlockedTuning(block=256)
"""Not tuned: no GPU was measured. Larger than on CPU, because each loop step launches
several kernels and must give them enough work."""
