"""The chunk size of cross-entropy, and its source."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedTuning:
    """Sizes for the chunked backend."""

    max_logits: int
    """Logits, positions x local vocabulary, of one chunk."""
    min_positions: int
    """Minimum positions of a chunk, even if their logits exceed `max_logits`."""

    def __post_init__(self):
        if min(self.max_logits, self.min_positions) < 1:
            raise ValueError(
                "max_logits and min_positions must be at least 1, got "
                f"{self.max_logits} and {self.min_positions}; "
                "use 2**27 and 1024"
            )

    def num_chunks(self, num_positions: int, local_vocab: int) -> int:
        """Return the number of chunks."""
        positions = max(self.min_positions, self.max_logits // local_vocab)
        return max(1, -(-num_positions // positions))


CHUNKED = ChunkedTuning(max_logits=2**27, min_positions=1024)
"""Not timed: from the model of scripts/kernels/loss_chunks.py for the H200, whose bytes
are those of the compiled program (docs/benchmarks/loss_chunks.md). Over V 32768 to
262144, D 2048 to 12288 and tp 1 and 8, with 8192 positions, they are 1.3% slower than
the fastest number of chunks, 2.9% at most. Half the logits are up to 9.4% slower, twice
the logits 0.6% faster, for 1.5 GiB in place of 0.75. Half the positions are up to 10.8%
slower, where V is above 131072 on a device: each chunk reads w twice and rewrites the
sum of its gradient, 12 bytes x v x D, inside matmuls of 6 c v D FLOPs, and that
of w's gradient is bound by memory below c = 620 positions at three quarters of the
peak."""
