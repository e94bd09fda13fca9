"""In which order the samples of a corpus come: a pure function of the seed.

A corpus is an endless sequence of its samples in which every epoch is a permutation of
all of them. The permutation is computed one index at a time (Grain's `index_shuffle`, a
block cipher on the index), so nothing depends on what was read before.
"""

import functools
import hashlib
from collections.abc import Iterable

import numpy as np
from grain.experimental import index_shuffle
from jaxtyping import Int64

# index_shuffle takes 5 us for many samples, but 30 us for 1000 and 9 ms for 2, holding
# the interpreter (2 CPU cores, 2026): small permutations are drawn whole.
_SMALL = 4096
_ROUNDS = 4  # of the cipher; as in Grain's own shuffle
# Held-out samples are always taken in this order, whatever the run's seed.
_HELD_OUT_SEED = 0


def epoch_indices(
    numbers: Iterable[int], num_samples: int, *, seed: int, corpus: int = 0
) -> Int64[np.ndarray, "_"]:
    """Return which samples of a corpus come at places of its endless sequence.

    Args:
      numbers: the places, from 0 on; the first num_samples are the first epoch.
      num_samples: of the corpus, at least 1.
      seed: of the run; decides the order, with the epoch and the corpus.
      corpus: its index in the mixture. The first has the order of a run on it alone.
    """
    indices = []
    for number in numbers:
        epoch, index = divmod(number, num_samples)
        words = (seed, epoch, corpus) if corpus else (seed, epoch)
        indices.append(_shuffled(index, num_samples, _mixed(*words)))
    return np.array(indices, np.int64)


def held_out_indices(
    numbers: Iterable[int], num_samples: int
) -> Int64[np.ndarray, "_"]:
    """Return which held-out samples come at places of their one random order.

    It is shuffled so that a short evaluation sees text from everywhere, and the same
    for every run, whatever its seed.
    """
    indices = [_shuffled(number, num_samples, _HELD_OUT_SEED) for number in numbers]
    return np.array(indices, np.int64)


def _shuffled(number: int, num_samples: int, seed: int) -> int:
    if num_samples <= _SMALL:
        return int(_small_order(num_samples, seed)[number])
    return index_shuffle(number, max_index=num_samples - 1, seed=seed, rounds=_ROUNDS)


@functools.lru_cache(maxsize=8)
def _small_order(num_samples: int, seed: int) -> Int64[np.ndarray, "_"]:
    return np.argsort(np.random.Philox(seed).random_raw(num_samples), kind="stable")


def _mixed(*words: int) -> int:
    """Mix to the 32 bits that index_shuffle takes."""
    digest = hashlib.sha256(" ".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:4], "big")
