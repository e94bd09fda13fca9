"""Tokens without a corpus: a Markov chain whose best possible loss is known.

From byte x the next byte is x + s modulo 256, with s drawn uniformly from STRIDES. A
model that has learned this rule has a loss of ln 4 = 1.386 nats (2 bits per byte); a
model that has learned nothing has ln 256 = 5.545 nats (8 bits).
"""

import dataclasses

import numpy as np
from jaxtyping import Int, Int32

from mjax.data.prepare import SideCounts
from mjax.data.samples import one_sample, pack

STRIDES = (1, 17, 58, 131)
NUM_TRAIN = 1 << 20
NUM_HELD_OUT = 1 << 12


@dataclasses.dataclass(frozen=True)
class SyntheticSamples:
    """Samples computed from (seed, stream, index); nothing is stored."""

    num_samples: int
    seq_len: int
    seed: int
    stream: int
    """Number of the stream; samples of different streams are independent."""

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Int32[np.ndarray, "T"]]:
        """Return one sample."""
        return one_sample(self, index)

    def rows(
        self, indices: Int[np.ndarray, "B"]
    ) -> dict[str, Int32[np.ndarray, "B T"]]:
        """Return several samples: tokens, targets, segments, positions."""
        windows = np.empty((len(indices), self.seq_len + 1), np.int32)
        for row, index in enumerate(indices):
            windows[row] = self._window(int(index))
        return pack(windows, eos_id=None)

    def _window(self, index: int) -> Int32[np.ndarray, "_"]:
        # The definition of Philox fixes its raw output; numpy may change how its
        # distributions use that output.
        key = [self.seed % 2**64, self.stream << 48 | index]
        raw = np.random.Philox(key=np.array(key, np.uint64)).random_raw(
            self.seq_len + 1
        )
        steps = np.array(STRIDES)[(raw >> np.uint64(62)).astype(np.int64)]
        steps[0] = raw[0] % np.uint64(256)  # the first byte is uniform
        return (np.cumsum(steps) % 256).astype(np.int32)


def count(num_samples: int, seq_len: int) -> SideCounts:
    """Return the counts of `num_samples` samples; all bytes are equally frequent."""
    num_tokens = num_samples * seq_len
    return SideCounts(
        num_tokens=num_tokens,
        num_bytes=num_tokens,
        num_documents=num_samples,
        max_token_id=255,
        byte_counts=[num_tokens // 256] * 256,
    )
