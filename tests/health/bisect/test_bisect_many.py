import itertools
import math

import numpy as np
import pytest

from mjax.health.bisect.bits import ErrorRates
from mjax.health.bisect.many import _SHARES, doubtful, judge

FLAKY = ErrorRates(false_negative=0.1, false_positive=0.1)


def test_probabilities_are_those_of_all_sets():
    """Bayes' rule over sets and shares, one factor after the other."""
    failed, passed = np.array([2, 0, 1, 3]), np.array([0, 1, 1, 0])
    by_set: dict[tuple[int, ...], float] = {}
    for bad in itertools.product((0, 1), repeat=4):
        for share in _SHARES:
            p = 1.0
            for is_bad, f, g in zip(bad, failed, passed, strict=True):
                p *= share if is_bad else 1 - share
                p *= 0.9**f * 0.1**g if is_bad else 0.1**f * 0.9**g
            by_set[bad] = by_set.get(bad, 0.0) + p
    total = math.fsum(by_set.values())
    found = judge(failed, passed, FLAKY)
    for host in range(4):
        bad = math.fsum(p for s, p in by_set.items() if s[host]) / total
        assert found.marginals[host] == pytest.approx(bad)
    answer = tuple(int(x) for x in found.bad)
    assert found.error == pytest.approx(1 - by_set[answer] / total)


def test_a_pass_clears_a_host_among_good_ones_but_not_among_bad_ones():
    failed, passed = np.ones(96, int), np.zeros(96, int)
    failed[3], passed[3] = 0, 1
    among_bad = judge(failed, passed, FLAKY)
    assert among_bad.marginals[3] > 0.9
    failed[:48], passed[:48] = 0, 1
    among_both = judge(failed, passed, FLAKY)
    assert among_both.marginals[3] < 0.2
    assert among_both.error > 0.5  # 96 hosts, each tested once
    assert len(doubtful(among_both, np.ones(96, bool), 0.01)) == 96


def test_hosts_that_were_not_tested_come_first():
    failed, passed = np.array([3, 0, 0, 0]), np.array([0, 0, 3, 0])
    found = judge(failed, passed, FLAKY)
    tested = np.array([True, False, True, False])
    assert set(doubtful(found, tested, 0.1)[:2].tolist()) == {1, 3}
