"""The order of the samples of a corpus, as a pure function of the seed.

A corpus is an endless sequence of its samples; every epoch is a permutation of all
samples. The permutation is computed in blocks of consecutive positions (see
`permutation`), so no result depends on earlier reads.
"""

import functools
import hashlib
from collections.abc import Iterable

import numpy as np
from jaxtyping import Int64

from mjax.data.permutation import permuted

# Number of samples below which the whole permutation is drawn. The cipher has blocks of
# at least 16 bits: with few samples, almost every result is out of range and must be
# enciphered again.
_SMALL = 4096
# Number of positions whose samples are computed at once. NumPy takes about 1 ms for a
# few positions, and 1 to 5 ms for such a block (2 CPU cores, 2026-11). One block serves
# hundreds of steps of 8 sequences.
_BLOCK = 4096
# Seed of the order of held-out samples, whatever the run's seed.
_HELD_OUT_SEED = 0


def epoch_indices(
    numbers: Iterable[int], num_samples: int, *, seed: int, corpus: int = 0
) -> Int64[np.ndarray, "_"]:
    """Return the samples at some positions of a corpus's endless sequence.

    Args:
      numbers: the positions, from 0; the first num_samples form the first epoch.
      num_samples: number of samples of the corpus, at least 1.
      seed: seed of the run, which determines the order together with epoch and corpus.
      corpus: index in the mixture. Corpus 0 has the same order as in a run without a
        mixture.
    """
    epochs, places = np.divmod(np.array(list(numbers), np.int64), num_samples)
    for epoch in np.unique(epochs).tolist():
        words = (seed, epoch, corpus) if corpus else (seed, epoch)
        chosen = epochs == epoch
        places[chosen] = _shuffled(places[chosen], num_samples, _mixed(*words))
    return places


def held_out_indices(
    numbers: Iterable[int], num_samples: int
) -> Int64[np.ndarray, "_"]:
    """Return the held-out samples at some positions of their random order.

    The order is random, so a short evaluation sees text from the whole corpus. It is
    the same for all runs, whatever their seed.
    """
    places = np.array(list(numbers), np.int64)
    return _shuffled(places, num_samples, _HELD_OUT_SEED)


def _shuffled(
    places: Int64[np.ndarray, "n"], num_samples: int, seed: int
) -> Int64[np.ndarray, "n"]:
    if num_samples <= _SMALL:
        return _small_order(num_samples, seed)[places]
    blocks, within = np.divmod(places, _BLOCK)
    found = np.empty_like(places)
    for block in np.unique(blocks).tolist():
        chosen = blocks == block
        found[chosen] = _block_of_order(num_samples, seed, block)[within[chosen]]
    return found


@functools.lru_cache(maxsize=64)
def _block_of_order(num_samples: int, seed: int, block: int) -> Int64[np.ndarray, "_"]:
    first = block * _BLOCK
    places = np.arange(first, min(first + _BLOCK, num_samples))
    return permuted(places, num_samples, seed=seed)


@functools.lru_cache(maxsize=8)
def _small_order(num_samples: int, seed: int) -> Int64[np.ndarray, "_"]:
    return np.argsort(np.random.Philox(seed).random_raw(num_samples), kind="stable")


def _mixed(*words: int) -> int:
    """Mix integers into a 32-bit seed for `permuted`."""
    digest = hashlib.sha256(" ".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:4], "big")
