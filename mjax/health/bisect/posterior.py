"""Compute the probability of each set of bad hosts, given the tests so far.

Input: the hosts of each test, and whether it failed. Output: the probable sets, with
their probabilities.

Each host is bad with the same prior probability, independently of the others, and each
test errs independently of the others. The probability of a set then depends on three
counts: its hosts, the failed tests that it explains, and the passed tests that
contradict it.

Sets are enumerated by size: all sets of size 0 and 1, and each larger size by adding
one host to the best sets of the size below. At the sizes that matter here, the best
sets of one size contain best sets of the size below: as a set grows, each of its hosts
explains fewer failed tests that no other host of the set explains. Up to 96 hosts, all
pairs are enumerated. Unit tests compare the probabilities with a full enumeration of
the 2^n sets.

Tests are stored as bits of machine words: the tests of a set are the OR of its hosts'
words, and counts are popcounts.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from mjax.health.bisect.bits import ErrorRates

MOST_BAD = 10
"""Maximum size of an enumerated set. With more bad hosts, most groups of a useful size
fail, and testing each host alone needs fewer tests."""
ALL_SETS_HOSTS = 12
"""Maximum number of hosts for which sets of every size are enumerated. Not measured."""
MANY_PRIOR = 1e-3
"""Prior probability that about half of the hosts are bad, or that all tests fail for a
common reason. Not measured."""

_BUDGET = 12_000
"""Number of sets examined for one size. The enumeration takes 1 ms on one core."""
_MOST_KEPT = 3_000
_MOST_SETS = 1_500
"""Number of sets returned; the probabilities of all others are only summed. Not
measured."""
_NEGLIGIBLE = 1e-4
"""The enumeration ends at a size whose total probability is below this fraction of the
largest total so far. Not measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Posterior:
    """P probable sets of bad hosts, of n hosts."""

    members: np.ndarray
    """[P, n] bool: which hosts are in the set."""
    weights: np.ndarray
    """[P] float64: probability of each set. These, `many` and `left_out` sum to 1, or
    to more if sets of `MOST_BAD` hosts are probable: `many` contains those too."""
    many: float
    """Upper estimate of the probability that more hosts are bad than in any enumerated
    set. If sets of `MOST_BAD` hosts are probable, larger ones may be as well."""
    left_out: float
    """Sum of the probabilities of the enumerated sets that are not in `members`."""

    @property
    def best(self) -> np.ndarray:
        """[n] bool: the most probable set."""
        return self.members[int(np.argmax(self.weights))]

    @property
    def error(self) -> float:
        """Probability that the most probable set is wrong."""
        # Sum the other probabilities: 1 - 0.9999999 would lose digits.
        rest = np.delete(self.weights, int(np.argmax(self.weights)))
        return float(rest.sum() + self.many + self.left_out)

    @property
    def marginals(self) -> np.ndarray:
        """[n] float64: probability that each host is bad, given that one of the P sets
        is right."""
        return self.weights @ self.members / self.weights.sum()

    @property
    def entropy_bits(self) -> float:
        """Remaining entropy, in bits."""
        weights = np.append(self.weights, self.many)
        weights = weights[weights > 0]
        return float(-(weights * np.log2(weights)).sum())


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Level:
    """P sets of one size k."""

    words: np.ndarray
    """[P, W] uint64: the tests that include a host of the set, as bits."""
    scores: np.ndarray
    """[P] logarithm of the probability, up to a constant."""
    keys: np.ndarray
    """[P] uint64: equal for equal sets."""
    hosts: np.ndarray
    """[P, k] indices of the hosts in the set."""


def posterior(
    in_test: np.ndarray, failed: np.ndarray, *, prior: float, rates: ErrorRates
) -> Posterior:
    """Return the probable sets.

    Args:
      in_test: [T, n] bool: whether a test included a host.
      failed: [T] bool: whether the test failed.
      prior: probability that a host is bad, before any test.
      rates: how often a test errs.
    """
    num_hosts = in_test.shape[1]
    words, fail_words = _pack(in_test.T), _pack(failed[None])
    pass_words = _pack(~failed[None])
    odds = math.log(prior / (1 - prior))

    def scored(hits: np.ndarray, size: int) -> np.ndarray:
        explained = np.bitwise_count(hits & fail_words[0]).sum(-1, dtype=np.int32)
        against = np.bitwise_count(hits & pass_words[0]).sum(-1, dtype=np.int32)
        gain = explained * rates.log_failed + against * rates.log_passed
        return size * odds + gain

    keys = np.random.default_rng(0).integers(2**63, size=num_hosts, dtype=np.uint64)
    nothing = np.zeros((1, words.shape[1]), np.uint64)
    level = _Level(
        words=nothing,
        scores=scored(nothing, 0),
        keys=np.zeros(1, np.uint64),
        hosts=np.zeros((1, 0), np.intp),
    )
    most = num_hosts if num_hosts <= ALL_SETS_HOSTS else MOST_BAD
    many = -math.inf if most == num_hosts else _many(in_test, failed, prior, rates)
    levels, peak = [level], float(level.scores[0])
    for size in range(1, most + 1):
        level = _grown(level, words, keys, lambda hits, k=size: scored(hits, k))
        top = float(level.scores.max())
        mass = top + math.log(np.exp(level.scores - top).sum())
        levels.append(level)
        if mass < peak + math.log(_NEGLIGIBLE):
            break
        peak = max(peak, mass)
    return _normalised(levels, many, num_hosts, most)


