"""The choice of groups against all groups."""

import itertools

import numpy as np
import pytest

from mjax.health.bisect.bits import ErrorRates, capacity, information
from mjax.health.bisect.groups import Limits, choose
from mjax.health.bisect.posterior import Posterior

SURE, FLAKY = ErrorRates(), ErrorRates(false_negative=0.1, false_positive=0.1)
FREE = Limits(min_hosts=1, max_hosts=99, num_fillers=0)


def believed(sets: dict[tuple[int, ...], float], num: int) -> Posterior:
    members = np.zeros((len(sets), num), bool)
    for row, hosts in zip(members, sets, strict=True):
        row[list(hosts)] = True
    weights = np.array(list(sets.values()))
    return Posterior(members=members, weights=weights, many=0.0, left_out=0.0)


def best_of_all(found: Posterior, rates: ErrorRates, sizes: range) -> float:
    """Return the most bits of any group of these sizes."""
    num = found.members.shape[1]
    return max(
        float(
            information(
                found.weights[found.members[:, group].any(1)].sum(),
                rates.miss,
                rates.alarm,
            )
        )
        for size in sizes
        for group in itertools.combinations(range(num), size)
    )


@pytest.mark.parametrize("rates", [SURE, FLAKY, ErrorRates(false_negative=0.3)])
@pytest.mark.parametrize("seed", range(6))
def test_a_group_tells_nearly_as_much_as_the_best_of_all(seed: int, rates: ErrorRates):
    random = np.random.default_rng(seed)
    sets = {
        tuple(sorted(random.choice(8, random.integers(1, 4), replace=False).tolist()))
        for _ in range(20)
    }
    weights = random.dirichlet(np.full(len(sets), 0.3))
    found = believed(dict(zip(sorted(sets), weights.tolist(), strict=True)), 8)
    chosen = choose(found, rates, FREE, 1)
    assert len(chosen.groups) == 1
    assert chosen.bits >= 0.8 * best_of_all(found, rates, range(1, 9))


def test_one_bad_host_of_many_is_halved():
    found = believed({(host,): 1 / 32 for host in range(32)}, 32)
    chosen = choose(found, SURE, FREE, 1)
    assert len(chosen.groups[0]) == 16
    assert chosen.bits == pytest.approx(1, abs=1e-4)


def test_tests_at_once_have_no_host_in_common_and_do_not_repeat_each_other():
    """Two halves give one bit; a half, and a quarter of the other half, give more."""
    found = believed({(host,): 1 / 32 for host in range(32)}, 32)
    chosen = choose(found, SURE, FREE, 3)
    hosts = list(itertools.chain(*chosen.groups))
    assert len(hosts) == len(set(hosts))
    assert chosen.bits > 1.4
    assert len(chosen.groups) >= 2


def test_independent_faults_are_tested_at_once():
    quarter = {(): 0.25, (0,): 0.25, (5,): 0.25, (0, 5): 0.25}
    chosen = choose(believed(quarter, 8), FLAKY, FREE, 4)
    assert sorted(chosen.groups) == [(0,), (5,)]
    assert chosen.bits == pytest.approx(2 * capacity(FLAKY), rel=1e-3)


def test_a_group_of_good_hosts_tells_whether_many_are_bad():
    none = np.zeros((1, 20), bool)
    found = Posterior(members=none, weights=np.array([0.6]), many=0.4, left_out=0.0)
    chosen = choose(found, FLAKY, FREE, 1)
    assert len(chosen.groups[0]) > 1
    assert chosen.bits > 0.4


def test_small_groups_are_filled_with_good_hosts_then_with_the_least_suspect():
    found = believed({(0,): 0.5, (1,): 0.49, (2,): 0.01}, 6)
    limits = Limits(min_hosts=3, max_hosts=4, num_fillers=1)
    chosen = choose(found, SURE, limits, 1)
    (group,), (fill,) = chosen.groups, chosen.num_fillers
    assert fill == 1
    assert len(group) == 2
    assert len({0, 1} & set(group)) == 1
    assert 2 not in group


def test_no_group_is_chosen_that_would_be_too_small():
    found = believed({(0,): 0.5, (1,): 0.5}, 2)
    limits = Limits(min_hosts=3, max_hosts=4, num_fillers=0)
    assert choose(found, SURE, limits, 1).groups == ()


def test_groups_are_not_larger_than_allowed():
    found = believed({(host,): 1 / 32 for host in range(32)}, 32)
    limits = Limits(min_hosts=1, max_hosts=5, num_fillers=0)
    chosen = choose(found, SURE, limits, 4)
    assert max(len(group) for group in chosen.groups) == 5
