"""The information of a group test, in bits, and the minimum number of tests.

Input: the probabilities that a test errs. Output: the information of one test, its
capacity, and the bound on the number of tests.

A test of a group is a binary channel: the input is whether the group has a bad host,
the output is whether the test fails. A search without errors, adaptive or not, needs at
least log2(number of equally likely answers) / capacity tests on average.

Source: Baldassini, Johnson and Aldridge, "The capacity of adaptive group testing",
arXiv:1301.7023; for noisy tests Scarlett, "Noisy adaptive group testing: bounds and
algorithms", arXiv:1803.05099.
"""

import dataclasses
import functools
import math

import numpy as np

LEAST_ERROR = 1e-6
"""Minimum error rate that the search assumes. Not measured. At rate 0, one wrong
outcome would exclude the right answer for good."""

_SHARES = np.linspace(0.0, 1.0, 2001)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorRates:
    """Error rates of a test."""

    false_negative: float = 0.0
    """Probability that a test passes although a host in its group is bad."""
    false_positive: float = 0.0
    """Probability that a test fails although no host in its group is bad."""

    def __post_init__(self) -> None:
        for flag, rate in (
            ("--false-negative", self.false_negative),
            ("--false-positive", self.false_positive),
        ):
            if not 0 <= rate < 0.5:
                raise ValueError(
                    f"{flag} must be at least 0 and below 0.5, got {rate:g}; a test "
                    "that errs half the time gives no information"
                )

    @property
    def miss(self) -> float:
        """False-negative rate that the search uses."""
        return max(self.false_negative, LEAST_ERROR)

    @property
    def alarm(self) -> float:
        """False-positive rate that the search uses."""
        return max(self.false_positive, LEAST_ERROR)

    @property
    def log_failed(self) -> float:
        """Natural log likelihood ratio of a bad host in a group whose test failed."""
        return math.log((1 - self.miss) / self.alarm)

    @property
    def log_passed(self) -> float:
        """Natural log likelihood ratio of a bad host in a group whose test passed."""
        return math.log(self.miss / (1 - self.alarm))


def entropy(probability: np.ndarray | float) -> np.ndarray:
    """Return the entropy in bits of a binary event with this probability."""
    p = np.clip(probability, 1e-300, 1.0)
    q = np.clip(1.0 - np.asarray(probability), 1e-300, 1.0)
    return np.asarray(-p * np.log2(p) - q * np.log2(q))


def information(share: np.ndarray | float, miss: float, alarm: float) -> np.ndarray:
    """Return the expected information of a test, in bits.

    Args:
      share: probability that the group has a bad host.
      miss: probability that the test passes although the group has a bad host.
      alarm: probability that the test fails although the group has no bad host.
    """
    share = np.asarray(share)
    fails = share * (1 - miss) + (1 - share) * alarm
    noise = share * entropy(miss) + (1 - share) * entropy(alarm)
    return np.asarray(np.maximum(entropy(fails) - noise, 0.0))


@functools.cache
def best_share(rates: ErrorRates) -> float:
    """Return the `share` at which `information` is largest."""
    return float(_SHARES[np.argmax(information(_SHARES, rates.miss, rates.alarm))])


@functools.cache
def capacity(rates: ErrorRates) -> float:
    """Return the capacity of one test, in bits."""
    told = information(_SHARES, rates.false_negative, rates.false_positive)
    return float(told.max())


def least_tests(num_hosts: int, num_bad: int, rates: ErrorRates) -> float:
    """Return a lower bound of the mean number of tests that a search needs.

    The bound assumes that num_bad of num_hosts hosts are bad, and that the search knows
    this number. A search that does not know it needs more tests.
    """
    return math.log2(math.comb(num_hosts, num_bad)) / capacity(rates)
