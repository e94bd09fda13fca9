"""Tests of single hosts, for when too many hosts are bad to search for sets.

Input: how often each host has failed and passed alone. Output: the probability that
each is bad, and the hosts to test again.

The share of bad hosts is unknown: the probabilities are averaged over shares from 5% to
100%, weighted by the likelihood of the tests. So a single passed test among many failed
ones does not clear a host, and "all are bad" needs no separate proof for each host.
"""

import dataclasses

import numpy as np

from mjax.health.bisect.bits import ErrorRates

_SHARES = np.array([*np.arange(0.05, 1.0, 0.1), 1.0])
"""Shares of bad hosts, equally probable before the tests. Not measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Singles:
    """Result of single-host tests of n hosts."""

    marginals: np.ndarray
    """[n] probability that each host is bad."""
    error: float
    """Probability that `bad` is wrong."""

    @property
    def bad(self) -> np.ndarray:
        """[n] bool: the hosts that are probably bad."""
        return self.marginals > 0.5

    @property
    def doubts(self) -> np.ndarray:
        """[n] probability that a host is misjudged."""
        return np.minimum(self.marginals, 1 - self.marginals)


def judge(failed: np.ndarray, passed: np.ndarray, rates: ErrorRates) -> Singles:
    """Return the result for each host.

    Args:
      failed: [n] number of failed tests of the host alone.
      passed: [n] number of passed tests of the host alone.
      rates: how often a test errs.
    """
    ratio = failed * rates.log_failed + passed * rates.log_passed
    with np.errstate(divide="ignore"):
        log_bad = np.log(_SHARES)[:, None] + ratio
        log_good = np.broadcast_to(np.log1p(-_SHARES)[:, None], log_bad.shape)
    both = np.logaddexp(log_bad, log_good)
    told = both.sum(1)
    weights = np.exp(told - told.max())
    weights /= weights.sum()
    by_share = np.exp(log_bad - both)
    marginals = np.minimum(weights @ by_share, 1.0)
    right = np.where(marginals > 0.5, by_share, 1 - by_share)
    # 1 - product, without losing small numbers.
    with np.errstate(divide="ignore"):
        errors = -np.expm1(np.log(np.clip(right, 0.0, 1.0)).sum(1))
    return Singles(marginals=marginals, error=float(weights @ errors))


def doubtful(found: Singles, tested: np.ndarray, most_error: float) -> np.ndarray:
    """Return the hosts to test again, most doubtful first.

    Args:
      found: result of the tests so far.
      tested: [n] bool: whether a host has been tested alone.
      most_error: probability of error at which the search ends.
    Returns:
      indices. The errors of the omitted hosts add up to at most half of `most_error`.
    """
    doubts = np.where(tested, found.doubts, 1.0)
    order = np.argsort(-doubts, kind="stable")
    behind = np.cumsum(doubts[order][::-1])[::-1]
    needed = behind > most_error / 2
    return order[needed] if needed.any() else order[:1]
