"""Choose the groups of hosts for the next tests.

Input: the probable sets of bad hosts. Output: disjoint groups, chosen one after the
other by their expected information, and that information in bits.

The information of one test depends only on the probability that its group has a bad
host (`bits.information`), so a group grows host by host towards the best probability.
The information of simultaneous tests is the information of their joint outcome: two
groups that together certainly contain the one bad host give the same information.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from mjax.health.bisect.bits import ErrorRates, best_share, entropy, information
from mjax.health.bisect.posterior import Posterior

_MOST_AT_ONCE = 6
"""Number of tests that are chosen jointly. The tests have 2^6 joint outcomes, and the
information of more tests overlaps."""
_WORTH = 0.5
"""Minimum information of a further test of a round, relative to the first. Not
measured."""
_GOOD = 4
"""Number of probably good hosts that are considered as one group. Not measured."""
_SINGLES = 8
"""Number of the most doubtful hosts that are considered as single-host groups. Not
measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the size of a group, and on the hosts that can fill it up."""

    min_hosts: int
    max_hosts: int
    num_fillers: int
    """Number of known good hosts that can fill up groups, over all tests together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """Groups of one round."""

    groups: tuple[tuple[int, ...], ...]
    """Indices of the suspects of each group, at least one."""
    num_fillers: tuple[int, ...]
    """Number of known good hosts that each group needs in addition."""
    bits: float
    """Expected joint information of the tests, in bits."""


def choose(
    found: Posterior, rates: ErrorRates, limits: Limits, most_tests: int
) -> Choice:
    """Choose the groups of the next round; none if no group is allowed.

    Args:
      found: the probable sets of bad hosts.
      rates: how often a test errs.
      limits: limits on each group.
      most_tests: maximum number of groups.
    """
    num_hosts = found.members.shape[1]
    free = np.ones(num_hosts, bool)
    members = found.members.astype(np.float64)
    sets = found.weights / found.weights.sum()
    # "Many are bad" is one more set, which intersects each group of 2 or more hosts.
    weights = np.append(found.weights, found.many)
    weights /= weights.sum()
    patterns = np.zeros(len(weights), np.intp)
    groups, fills, bits, first = [], [], 0.0, 0.0
    for number in range(min(most_tests, _MOST_AT_ONCE)):
        rest = dataclasses.replace(limits, num_fillers=limits.num_fillers - sum(fills))
        best: tuple[float, list[int], np.ndarray, int] | None = None
        for group, fill in _candidates(members, sets, free, rates, rest):
            hit = np.append(members[:, group].any(1), len(group) > 1)
            told = _joint_bits(patterns + (hit << number), weights, number + 1, rates)
            if best is None or _is_better(told, group, *best[:2]):
                best = told, group, hit, fill
        if best is None or best[0] - bits < _WORTH * first:
            break
        told, group, hit, fill = best
        first = first or told
        bits, patterns = told, patterns + (hit << number)
        free[group] = False
        groups.append(tuple(sorted(group)))
        fills.append(fill)
    return Choice(groups=tuple(groups), num_fillers=tuple(fills), bits=bits)


def _is_better(
    told: float, group: list[int], best: float, best_group: list[int]
) -> bool:
    """Return whether `group` gives more information than the best group.

    If the difference is at most 1%, the smaller group is better.
    """
    if abs(told - best) <= 0.01 * best:
        return len(group) < len(best_group)
    return told > best


def _candidates(
    members: np.ndarray,
    weights: np.ndarray,
    free: np.ndarray,
    rates: ErrorRates,
    limits: Limits,
) -> Iterator[tuple[list[int], int]]:
    """Yield (group, number of fillers it needs) for groups that may be worth a test."""
    target = best_share(rates)
    marginals = weights @ members
    doubt = np.where(free, np.minimum(marginals, 1 - marginals), -1.0)
    for share in (target, target / 2, target / 4):
        yield from _filled(
            _grow(members, weights, free, share, limits.max_hosts),
            members,
            weights,
            free,
            limits,
        )
    # Probably good hosts: they fail only if many are bad.
    good = np.argsort(np.where(free, marginals, np.inf))[:_GOOD]
    group = [int(host) for host in good[: limits.max_hosts] if free[host]]
    yield from _filled(group, members, weights, free, limits)
    for host in np.argsort(-doubt)[:_SINGLES]:
        if free[host]:
            yield from _filled([int(host)], members, weights, free, limits)


def _grow(
    members: np.ndarray,
    weights: np.ndarray,
    free: np.ndarray,
    target: float,
    most: int,
) -> list[int]:
    """Add hosts until the group contains a bad host with the target probability."""
    group: list[int] = []
    share, left = 0.0, weights.copy()
    allowed = free.copy()
    while allowed.any() and len(group) < most:
        more = np.where(allowed, left @ members, np.inf)
        order = np.argsort(more)[::-1]
        order = order[more[order] <= target - share]
        if not len(order):
            # Exceed the target by one host if the result is closer to it.
            host = int(np.argmin(more))
            if not group or share + more[host] - target < target - share:
                group.append(host)
            break
        # The probability of a bad host among several is at most the sum over them.
        fit = int((np.cumsum(more[order]) <= target - share).sum())
        added = order[: max(1, min(fit, most - len(group)))]
        group += [int(host) for host in added]
        allowed[added] = False
        left = np.where(members[:, added].any(1), 0.0, left)
        share = float(1 - left.sum())
        if target - share < 0.02 or left @ members.max(1) < 1e-9:
            break
    return group


def _filled(
    group: list[int],
    members: np.ndarray,
    weights: np.ndarray,
    free: np.ndarray,
    limits: Limits,
) -> Iterator[tuple[list[int], int]]:
    """Yield (group, number of fillers it needs), if the minimum size can be reached."""
    if not group:
        return
    missing = limits.min_hosts - len(group)
    fill = min(max(missing, 0), limits.num_fillers)
    missing -= fill
    if missing > 0:
        left = np.where(members[:, group].any(1), 0.0, weights)
        more = np.where(free, left @ members, np.inf)
        more[group] = np.inf
        added = np.argsort(more)[:missing]
        if not np.isfinite(more[added]).all() or len(added) < missing:
            return
        group = group + [int(host) for host in added]
    yield group, fill


def _joint_bits(
    patterns: np.ndarray, weights: np.ndarray, num: int, rates: ErrorRates
) -> float:
    """Return the joint information of several tests, in bits.

    Args:
      patterns: [P] one integer for each set; its bit j is 1 if the set has a host in
        group j.
      weights: [P] probabilities of the sets.
      num: number of tests.
      rates: how often a test errs.
    """
    shares = np.bincount(patterns, weights, minlength=2**num)
    if num == 1:
        return float(information(shares[1], rates.miss, rates.alarm))
    channel = np.array([[1 - rates.alarm, rates.miss], [rates.alarm, 1 - rates.miss]])
    outcomes = shares.reshape((2,) * num)
    noise = 0.0
    for axis in range(num):
        share = outcomes.sum(tuple(a for a in range(num) if a != axis))
        noise += share[0] * entropy(rates.alarm) + share[1] * entropy(rates.miss)
    for axis in range(num):
        outcomes = np.moveaxis(np.tensordot(channel, outcomes, (1, axis)), 0, axis)
    p = outcomes[outcomes > 1e-300]
    return float(max(-(p * np.log2(p)).sum() - noise, 0.0))
