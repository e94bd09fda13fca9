"""Known byte patterns, and differences from them.

Input: arrays of numpy, and digests of results. Output: factors of GEMMs, and
descriptions of errors, or None if there is no error. All arithmetic is on integers, so
healthy devices give identical results.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

SEED = 20
"""Seed of every random input. Any number would do; it is the same on all hosts and in
all rounds, so that their inputs have the same bytes."""

WORDS = (0, 0xFFFFFFFFFFFFFFFF, 0xAAAAAAAAAAAAAAAA, 0x5555555555555555)
"""Patterns of memory tests: every bit in both states, and differing neighbours. Two
more patterns depend on the address, to find a correct word in a wrong place."""

_STEP = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio (Knuth, The Art of Computer Programming 3, 6.4): words at
successive addresses differ in about half of their bits."""

_SHOWN = 3


def random_factor(n: int, seed: int) -> NDArray[np.int8]:
    """Return [n, n] random bytes, -128 to 127."""
    return np.random.default_rng(seed).integers(-128, 128, (n, n), np.int8)


def small_factor(n: int, seed: int) -> NDArray[np.int8]:
    """Return [n, n] random numbers from -2 to 2.

    All dtypes represent them exactly. A sum of n products stays below 2^13 by more than
    6 standard deviations for n <= 4096 (deviation 2 sqrt(n) = 128), so that it is exact
    in every order: in float32, and in the accumulators of FP8 tensor cores, which have
    about 14 bits (DeepSeek-V3, section 3.3.2, arXiv:2412.19437).
    """
    return np.random.default_rng(seed).integers(-2, 3, (n, n), np.int8)


def wrong_rows(
    a: NDArray[np.int8], b: NDArray[np.int8], found: NDArray[np.generic]
) -> str | None:
    """Return a text on how a matrix differs from a b^T; None if it does not.

    a b^T is not computed. Instead, for a vector x of integers, found x must equal
    a (b^T x). Because no entry of x is 0, a single wrong entry in a row is always
    found; several in one row are missed with a probability below 2^-20. Source:
    Freivalds 1977, Probabilistic machines can use less running time, IFIP Congress;
    differs: integers up to 2^20 instead of 0 and 1.

    Args:
      a: [n, n], from `small_factor`.
      b: [n, n], from `small_factor`.
      found: [n, n], any dtype of numbers.
    """
    if not np.all(np.isfinite(found)) or np.any(found != np.rint(found)):
        return "contains numbers that are not integers"
    if np.any(np.abs(found) > 4 * len(a)):
        return "contains numbers that are too large"
    x = np.random.default_rng(SEED).integers(1, 2**20, len(a), np.int64)
    expected = a.astype(np.int64) @ (b.astype(np.int64).T @ x)
    rows = np.flatnonzero(found.astype(np.int64) @ x != expected)
    if not len(rows):
        return None
    return f"has {len(rows)} of {len(a)} rows wrong, the first is {rows[0]}"


def different_bits(digests: Mapping[str, Mapping[str, int]]) -> str | None:
    """Return a text that names devices whose results differ; None if none differ.

    Args:
      digests: for each device, how often each digest of the same GEMM occurred.
    """
    if not digests or not all(digests.values()):
        return "no results to compare"
    unsteady = [
        f"{device} gave {len(counts)} different results in {sum(counts.values())} runs"
        for device, counts in digests.items()
        if len(counts) > 1
    ]
    usual = {device: max(c, key=lambda d: c[d]) for device, c in digests.items()}
    votes = [*usual.values()]
    best = max(votes, key=votes.count)
    others = [device for device, digest in usual.items() if digest != best]
    if others and 2 * votes.count(best) <= len(votes):
        text = f"{', '.join(usual)} differ, and no result has a majority"
        return "; ".join([*unsteady, text])
    if others:
        unsteady.append(f"{', '.join(others)} differ from the other devices")
    return "; ".join(unsteady) or None


def memory_fault(
    words: NDArray[np.uint64],
    read: Callable[[NDArray[np.uint64]], NDArray[np.uint64]] = lambda words: words,
) -> str | None:
    """Write patterns to a block of memory and read them back.

    Return a text on the words that differ; None if none differ.

    Args:
      words: block to overwrite. It must be larger than the processor's caches;
        otherwise only the caches are tested.
      read: reads and returns the content of the block.
    """
    index = np.arange(len(words), dtype=np.uint64) * _STEP
    for pattern in (*(np.uint64(word) for word in WORDS), index, ~index):
        words[:] = pattern
        found = read(words)
        wrong = np.flatnonzero(found != pattern)
        if len(wrong):
            places = ", ".join(f"{8 * int(i):#x}" for i in wrong[:_SHOWN])
            name = "address" if np.ndim(pattern) else f"{int(pattern):016x}"
            return (
                f"{len(wrong)} of {len(words)} words differ from the pattern {name}, "
                f"at offsets {places}"
            )
    return None


def wrong_blocks(written: Sequence[bytes], read: Sequence[bytes]) -> str | None:
    """Return a text that lists blocks whose checksums differ; None if none differ."""
    wrong = [
        i for i, pair in enumerate(zip(written, read, strict=True)) if len({*pair}) > 1
    ]
    if not wrong:
        return None
    shown = ", ".join(map(str, wrong[:_SHOWN]))
    return (
        f"{len(wrong)} of {len(written)} blocks differ from what was written: {shown}"
    )
