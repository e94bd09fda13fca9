import math

import numpy as np
import pytest

from mjax.health.bisect.bits import (
    ErrorRates,
    best_share,
    capacity,
    entropy,
    information,
    least_tests,
)


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.1, 0.3])
def test_a_symmetric_channel_has_the_capacity_of_the_textbook(rate: float):
    both = ErrorRates(false_negative=rate, false_positive=rate)
    assert capacity(both) == pytest.approx(1 - float(entropy(rate)), abs=1e-9)
    assert best_share(both) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("rate", [0.1, 0.25, 0.4])
def test_a_channel_that_only_misses_has_the_capacity_of_the_z_channel(rate: float):
    """Source: en.wikipedia.org/wiki/Z-channel_(information_theory)."""
    only_misses = ErrorRates(false_negative=rate)
    expected = math.log2(1 + (1 - rate) * rate ** (rate / (1 - rate)))
    assert capacity(only_misses) == pytest.approx(expected, abs=1e-6)


def test_the_bound_counts_the_possible_answers():
    assert least_tests(48, 1, ErrorRates()) == pytest.approx(math.log2(48))
    assert least_tests(16, 2, ErrorRates()) == pytest.approx(math.log2(120))
    assert least_tests(96, 0, ErrorRates()) == 0
    noisy = ErrorRates(false_negative=0.1, false_positive=0.1)
    assert least_tests(96, 3, noisy) == pytest.approx(32.25, abs=0.01)


def test_a_test_whose_outcome_is_known_tells_nothing():
    told = information(np.array([0.0, 0.5, 1.0]), 0.1, 0.1)
    np.testing.assert_allclose(told, [0, 0.531, 0], atol=1e-3)


@pytest.mark.parametrize("rate", [-0.1, 0.5, 1.0, math.nan])
def test_a_test_that_errs_every_other_time_is_refused(rate: float):
    with pytest.raises(ValueError, match="--false-positive must be at least 0 and"):
        ErrorRates(false_positive=rate)
