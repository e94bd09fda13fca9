"""Find bad links by tests of two hosts, in rounds of disjoint pairs.

Input: hosts, and the outcomes of tests of two hosts. Output: the pairs of the next
round, bad hosts, and bad links: pairs that fail although both hosts pass in other
pairs.

First every two hosts meet once (`designs.round_robin`). Then the doubtful pairs are
repeated, in rounds of disjoint pairs. For each host and each link there is a
probability that it is misjudged, given that all other hosts and links are judged
correctly. The search ends when the sum of these probabilities, an upper bound of the
probability of any error, is at most 1 - confidence.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from mjax.health.bisect.designs import round_robin, waves
from mjax.health.bisect.problem import Outcome, Problem, check_outcomes
from mjax.health.bisect.search import Progress, Round, Suspect, Verdict

LEAST_HOSTS = 4
"""Minimum number of hosts. With 3 hosts each end of a bad link has only one other
pair."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """A pair of hosts and the probability that their link is bad."""

    hosts: tuple[str, str]
    probability: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkProgress(Progress):
    """State of a search for bad links; `bad` are hosts."""

    links: tuple[Link, ...]
    """Bad links between hosts that are good."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Beliefs:
    """Probabilities of n hosts and of their links, given the tests."""

    bad: np.ndarray
    """[n] bool: the likeliest set of bad hosts."""
    hosts: np.ndarray
    """[n] probability that each host is bad, if `bad` is right about all others."""
    links: np.ndarray
    """[n, n] probability that each link is bad; 0 if it is not in `judged`."""
    judged: np.ndarray
    """[n, n] bool: links between good hosts, in the upper triangle."""


def advance_links(problem: Problem, outcomes: Sequence[Outcome]) -> LinkProgress:
    """Return the state of the search and the pairs to test next.

    Raises:
      ValueError: there are too few hosts, known good hosts are given, or an outcome is
        not of two hosts of the problem.
    """
    _check(problem, outcomes)
    config, num = problem.config, len(problem.hosts)
    ratio, tested = _counts(problem, outcomes)
    beliefs = _judge(ratio, config.prior, config.link_prior)
    rounds = round_robin(num)
    planned = [
        (turn, pending)
        for turn, pairs in enumerate(rounds, 1)
        if (pending := [pair for pair in pairs if not tested[pair]])
    ]
    if planned and len(outcomes) < _most_tests(problem):
        return _progress(problem, beliefs, planned, 1.0)
    if planned:
        return _given_up(problem, beliefs, len(outcomes), 1.0)
    doubts = _doubts(beliefs)
    error = float(min(1.0, doubts.sum() + _host_doubts(beliefs).sum()))
    if (~beliefs.bad).sum() < 2:
        return dataclasses.replace(
            _progress(problem, beliefs, (), error),
            verdict="all",
            reason="no two hosts pass together: all are bad, or the test itself fails",
        )
    most_error = 1 - config.confidence
    if error <= most_error:
        return _progress(problem, beliefs, (), error)
    if len(outcomes) >= _most_tests(problem):
        return _given_up(problem, beliefs, len(outcomes), error)
    again = _again(beliefs, doubts, most_error)
    wave = waves(again, num)[0]
    return _progress(problem, beliefs, [(None, [again[i] for i in wave])], error)


def _given_up(
    problem: Problem, beliefs: _Beliefs, num_tests: int, error: float
) -> LinkProgress:
    return dataclasses.replace(
        _progress(problem, beliefs, (), error),
        verdict="undecided",
        reason=f"the search gave up after {num_tests} tests (--max-tests "
        f"{_most_tests(problem)})",
    )


def _check(problem: Problem, outcomes: Sequence[Outcome]) -> None:
    least = max(LEAST_HOSTS, 2 * problem.least_groups)
    if len(problem.hosts) < least:
        raise ValueError(
            f"--links needs at least {least} hosts here, got {len(problem.hosts)}: "
            "with fewer, a bad link cannot be distinguished from a bad host"
        )
    if problem.good:
        raise ValueError("--links does not use --good; add those hosts to --hosts")
    check_outcomes(problem, outcomes)
    for outcome in outcomes:
        if len(outcome.hosts) != 2:
            raise ValueError(
                "with --links each test must have 2 hosts, got an outcome of "
                f"{len(outcome.hosts)}: {', '.join(outcome.hosts)}"
            )


def _most_tests(problem: Problem) -> int:
    pairs = math.comb(len(problem.hosts), 2)
    given = problem.config.max_tests
    return 10 * pairs if given is None else given


