"""Which sample is read at which step: a pure function of (seed, step).

Row r of step n is number n * batch_size + r of an endless stream of samples, in which
every epoch is a permutation of all samples. The permutation is computed one index at a
time (Grain's `index_shuffle`, a block cipher on the index), so nothing depends on what
was read before, on the number of processes, or on how rows are divided among them.
"""

import functools
import hashlib

import numpy as np
from grain.experimental import index_shuffle
from jaxtyping import Int64

# index_shuffle takes 5 us for many samples, but 30 us for 1000 and 9 ms for 2, holding
# the interpreter (2 CPU cores, 2026): small permutations are drawn whole.
_SMALL = 4096
_ROUNDS = 4  # of the cipher; as in Grain's own shuffle
# Held-out samples are always taken in this order, whatever the run's seed.
_HELD_OUT_SEED = 0


def train_indices(
    num_samples: int,
    *,
    seed: int,
    step: int,
    batch_size: int,
    rows: slice = slice(None),
) -> Int64[np.ndarray, "_"]:
    """Return the samples that the rows of a step's global batch hold.

    An epoch ends where it ends, also within a batch: each sample is read exactly once
    per epoch.

    Args:
      num_samples: samples in all, at least 1.
      seed: decides the order, with the epoch.
      step: optimizer steps before this one.
      batch_size: rows of the global batch.
      rows: the wanted rows of the global batch.
    Raises:
      ValueError: there is no sample, or the step is negative.
    """
    if num_samples < 1 or step < 0:
        raise ValueError(f"need num_samples >= 1, step >= 0: {num_samples=}, {step=}")
    numbers = range(step * batch_size, (step + 1) * batch_size)[rows]
    indices = []
    for number in numbers:
        epoch, index = divmod(number, num_samples)
        indices.append(_shuffled(index, num_samples, _epoch_seed(seed, epoch)))
    return np.array(indices, np.int64)


def held_out_indices(num_samples: int, start: int, stop: int) -> Int64[np.ndarray, "_"]:
    """Return the held-out samples number start to stop of one fixed random order.

    The order is shuffled so that a short evaluation sees text from everywhere. stop is
    cut at num_samples: no sample is counted twice.
    """
    numbers = range(start, min(stop, num_samples))
    indices = [_shuffled(n, num_samples, _HELD_OUT_SEED) for n in numbers]
    return np.array(indices, np.int64)


def _shuffled(number: int, num_samples: int, seed: int) -> int:
    if num_samples <= _SMALL:
        return int(_small_order(num_samples, seed)[number])
    return index_shuffle(number, max_index=num_samples - 1, seed=seed, rounds=_ROUNDS)


@functools.lru_cache(maxsize=8)
def _small_order(num_samples: int, seed: int) -> Int64[np.ndarray, "_"]:
    return np.argsort(np.random.Philox(seed).random_raw(num_samples), kind="stable")


def _epoch_seed(seed: int, epoch: int) -> int:
    """Mix to the 32 bits that index_shuffle takes."""
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
