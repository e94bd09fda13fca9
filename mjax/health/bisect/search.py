"""The search for bad hosts: the next tests, and the answer so far.

Input: a problem and the outcomes of all completed tests. Output: the groups of the
next round, and the most probable answer with its probability of error. No state is kept
between calls, so a search can continue from an outcomes file, whoever ran the tests.

1. Rows, then columns (`designs.crossed`).
2. The most informative groups, given all outcomes (`posterior`, `groups`), until the
   answer is probable enough. This also repeats a flaky test: its group is then the most
   informative.
3. If the first two rounds show that many hosts are bad: each host alone (`many`).
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from mjax.health.bisect import many as single_tests
from mjax.health.bisect.designs import crossed
from mjax.health.bisect.groups import Choice, Limits, choose
from mjax.health.bisect.posterior import Posterior, posterior
from mjax.health.bisect.problem import Outcome, Problem, blocks, check_outcomes

Group = tuple[str, ...]
Verdict = Literal["none", "some", "all", "undecided"]

LEAST_TOLD = 1e-3
"""A round with less information than this share of the remaining entropy is useless:
the doubtful hosts are always in the same groups. Not measured."""
_ALL_FAIL = (
    "every host fails: all are bad, or the test itself fails; run it on a host that is "
    "known to be good"
)
_SHOWN_DOUBT = 0.01
"""A host with at least this probability is named as a suspect. Not measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suspect:
    """A host and the probability that it is bad."""

    host: str
    probability: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """Tests that can run concurrently."""

    groups: tuple[Group, ...]
    """Groups, disjoint except for hosts that had to fill up several groups."""
    reason: str
    """How the groups were chosen."""
    number: int | None = None
    """Number, from 1, of a round that is fixed before any outcome is known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """State of a search after some outcomes."""

    rounds: tuple[Round, ...]
    """Next round, and later rounds that are already fixed; empty when the search has
    ended."""
    verdict: Verdict
    """The most probable answer; undecided if the search has ended without one."""
    bad: tuple[Suspect, ...]
    """The most probable set of bad hosts."""
    suspects: tuple[Suspect, ...]
    """Other hosts that may be bad."""
    error_probability: float
    """Probability that `bad` is not the exact set."""
    reason: str
    """Why the search has ended, if not because of an answer."""


def advance(problem: Problem, outcomes: Sequence[Outcome]) -> Progress:
    """Return the state of the search and the next tests.

    Raises:
      ValueError: an outcome is of a host that is not part of the problem.
    """
    check_outcomes(problem, outcomes)
    parts = blocks(problem)
    found = []
    for part in parts:
        suspects = set(part.hosts)
        own = [one for one in outcomes if suspects & set(one.hosts)]
        for one in own:
            stranger = set(one.hosts) - suspects - set(problem.good)
            if stranger and len(parts) > 1:
                raise ValueError(
                    f"an outcome has hosts of two parts of the search: {one.hosts[0]} "
                    f"and {min(stranger)}; test the groups of the plan"
                )
        found.append(_advance_part(part, own))
    merged = found[0] if len(found) == 1 else _merged(found)
    if merged.rounds and len(outcomes) >= problem.max_tests:
        return dataclasses.replace(
            merged,
            rounds=(),
            verdict="undecided",
            reason=f"the search gave up after {len(outcomes)} tests (--max-tests "
            f"{problem.max_tests})",
        )
    return merged


def _merged(parts: Sequence[Progress]) -> Progress:
    """Combine the parts of a search; their errors are independent."""
    verdicts: set[Verdict] = {part.verdict for part in parts}
    verdict: Verdict = "some" if len(verdicts) > 1 else parts[0].verdict
    if "undecided" in verdicts:
        verdict = "undecided"
    right = float(np.prod([1 - part.error_probability for part in parts]))
    return Progress(
        rounds=tuple(
            Round(
                groups=tuple(group for one in together for group in one.groups),
                reason="; ".join(sorted({one.reason for one in together})),
                number=together[0].number,
            )
            for together in _in_step([part.rounds for part in parts])
        ),
        verdict=verdict,
        bad=tuple(one for part in parts for one in part.bad),
        suspects=tuple(one for part in parts for one in part.suspects),
        error_probability=1 - right,
        reason="; ".join(sorted({part.reason for part in parts if part.reason})),
    )


def _in_step(plans: Sequence[Sequence[Round]]) -> Iterator[list[Round]]:
    """Yield the first round of each part, then the second of each, and so on."""
    for index in range(max(len(plan) for plan in plans)):
        yield [plan[index] for plan in plans if index < len(plan)]


def _advance_part(problem: Problem, outcomes: Sequence[Outcome]) -> Progress:
    in_test, failed = _arrays(problem, outcomes)
    config = problem.config
    found = posterior(in_test, failed, prior=config.prior, rates=config.rates)
    most_error = 1 - config.confidence
    rows, columns = crossed(
        len(problem.hosts),
        least=config.min_hosts,
        most=problem.largest,
        least_groups=problem.least_groups,
    )
    fixed = [("rows", rows)]
    if sorted(columns) != sorted(rows):
        fixed.append(("columns", columns))
    planned = [
        Round(groups=groups, reason=name, number=number)
        for number, (name, design) in enumerate(fixed, 1)
        if (groups := _pending(problem, design, outcomes))
    ]
    # The prior alone never clears a host.
    if found.error <= most_error and in_test.any(0).all():
        return _progress(problem, found)
    if planned:
        return _progress(problem, found, planned)
    if found.many > 0.5:
        return _each_alone(problem, in_test, failed)
    return _adaptive(problem, found)


def _adaptive(problem: Problem, found: Posterior) -> Progress:
    config = problem.config
    limits = Limits(
        min_hosts=config.min_hosts,
        max_hosts=problem.largest,
        num_fillers=len(problem.good),
    )
    choice = choose(found, config.rates, limits, config.parallel)
    if choice.bits < LEAST_TOLD * found.entropy_bits or not choice.groups:
        return dataclasses.replace(
            _progress(problem, found),
            verdict="undecided",
            reason=_why_undecided(problem),
        )
    reason = f"chosen from the outcomes so far, to gain {choice.bits:.2f} bits"
    return _progress(
        problem, found, [Round(groups=_named(problem, choice), reason=reason)]
    )


def _each_alone(problem: Problem, in_test: np.ndarray, failed: np.ndarray) -> Progress:
    """Return the state of a search by tests of single hosts, if many hosts are bad."""
    config, alone = problem.config, in_test.sum(1) == 1
    fails = in_test[alone & failed].sum(0)
    passes = in_test[alone & ~failed].sum(0)
    found = single_tests.judge(fails, passes, config.rates)
    tested = (fails + passes) > 0
    all_tested = bool(tested.all())
    bad = _suspects(problem, found.marginals, found.bad)
    error = found.error if all_tested else 1.0
    rounds: tuple[Round, ...] = ()
    verdict: Verdict = "all" if found.bad.all() else "some" if bad else "none"
    reason = ""
    if not all_tested or error > 1 - config.confidence:
        again = single_tests.doubtful(found, tested, 1 - config.confidence)
        groups = _filled_singles(problem, [int(host) for host in again])
        if groups:
            why = "one suspect per test: many hosts are bad, or every test fails"
            rounds = (Round(groups=groups, reason=why),)
        else:
            verdict, reason = "undecided", _why_undecided(problem)
    elif verdict == "all":
        reason = _ALL_FAIL
    others = ~found.bad & (found.marginals > _SHOWN_DOUBT)
    return Progress(
        rounds=rounds,
        verdict=verdict,
        bad=bad,
        suspects=_suspects(problem, found.marginals, others),
        error_probability=error,
        reason=reason,
    )


def _filled_singles(problem: Problem, hosts: Sequence[int]) -> tuple[Group, ...]:
    """Return groups of one suspect each, filled up with hosts known to be good."""
    missing, good = problem.config.min_hosts - 1, list(problem.good)
    groups = []
    for host in hosts:
        if missing > len(good):
            break
        fill, good = good[:missing], good[missing:]
        groups.append((problem.hosts[host], *fill))
    return tuple(groups)


def _why_undecided(problem: Problem) -> str:
    if problem.config.min_hosts > 1:
        return (
            f"no group of at least {problem.config.min_hosts} hosts (--min-hosts) "
            "distinguishes the suspects; name known good hosts with --good to fill up "
            "groups"
        )
    return "no group distinguishes the suspects; repeat the search with other hosts"


def _progress(
    problem: Problem, found: Posterior, rounds: Sequence[Round] = ()
) -> Progress:
    best, marginals = found.best, found.marginals
    verdict: Verdict = "all" if best.all() else "some" if best.any() else "none"
    return Progress(
        rounds=tuple(rounds),
        verdict=verdict,
        bad=_suspects(problem, marginals, best),
        suspects=_suspects(problem, marginals, ~best & (marginals > _SHOWN_DOUBT)),
        error_probability=found.error,
        reason=_ALL_FAIL if verdict == "all" and not rounds else "",
    )


def _suspects(
    problem: Problem, marginals: np.ndarray, chosen: np.ndarray
) -> tuple[Suspect, ...]:
    return tuple(
        Suspect(host=problem.hosts[host], probability=float(min(marginals[host], 1.0)))
        for host in np.flatnonzero(chosen)
    )


def _arrays(
    problem: Problem, outcomes: Sequence[Outcome]
) -> tuple[np.ndarray, np.ndarray]:
    """Return [T, n] whether a test includes a suspect, and [T] whether it failed."""
    place = {name: index for index, name in enumerate(problem.hosts)}
    in_test = np.zeros((len(outcomes), len(place)), bool)
    for row, outcome in enumerate(outcomes):
        in_test[row, [place[name] for name in outcome.hosts if name in place]] = True
    return in_test, np.array([one.failed for one in outcomes], bool)


def _pending(
    problem: Problem, design: Sequence[Sequence[int]], outcomes: Sequence[Outcome]
) -> tuple[Group, ...]:
    """Return the groups of a fixed design that have no outcome yet."""
    done = {frozenset(outcome.hosts) for outcome in outcomes}
    groups, good = [], list(problem.good)
    for group in design:
        names = [problem.hosts[host] for host in group]
        missing = max(problem.config.min_hosts - len(names), 0)
        fill, good = good[:missing], good[missing:]
        others = [name for name in problem.hosts if name not in names]
        names += fill + others[: missing - len(fill)]
        if frozenset(names) not in done:
            groups.append(tuple(names))
    return tuple(groups)


def _named(problem: Problem, choice: Choice) -> tuple[Group, ...]:
    good, groups = list(problem.good), []
    for group, num in zip(choice.groups, choice.num_fillers, strict=True):
        fill, good = good[:num], good[num:]
        groups.append((*(problem.hosts[host] for host in group), *fill))
    return tuple(groups)