def _pack(rows: np.ndarray) -> np.ndarray:
    """Pack [n, T] bool into [n, W] words of 64 bits."""
    rows = np.ascontiguousarray(rows)
    padded = np.zeros((rows.shape[0], max(1, -(-rows.shape[1] // 64)) * 64), bool)
    padded[:, : rows.shape[1]] = rows
    return np.packbits(padded, axis=1).view(np.uint64)


def _grown(
    level: _Level,
    words: np.ndarray,
    keys: np.ndarray,
    scored: Callable[[np.ndarray], np.ndarray],
) -> _Level:
    """Add each host to the best sets of a size; keep the best resulting sets."""
    num_hosts = len(words)
    parents = _top(level.scores, max(16, _BUDGET // num_hosts))
    hits = level.words[parents][:, None, :] | words[None]
    scores = scored(hits)
    inside = level.hosts[parents]
    scores[np.arange(len(parents))[:, None], inside] = -np.inf
    # The key of a set does not depend on the order of its hosts: XOR of random words.
    key = (level.keys[parents][:, None] ^ keys[None]).ravel()
    flat = scores.ravel()
    # A set of size k is found from up to k parents; `_MOST_KEPT` counts the duplicates.
    kept = _top(flat, _MOST_KEPT)
    kept = kept[np.isfinite(flat[kept])]
    _, first = np.unique(key[kept], return_index=True)
    kept = kept[first]
    parent, host = np.divmod(kept, num_hosts)
    return _Level(
        words=hits.reshape(-1, words.shape[1])[kept],
        scores=flat[kept],
        keys=key[kept],
        hosts=np.concatenate([inside[parent], host[:, None]], axis=1),
    )


def _top(scores: np.ndarray, num: int) -> np.ndarray:
    """Return the indices of the `num` largest scores, in no particular order."""
    if num >= len(scores):
        return np.arange(len(scores))
    # Scores have few distinct values, which makes argpartition slow.
    least = np.partition(scores, -num)[-num]
    above = np.flatnonzero(scores > least)
    return np.concatenate([above, np.flatnonzero(scores == least)[: num - len(above)]])


def _many(
    in_test: np.ndarray, failed: np.ndarray, prior: float, rates: ErrorRates
) -> float:
    """Return the score of "half of the hosts are bad", comparable with set scores.

    Tests of one host are excluded: they do not show how many hosts are bad.
    """
    sizes = in_test.sum(1)
    clean = np.where(sizes > 0, 0.5**sizes, 1.0)
    ratio = np.where(failed, math.exp(rates.log_failed), math.exp(rates.log_passed))
    told = np.log(clean + (1 - clean) * ratio)[sizes > 1].sum()
    return float(math.log(MANY_PRIOR) - in_test.shape[1] * math.log1p(-prior) + told)


def _normalised(
    levels: list[_Level], many: float, num_hosts: int, most: int
) -> Posterior:
    scores = np.concatenate([level.scores for level in levels])
    sizes = np.repeat(np.arange(len(levels)), [len(x.scores) for x in levels])
    peak = max(float(scores.max()), many)
    weights, weight_many = np.exp(scores - peak), math.exp(many - peak)
    total = weights.sum() + weight_many
    kept = np.sort(_top(scores, _MOST_SETS))
    members = np.zeros((len(kept), num_hosts), bool)
    offsets = np.cumsum([0, *(len(x.scores) for x in levels)])
    for size, level in enumerate(levels):
        rows = np.flatnonzero(sizes[kept] == size)
        chosen = level.hosts[kept[rows] - offsets[size]]
        members[rows[:, None], chosen] = True
    beyond = weights[sizes == most].sum() if most < num_hosts else 0.0
    return Posterior(
        members=members,
        weights=weights[kept] / total,
        many=float((weight_many + beyond) / total),
        left_out=float((weights.sum() - weights[kept].sum()) / total),
    )