def _counts(
    problem: Problem, outcomes: Sequence[Outcome]
) -> tuple[np.ndarray, np.ndarray]:
    """Sum up the outcomes of each pair of hosts.

    Returns:
      [n, n] log likelihood ratio of a bad pair; [n, n] bool: whether it was tested.
      Both are symmetric.
    """
    place = {name: index for index, name in enumerate(problem.hosts)}
    rates, num = problem.config.rates, len(problem.hosts)
    ratio, tested = np.zeros((num, num)), np.zeros((num, num), bool)
    for outcome in outcomes:
        a, b = (place[name] for name in outcome.hosts)
        told = rates.log_failed if outcome.failed else rates.log_passed
        for i, j in ((a, b), (b, a)):
            ratio[i, j] += told
            tested[i, j] = True
    return ratio, tested


def _judge(ratio: np.ndarray, prior: float, link_prior: float) -> _Beliefs:
    """Find the likeliest bad hosts, and the probabilities of hosts and links."""
    num = len(ratio)
    # Log likelihood of a pair of good hosts, summed over both states of the link.
    clean = np.logaddexp(math.log(link_prior) + ratio, math.log1p(-link_prior))
    gain = ratio - clean
    np.fill_diagonal(gain, 0.0)
    odds = math.log(prior / (1 - prior))
    bad = np.zeros(num, bool)
    while True:
        # Log odds that a host is bad, from its pairs with hosts that are not in `bad`.
        scores = odds + gain[:, ~bad].sum(1)
        flips = np.where(bad, -scores, scores)
        best = int(np.argmax(flips))
        if flips[best] <= 1e-9:
            break
        bad[best] = ~bad[best]
    links = _sigmoid(math.log(link_prior / (1 - link_prior)) + ratio)
    judged = np.triu(~bad[:, None] & ~bad[None], 1)
    return _Beliefs(
        bad=bad, hosts=_sigmoid(scores), links=np.where(judged, links, 0), judged=judged
    )


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x))


def _doubts(beliefs: _Beliefs) -> np.ndarray:
    """Return the probability that each link is misjudged, [n, n]."""
    return np.where(beliefs.judged, np.minimum(beliefs.links, 1 - beliefs.links), 0.0)


def _host_doubts(beliefs: _Beliefs) -> np.ndarray:
    return np.where(beliefs.bad, 1 - beliefs.hosts, beliefs.hosts)


def _again(
    beliefs: _Beliefs, doubts: np.ndarray, most_error: float
) -> list[tuple[int, int]]:
    """Return the pairs of host indices to repeat, most doubtful first.

    A doubtful host is tested with each of three good hosts.
    """
    num = len(beliefs.bad)
    pairs = sorted(
        itertools.combinations(range(num), 2), key=lambda pair: -doubts[pair]
    )
    left, again = float(doubts.sum()), []
    for pair in pairs:
        if left <= most_error / 2:
            break
        left -= float(doubts[pair])
        again.append(pair)
    host_doubts = _host_doubts(beliefs)
    good = [int(h) for h in np.argsort(beliefs.hosts) if not beliefs.bad[h]]
    for host in np.flatnonzero(host_doubts > most_error / (4 * num)):
        for other in [h for h in good if h != host][:3]:
            again.append((min(int(host), other), max(int(host), other)))
    return list(dict.fromkeys(again))


def _progress(
    problem: Problem,
    beliefs: _Beliefs,
    rounds: Sequence[tuple[int | None, Sequence[tuple[int, int]]]],
    error: float,
) -> LinkProgress:
    hosts = problem.hosts
    found = [(int(a), int(b)) for a, b in np.argwhere(beliefs.links > 0.5)]
    verdict: Verdict = "some" if beliefs.bad.any() or found else "none"
    return LinkProgress(
        rounds=tuple(
            Round(
                groups=tuple((hosts[a], hosts[b]) for a, b in pairs),
                reason="doubtful pairs" if number is None else "pairs",
                number=number,
            )
            for number, pairs in rounds
        ),
        verdict=verdict,
        bad=tuple(
            Suspect(host=hosts[h], probability=float(beliefs.hosts[h]))
            for h in np.flatnonzero(beliefs.bad)
        ),
        suspects=(),
        links=tuple(
            Link(hosts=(hosts[a], hosts[b]), probability=float(beliefs.links[a, b]))
            for a, b in found
        ),
        error_probability=error,
        reason="",
    )
