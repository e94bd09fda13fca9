"""The enumeration against all sets of hosts."""

import itertools
import math

import numpy as np
import pytest

from mjax.health.bisect import posterior as module
from mjax.health.bisect.bits import ErrorRates
from mjax.health.bisect.posterior import posterior

FLAKY = ErrorRates(false_negative=0.1, false_positive=0.05)


def by_definition(
    in_test: np.ndarray, failed: np.ndarray, prior: float, rates: ErrorRates
) -> dict[frozenset[int], float]:
    """Return the probability of each set by Bayes' rule, test by test."""
    num, found = in_test.shape[1], {}
    for size in range(num + 1):
        for bad in itertools.combinations(range(num), size):
            p = prior**size * (1 - prior) ** (num - size)
            for row, fails in zip(in_test, failed, strict=True):
                is_hit = any(row[host] for host in bad)
                chance = 1 - rates.miss if is_hit else rates.alarm
                p *= chance if fails else 1 - chance
            found[frozenset(bad)] = p
    total = math.fsum(found.values())
    return {bad: p / total for bad, p in found.items()}


def random_tests(seed: int, num: int, bad: set[int]) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    in_test = random.random((14, num)) < 0.3
    hit = in_test[:, sorted(bad)].any(1)
    chance = np.where(hit, 1 - FLAKY.false_negative, FLAKY.false_positive)
    return in_test, random.random(14) < chance


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bad", [set(), {3}, {0, 7}, {1, 4, 8}])
def test_probabilities_are_those_of_all_sets(seed: int, bad: set[int]):
    in_test, failed = random_tests(seed, 9, bad)
    exact = by_definition(in_test, failed, 0.05, FLAKY)
    found = posterior(in_test, failed, prior=0.05, rates=FLAKY)
    assert found.many == 0  # sets of all sizes are enumerated
    for row, weight in zip(found.members, found.weights, strict=True):
        expected = exact[frozenset(int(host) for host in np.flatnonzero(row))]
        # Sizes that are left out have less than 1e-4 of the probability.
        assert weight == pytest.approx(expected, rel=2e-4, abs=1e-12)
    assert found.error == pytest.approx(1 - max(exact.values()), abs=2e-4)


@pytest.mark.parametrize("seed", range(4))
def test_a_narrow_enumeration_keeps_the_probable_sets(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    """As with many hosts: only the best sets of a size are extended."""
    in_test, failed = random_tests(seed, 11, {1, 4, 8})
    wide = posterior(in_test, failed, prior=0.05, rates=FLAKY)
    monkeypatch.setattr(module, "_BUDGET", 200)
    monkeypatch.setattr(module, "_MOST_KEPT", 120)
    monkeypatch.setattr(module, "_MOST_SETS", 100)
    narrow = posterior(in_test, failed, prior=0.05, rates=FLAKY)
    assert (narrow.best == wide.best).all()
    assert narrow.weights.max() == pytest.approx(wide.weights.max(), rel=0.15)


def test_more_than_64_tests_are_counted():
    """Tests are bits of several words."""
    in_test = np.zeros((150, 20), bool)
    in_test[:, 5] = True
    in_test[140:, 6] = True
    in_test[140:, 5] = False
    found = posterior(in_test, np.ones(150, bool), prior=0.02, rates=FLAKY)
    assert np.flatnonzero(found.best).tolist() == [5, 6]
    others = np.delete(found.marginals, [5, 6])
    np.testing.assert_allclose(others, 0.02, rtol=0.05)  # never tested


def test_without_tests_the_prior_is_returned():
    found = posterior(
        np.zeros((0, 10), bool), np.zeros(0, bool), prior=0.1, rates=FLAKY
    )
    assert not found.best.any()
    assert 1 - found.error == pytest.approx(0.9**10, rel=1e-3)
    np.testing.assert_allclose(found.marginals, 0.1, rtol=1e-2)


def test_groups_that_all_fail_say_that_many_hosts_are_bad():
    rows = np.kron(np.eye(6, dtype=bool), np.ones(8, bool))
    columns = np.tile(np.eye(8, dtype=bool), 6)
    in_test = np.concatenate([rows, columns])
    all_fail = posterior(in_test, np.ones(14, bool), prior=0.02, rates=FLAKY)
    assert all_fail.many > 0.99
    one = in_test[:, 13]
    assert posterior(in_test, one, prior=0.02, rates=FLAKY).many < 1e-3
