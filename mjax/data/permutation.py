"""Evaluate a random permutation at given positions without storing it.

A block cipher permutes its blocks. Here a block has the smallest even number of bits,
at least 16, that can represent every position. A result beyond the last position is
enciphered again until it is within range (cycle walking: Black and Rogaway 2002,
"Ciphers with arbitrary finite domains"). The cipher is four rounds of SIMON (Beaulieu
et al. 2013, eprint 2013/404) with keys from the seeding algorithm of the C++ standard,
so the permutation is that of Grain's `index_shuffle`. Differs: if the last position is
4^k for k >= 8, Grain uses two bits fewer and maps the first and the last position to
the same number.
"""

import functools

import numpy as np
from jaxtyping import Int64

_MIN_BITS = 16
_NUM_ROUNDS = 4
_MASK_32 = (1 << 32) - 1


def permuted(
    places: Int64[np.ndarray, "n"], size: int, *, seed: int
) -> Int64[np.ndarray, "n"]:
    """Return the values of a permutation of range(size) at some positions.

    Args:
      places: positions, within range(size).
      size: at most 2^62; below a few thousand, cycle walking is slow.
      seed: 32 bits that choose the permutation.
    """
    bits = max((size - 1).bit_length(), _MIN_BITS)
    word = np.uint64((bits + 1) // 2)
    mask = (np.uint64(1) << word) - np.uint64(1)
    keys = [np.uint64(key) & mask for key in _round_keys(seed)]

    def mix(x: np.ndarray) -> np.ndarray:
        rotated = (
            (x << np.uint64(r) | x >> (word - np.uint64(r))) & mask for r in (1, 8, 2)
        )
        by_1, by_8, by_2 = rotated
        return by_1 & by_8 ^ by_2

    found = places.astype(np.uint64)
    rest = np.arange(len(found))
    while len(rest):
        left, right = found[rest] >> word, found[rest] & mask
        for key in keys:
            left, right = right, left ^ mix(right) ^ key
        found[rest] = left << word | right
        rest = rest[found[rest] >= size]
    return found.astype(np.int64)


@functools.lru_cache(maxsize=64)
def _round_keys(seed: int) -> tuple[int, ...]:
    """Return one key per round, as std::seed_seq{seed}.generate does.

    Source: ISO C++, [rand.util.seedseq], for n keys and one seed word; there s = 1, t =
    (n - 1) / 2 and m = max(s + 1, n) = n.
    """
    n = _NUM_ROUNDS
    t = (n - 1) // 2
    p = (n - t) // 2
    q = p + t
    keys = [0x8B8B8B8B] * n

    def spread(x: int) -> int:
        return x ^ x >> 27

    for k in range(n):
        r1 = 1664525 * spread(keys[k] ^ keys[(k + p) % n] ^ keys[k - 1]) & _MASK_32
        r2 = r1 + (1 if k == 0 else k + seed if k == 1 else k) & _MASK_32
        keys[(k + p) % n] = keys[(k + p) % n] + r1 & _MASK_32
        keys[(k + q) % n] = keys[(k + q) % n] + r2 & _MASK_32
        keys[k] = r2
    for k in range(n):
        total = keys[k] + keys[(k + p) % n] + keys[k - 1] & _MASK_32
        r3 = 1566083941 * spread(total) & _MASK_32
        r4 = r3 - k & _MASK_32
        keys[(k + p) % n] ^= r3
        keys[(k + q) % n] ^= r4
        keys[k] = r4
    return tuple(keys)
