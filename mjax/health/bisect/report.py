"""Reports of a search: plans and answers, as text and as JSON.

Input: the state of a search. Output: lines for people, and one object for programs.
"""

import dataclasses
import math
import shlex
from collections.abc import Sequence
from typing import Any

from mjax.health.bisect.links import LinkProgress
from mjax.health.bisect.outcomes import Criteria, as_toml
from mjax.health.bisect.problem import Outcome, Problem
from mjax.health.bisect.runner import command_for
from mjax.health.bisect.search import Progress, Round

_SURPRISING = 1e-3
"""A number of test errors less probable than this is reported. Not measured."""


def assumptions(problem: Problem) -> str:
    """Return a text on the assumptions behind the probabilities."""
    config = problem.config
    return (
        f"{len(problem.hosts)} hosts, each bad with a probability of {config.prior:g} "
        "before any test; a test with a bad host passes with a probability of "
        f"{config.false_negative:g}, a test without one fails with "
        f"{config.false_positive:g}; the search ends at a confidence of "
        f"{config.confidence:g}"
    )


def plan(rounds: Sequence[tuple[int, Round]], template: Sequence[str]) -> str:
    """Return a list of the tests of rounds, as commands if a template is given.

    Args:
      rounds: rounds with their numbers, in order.
      template: command of a test; empty: list only the hosts.
    """
    lines = []
    for number, one in rounds:
        count = len(one.groups)
        tests = "1 test" if count == 1 else f"{count} tests"
        lines.append(f"round {number}, {tests} ({one.reason}):")
        for group in one.groups:
            words = command_for(template, group) if template else [",".join(group)]
            lines.append(f"  {shlex.join(words)}")
    return "\n".join(lines)


def form(rounds: Sequence[tuple[int, Round]], criteria: Criteria) -> str:
    """Return the tests of rounds as an outcomes file to fill in."""
    return "\n".join(as_toml(one.groups, number, criteria) for number, one in rounds)


def answer(progress: Progress, num_tests: int, num_rounds: int) -> str:
    """Return a text with the answer and its probability of error."""
    lines = []
    links = progress.links if isinstance(progress, LinkProgress) else ()
    if progress.verdict == "undecided":
        lines.append(f"undecided: {progress.reason}")
    elif progress.reason:
        lines.append(progress.reason)
    if not progress.bad and not links:
        lines.append("none found")
    for one in progress.bad:
        lines.append(f"bad: {one.host} (probability {one.probability:.4g})")
    for link in links:
        pair = " - ".join(link.hosts)
        lines.append(f"bad link: {pair} (probability {link.probability:.4g})")
    if isinstance(progress, LinkProgress) and progress.bad:
        lines.append("links of bad hosts cannot be judged")
    for one in progress.suspects:
        lines.append(f"doubtful: {one.host} (probability {one.probability:.4g})")
    lines.append(
        "probability that this is not the exact answer: "
        f"{progress.error_probability:.2g}, after {num_tests} tests in {num_rounds} "
        "rounds"
    )
    return "\n".join(lines)


def as_json(
    progress: Progress,
    *,
    rounds: Sequence[tuple[int, Round]],
    num_tests: int,
    num_rounds: int,
    warnings: Sequence[str],
    template: Sequence[str],
) -> dict[str, Any]:
    """Return the answer and the next tests as one JSON object.

    Returns:
      ok (true only if the search has ended and found nothing); verdict ("pending" until
      it has ended); bad, links, suspects; tests, rounds (counts so far);
      error_probability; reason; warnings; next (for each next round: round, reason,
      tests with hosts and command).
    """
    links = progress.links if isinstance(progress, LinkProgress) else ()
    has_ended = not progress.rounds
    return {
        "ok": has_ended and progress.verdict == "none" and not links,
        "verdict": progress.verdict if has_ended else "pending",
        "bad": [dataclasses.asdict(one) for one in progress.bad],
        "links": [dataclasses.asdict(link) for link in links],
        "suspects": [dataclasses.asdict(one) for one in progress.suspects],
        "tests": num_tests,
        "rounds": num_rounds,
        "error_probability": progress.error_probability,
        "reason": progress.reason,
        "warnings": list(warnings),
        "next": [
            {
                "round": number,
                "reason": one.reason,
                "tests": [
                    {
                        "hosts": list(group),
                        "command": command_for(template, group) if template else None,
                    }
                    for group in one.groups
                ],
            }
            for number, one in rounds
        ],
    }


def warnings(
    problem: Problem, outcomes: Sequence[Outcome], progress: Progress
) -> list[str]:
    """Return warnings if more outcomes contradict the answer than the rates allow."""
    links = progress.links if isinstance(progress, LinkProgress) else ()
    bad, pairs = {one.host for one in progress.bad}, {frozenset(x.hosts) for x in links}
    hit = [
        one for one in outcomes if bad & set(one.hosts) or frozenset(one.hosts) in pairs
    ]
    clean = [one for one in outcomes if one not in hit]
    rates, found = problem.config.rates, []
    for tests, errors, rate, what, flag in (
        (hit, sum(not x.failed for x in hit), rates.miss, "passed", "negative"),
        (clean, sum(x.failed for x in clean), rates.alarm, "failed", "positive"),
    ):
        if errors and _at_least(errors, len(tests), rate) < _SURPRISING:
            has = "with" if flag == "negative" else "without"
            found.append(
                f"{errors} of {len(tests)} tests {has} a bad host {what}; these "
                f"contradict the answer and are more than --false-{flag} {rate:g} "
                "allows, so the probability of error above is too low"
            )
    return found


def _at_least(count: int, num: int, rate: float) -> float:
    """Return the probability of at least `count` errors in `num` tests."""
    return sum(
        math.comb(num, k) * rate**k * (1 - rate) ** (num - k)
        for k in range(count, num + 1)
    )
