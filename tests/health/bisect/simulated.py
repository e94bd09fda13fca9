"""Simulated tests of groups, for the tests of the search."""

import numpy as np

from mjax.health.bisect.bits import ErrorRates
from mjax.health.bisect.links import advance_links
from mjax.health.bisect.problem import Outcome, Problem, SearchConfig
from mjax.health.bisect.search import Progress, advance

FLAKY = ErrorRates(false_negative=0.1, false_positive=0.1)


def named(num: int) -> tuple[str, ...]:
    return tuple(f"n{index}" for index in range(num))


def problem(num: int, **config: object) -> Problem:
    return Problem(hosts=named(num), config=SearchConfig(**config))  # pyright: ignore


def flaky(num: int, **config: object) -> Problem:
    return problem(num, false_negative=0.1, false_positive=0.1, **config)


def find(
    problem: Problem,
    bad: set[str],
    *,
    seed: int = 0,
    bad_links: frozenset[frozenset[str]] = frozenset(),
    links: bool = False,
    rates: ErrorRates | None = None,
) -> tuple[Progress, list[Outcome], int]:
    """Run a search to its end, with the problem's error rates of tests or with
    `rates`."""
    random = np.random.default_rng(seed)
    rates = rates or problem.config.rates
    outcomes: list[Outcome] = []
    look = advance_links if links else advance
    for num_rounds in range(2000):
        progress = look(problem, outcomes)
        if not progress.rounds:
            return progress, outcomes, num_rounds
        for group in progress.rounds[0].groups:
            is_hit = bool(bad & set(group)) or frozenset(group) in bad_links
            chance = 1 - rates.false_negative if is_hit else rates.false_positive
            failed = bool(random.random() < chance)
            outcomes.append(Outcome(hosts=group, failed=failed))
    raise AssertionError("the search does not end")


def names_of(progress: Progress) -> set[str]:
    return {one.host for one in progress.bad}
