"""Tests of single hosts, for when too many are bad to look for sets of them.

Enters: how often each host has failed and passed alone. Leaves: the probability of each
to be bad, and which hosts should be tested again.

The share of bad hosts is not known: the probabilities are averaged over shares from 5%
to all, weighted by how well a share explains the tests. So one passed test among many
failed ones does not clear a host by itself, and "all are bad" needs no proof host by
host.
"""

import dataclasses

import numpy as np

from mjax.health.bisect.bits import ErrorRates

_SHARES = np.array([*np.arange(0.05, 1.0, 0.1), 1.0])
"""Chosen: shares of bad hosts, equally probable before the tests."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Singles:
    """What tests of single hosts say, of n hosts."""

    marginals: np.ndarray
    """[n] probability of each host to be bad."""
    error: float
    """Probability that `bad` is not the answer."""

    @property
    def bad(self) -> np.ndarray:
        """[n] bool: the hosts that are probably bad."""
        return self.marginals > 0.5

    @property
    def doubts(self) -> np.ndarray:
        """[n] probability that a host is taken for what it is not."""
        return np.minimum(self.marginals, 1 - self.marginals)


def judge(failed: np.ndarray, passed: np.ndarray, rates: ErrorRates) -> Singles:
    """Return what is known of each host.

    Args:
      failed: [n] how many tests of the host alone have failed.
      passed: [n] how many have passed.
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
    """Return the hosts to test again, the most doubtful first.

    Args:
      found: by the tests so far.
      tested: [n] bool: whether a host has been tested alone.
      most_error: probability of error at which the search ends.
    Returns:
      indices. The hosts left out add up to at most half of `most_error`.
    """
    doubts = np.where(tested, found.doubts, 1.0)
    order = np.argsort(-doubts, kind="stable")
    behind = np.cumsum(doubts[order][::-1])[::-1]
    needed = behind > most_error / 2
    return order[needed] if needed.any() else order[:1]
