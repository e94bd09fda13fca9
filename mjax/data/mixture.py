"""Choose the corpus of each sample of a mixture.

Input: weights, and the number n of a sample in the stream. Output: the corpus of the
sample, and the number of samples of that corpus before it. Both come from a table of
one period, so n may be any number. In every prefix of n samples, the count of each
corpus differs from its share of n by less than one sample.

Source: Tijdeman 1980, "The chairman assignment problem", Discrete Mathematics 32, 323.
"""

import fractions
import functools
import heapq
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int64

MAX_PERIOD = 100_000
"""Maximum period in samples; each sample takes 20 bytes of the table."""


class _Table(NamedTuple):
    """The corpora of one period of the stream, P samples."""

    corpus: Int64[np.ndarray, "P"]
    """Index of the corpus of each sample."""
    number: Int64[np.ndarray, "P"]
    """Number of samples of the same corpus before each sample."""
    shares: Int64[np.ndarray, "C"]
    """Number of samples of each corpus in a period; their sum is P."""


def shares(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return the smallest integers in the ratio of the weights.

    A weight is taken as its decimal number: 0.1 is exactly one tenth.

    Raises:
      ValueError: a weight is not positive and finite, or the sum of the integers is
        above MAX_PERIOD.
    """
    if not weights or not all(0 < weight < math.inf for weight in weights):
        raise ValueError(
            f"the weights of a mixture must be positive and finite, got {weights}; "
            "leave out a corpus that is not wanted"
        )
    exact = [fractions.Fraction(repr(weight)) for weight in weights]
    # The largest number of which each weight is an integer multiple.
    unit = fractions.Fraction(
        math.gcd(*(weight.numerator for weight in exact)),
        math.lcm(*(weight.denominator for weight in exact)),
    )
    found = tuple(int(weight / unit) for weight in exact)
    if sum(found) > MAX_PERIOD:
        raise ValueError(
            f"the weights of a mixture must repeat within {MAX_PERIOD} samples, got "
            f"{weights}, which repeat after {sum(found)} in the ratio "
            f"{':'.join(map(str, found))}; round them, for example to 5 decimals that "
            "sum to 1"
        )
    return found


def places(
    numbers: Int[np.ndarray, "n"], weights: tuple[float, ...]
) -> tuple[Int64[np.ndarray, "n"], Int64[np.ndarray, "n"]]:
    """Return the corpus of samples of the stream, and their numbers in the corpus.

    Args:
      numbers: numbers of the samples in the stream, from 0.
      weights: weights of the corpora.
    Returns:
      The corpus index of each sample, and the number of the sample within its corpus.
    """
    table = _table(weights)
    period, index = np.divmod(numbers.astype(np.int64), len(table.corpus))
    corpus = table.corpus[index]
    return corpus, period * table.shares[corpus] + table.number[index]


def first_without(sizes: tuple[int, ...], weights: tuple[float, ...]) -> int:
    """Return the number of samples before the first repeated sample of any corpus.

    Args:
      sizes: number of samples of each corpus.
      weights: weights of the corpora.
    """
    table = _table(weights)
    ends = []
    for corpus, size in enumerate(sizes):
        period, number = divmod(size, int(table.shares[corpus]))
        index = np.flatnonzero(table.corpus == corpus)[number]
        ends.append(period * len(table.corpus) + int(index))
    return min(ends)


@functools.lru_cache(maxsize=8)
def _table(weights: tuple[float, ...]) -> _Table:
    """Assign a corpus to each sample of one period.

    Of the corpora that may come next, the one with the earliest deadline is taken.

    Sample j (from 0) of a corpus with share w may come at number n (from 1) if
    w n - j >= 1 / (2 C - 2), and must come while w n - j <= 1 - 1 / (2 C - 2).
    By Tijdeman's theorem there is always a corpus that may come, and no sample is late,
    so |count - w n| <= 1 - 1 / (2 C - 2) for C > 1 corpora.
    """
    counts = shares(weights)
    length, bound = sum(counts), max(2 * len(counts) - 2, 1)
    jobs = []
    for corpus, count in enumerate(counts):
        j = np.arange(count)
        opens = -(-(length * (j * bound + 1)) // (bound * count))
        closes = length * ((j + 1) * bound - 1) // (bound * count)
        jobs += zip(opens.tolist(), closes.tolist(), [corpus] * count, strict=True)
    jobs.sort(reverse=True)
    waiting: list[tuple[int, int]] = []
    order = np.empty(length, np.int64)
    numbers = np.empty(length, np.int64)
    used = [0] * len(counts)
    for index in range(length):
        while jobs and jobs[-1][0] <= index + 1:
            _, closes, corpus = jobs.pop()
            heapq.heappush(waiting, (closes, corpus))
        _, corpus = heapq.heappop(waiting)
        order[index], numbers[index] = corpus, used[corpus]
        used[corpus] += 1
    return _Table(order, numbers, np.array(counts, np.int64))
