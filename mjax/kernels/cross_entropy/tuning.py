"""The chunk size of cross-entropy, and its source."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedTuning:
    """Sizes for the chunked backend."""

    max_logits: int
    """Largest number of logits in one chunk, positions x local vocabulary."""
    min_positions: int
    """Minimum number of positions in a chunk, even if their logits exceed
    `max_logits`."""

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
"""Not tuned on a GPU: chosen with scripts/kernels/loss_chunks.py, a model of the H200
with the bytes of the compiled program (docs/benchmarks/loss_chunks.md). Over V 32768 to
262144, D 2048 to 12288, tp 1 and 8, with 8192 positions, these sizes are slower than
the fastest number of chunks by 1.3% on average and by 2.9% at most. Half of
`max_logits` is up to 9.4% slower; twice as many logits are 0.6% faster, but take 1.5
GiB instead of 0.75. Half of `min_positions` is up to 10.8% slower if a device has V
above 131072. There each chunk reads w twice and rewrites the sum of w's gradient, 12
bytes x v x D, for matmuls of 6 c v D FLOPs; the matmul for w's gradient is memory-bound
below c = 620 positions at three quarters of the peak."""
