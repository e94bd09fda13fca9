"""The input of a search: hosts, error rates of tests, and the required confidence.

Input: flags and names of hosts. Output: a validated problem, and its blocks: parts of
at most 128 hosts that are searched independently.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from mjax.health.bisect.bits import ErrorRates

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:%-]*")
_MOST_IN_BLOCK = 128
"""Maximum number of hosts of a block. Its sets are enumerated in milliseconds."""
_BAD_IN_BLOCK = 3.0
"""Maximum expected number of bad hosts of a block. It is well below
`posterior.MOST_BAD`."""
_LEAST_IN_BLOCK = 16
_TESTS_A_HOST = 10
"""Number of tests per host in the default maximum. A search that needs more will not
end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """How to search for bad hosts."""

    prior: float = 0.02
    """Prior probability that a host is bad (not a number of hosts)."""
    link_prior: float = 0.001
    """Prior probability that the link of two hosts is bad (--links)."""
    false_negative: float = 0.0
    """Probability that a test passes although a host in its group is bad."""
    false_positive: float = 0.0
    """Probability that a test fails although no host in its group is bad."""
    confidence: float = 0.99
    """Probability of the answer at which the search stops."""
    min_hosts: int = 1
    """Minimum number of hosts of a test; probably good hosts fill up a group."""
    max_hosts: int | None = None
    """Maximum number of hosts of a test; absent: any number."""
    parallel: int = 1
    """Maximum number of concurrent tests, on different hosts."""
    max_tests: int | None = None
    """Number of tests after which the search gives up; absent: 100 plus 10 per host, or
    with --links 10 per pair."""

    def __post_init__(self) -> None:
        for flag, value in (("--prior", self.prior), ("--link-prior", self.link_prior)):
            if not 0 < value <= 0.5:
                raise ValueError(
                    f"{flag} must be above 0 and at most 0.5, got {value:g}"
                )
        if not 0.5 < self.confidence < 1:
            raise ValueError(
                "--confidence must be above 0.5 and below 1, got "
                f"{self.confidence:g}; 0.99 is usual"
            )
        for flag, number in (
            ("--min-hosts", self.min_hosts),
            ("--max-hosts", self.max_hosts),
            ("--parallel", self.parallel),
            ("--max-tests", self.max_tests),
        ):
            if number is not None and number < 1:
                raise ValueError(f"{flag} must be at least 1, got {number}")
        if self.max_hosts is not None and self.max_hosts < self.min_hosts:
            raise ValueError(
                f"--max-hosts must be at least --min-hosts {self.min_hosts}, got "
                f"{self.max_hosts}"
            )
        _ = self.rates

    @property
    def rates(self) -> ErrorRates:
        """Error rates of a test."""
        return ErrorRates(
            false_negative=self.false_negative, false_positive=self.false_positive
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """A completed test."""

    hosts: tuple[str, ...]
    failed: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """The hosts to search, and those known to be good."""

    hosts: tuple[str, ...]
    """Suspects; neighbours are next to each other."""
    good: tuple[str, ...] = ()
    """Hosts known to be good; they only fill up groups."""
    config: SearchConfig = dataclasses.field(default_factory=SearchConfig)
    least_groups: int = 1
    """Minimum number of groups in each of the first two rounds, so that tests can be
    compared with each other."""

    def __post_init__(self) -> None:
        check_names(self.hosts, self.good)
        least = self.config.min_hosts
        if len(self.hosts) + len(self.good) < least:
            raise ValueError(
                f"--min-hosts {least} needs at least as many hosts, got "
                f"{len(self.hosts)} in --hosts and {len(self.good)} in --good"
            )
        if self.least_groups > 1 and len(self.hosts) < self.least_groups * least:
            raise ValueError(
                "--slow and --same-output compare at least "
                f"{self.least_groups} tests of a round: that takes "
                f"{self.least_groups * least} hosts with --min-hosts {least}, got "
                f"{len(self.hosts)}"
            )

    @property
    def max_tests(self) -> int:
        """Number of tests after which the search gives up."""
        if self.config.max_tests is not None:
            return self.config.max_tests
        return 100 + _TESTS_A_HOST * len(self.hosts)

    @property
    def largest(self) -> int:
        """Maximum number of hosts in a group."""
        given = self.config.max_hosts
        total = len(self.hosts) + len(self.good)
        return total if given is None else min(given, total)


def check_names(hosts: Sequence[str], good: Sequence[str]) -> None:
    """Raise if a name is invalid or a host is named twice.

    Raises:
      ValueError: the message has the name.
    """
    if not hosts:
        raise ValueError("--hosts is empty; name the hosts to search, or --hosts-file")
    for name in (*hosts, *good):
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} is not a valid host name; use letters, digits and . _ - : "
                "%, and no hyphen first"
            )
    twice = [name for name, count in Counter(hosts).items() if count > 1]
    if twice:
        raise ValueError(f"--hosts names {twice[0]} twice")
    both = sorted(set(hosts) & set(good))
    if both:
        raise ValueError(f"{both[0]} is in --hosts and in --good; name it once")


def check_outcomes(problem: Problem, outcomes: Iterable[Outcome]) -> None:
    """Raise for outcomes of hosts that are not part of the problem.

    Raises:
      ValueError: the message has the host.
    """
    known = {*problem.hosts, *problem.good}
    for outcome in outcomes:
        if not outcome.hosts:
            raise ValueError("an outcome has no hosts")
        for name, count in Counter(outcome.hosts).items():
            if name not in known:
                raise ValueError(
                    f"an outcome is of {name}, which is neither in --hosts nor in "
                    "--good; give the hosts with which the plan was made"
                )
            if count > 1:
                raise ValueError(f"an outcome names {name} twice")


def blocks(problem: Problem) -> list[Problem]:
    """Split a problem into parts that are searched independently.

    The error probabilities of the parts add up, so each part gets a share of 1 -
    `--confidence`.
    """
    config, num = problem.config, len(problem.hosts)
    most = int(min(_MOST_IN_BLOCK, max(_LEAST_IN_BLOCK, _BAD_IN_BLOCK / config.prior)))
    needed = config.min_hosts * problem.least_groups
    count = max(1, min(math.ceil(num / most), num // max(needed, 1)))
    if count == 1:
        return [problem]
    inner = dataclasses.replace(config, confidence=1 - (1 - config.confidence) / count)
    sizes = [num // count + (index < num % count) for index in range(count)]
    starts = [sum(sizes[:index]) for index in range(count)]
    # Each known good host fills up one block only: blocks are tested concurrently.
    shares = [problem.good[index::count] for index in range(count)]
    return [
        dataclasses.replace(
            problem,
            hosts=problem.hosts[start : start + size],
            good=share,
            config=inner,
        )
        for start, size, share in zip(starts, sizes, shares, strict=True)
    ]
