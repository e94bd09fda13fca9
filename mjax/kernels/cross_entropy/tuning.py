"""The size of a chunk of cross-entropy, and where it comes from."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedTuning:
    """Sizes for the chunked backend."""

    max_logits: int
    """Logits, positions x local vocabulary, of one chunk."""
    min_positions: int
    """Positions of a chunk, even if their logits are more than that."""

    def __post_init__(self):
        if min(self.max_logits, self.min_positions) < 1:
            raise ValueError(
                "max_logits and min_positions must be at least 1, got "
                f"{self.max_logits} and {self.min_positions}; "
                "use 2**27 and 1024"
            )

    def num_chunks(self, num_positions: int, local_vocab: int) -> int:
        """Count the chunks into which positions are cut."""
        positions = max(self.min_positions, self.max_logits // local_vocab)
        return max(1, -(-num_positions // positions))


CHUNKED = ChunkedTuning(max_logits=2**27, min_positions=1024)
"""Not timed: from the counts of scripts/overlap/xla_bytes.py for the H200, 2026-11. A
chunk of 2^27 logits takes 0.5 GiB in float32 and half of that in bfloat16. Each chunk
reads w twice and rewrites the sum of its gradient, 12 bytes x v x D, inside matrix
products of 6 c v D FLOPs: with c = 1024 positions that is 512 FLOPs a byte, where an
H200 does 206 in the time of one, so they stay bound by arithmetic. Fewer positions
would not."""
