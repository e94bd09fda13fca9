"""Check that group testing names the bad hosts, and count its tests.

    python -m scripts.health.bisect_cases [--quick]

Simulates tests that sometimes give the wrong answer, with fixed seeds, and runs each
search to its end. The search gets the prior probability of a bad host, never the number
of bad hosts. Then it tests eight real processes, one of them slow and one wrong, and
replays training jobs, in which one host changes the computed bits. Writes
docs/benchmarks/bisect.md; 25 minutes on one core, 4 with --quick (which writes
nothing).
"""

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mjax.health.bisect import many, report
from mjax.health.bisect.bits import ErrorRates, least_tests
from mjax.health.bisect.command import main as bisect
from mjax.health.bisect.problem import Problem, SearchConfig
from scripts.evidence import Table, write_page
from tests.health.bisect.simulated import find, names_of

SURE, FLAKY = ErrorRates(), ErrorRates(false_negative=0.1, false_positive=0.1)
_SEED = 20261123
Bad = frozenset[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A set of searches with the same parameters."""

    name: str
    num_hosts: int
    bad: Sequence[Bad]
    """The set of bad hosts of each search."""
    rates: ErrorRates = SURE
    """True error rates of the tests."""
    stated: ErrorRates | None = None
    """Error rates that the search assumes; None uses the true ones."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the search other than the error rates."""

    @property
    def problem(self) -> Problem:
        """Arguments of the search."""
        stated = self.stated or self.rates
        rates = dataclasses.asdict(stated)
        return Problem(
            hosts=_hosts(self.num_hosts), config=SearchConfig(**rates, **self.options)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Results of the searches of a case."""

    case: Case
    exact: tuple[bool, ...]
    tests: tuple[int, ...]
    rounds: tuple[int, ...]
    stated_error: tuple[float, ...]
    warned: int
    """Number of searches that warned that tests err more often than assumed."""
    cpu_s: float


def measure(case: Case) -> Result:
    """Search once for each set of bad hosts."""
    problem, begun_s = case.problem, time.process_time()
    exact, tests, rounds, errors, warned = [], [], [], [], 0
    for number, bad in enumerate(case.bad):
        found, outcomes, num_rounds = find(
            problem, set(bad), seed=_SEED + number, rates=case.rates
        )
        exact.append(names_of(found) == bad and found.verdict != "undecided")
        tests.append(len(outcomes))
        rounds.append(num_rounds)
        errors.append(found.error_probability)
        warned += bool(report.warnings(problem, outcomes, found))
    cpu_s = time.process_time() - begun_s
    print(f"{case.name}: {sum(exact)} of {len(exact)}, {cpu_s:.0f} s", file=sys.stderr)
    return Result(
        case=case,
        exact=tuple(exact),
        tests=tuple(tests),
        rounds=tuple(rounds),
        stated_error=tuple(errors),
        warned=warned,
        cpu_s=cpu_s,
    )


def _hosts(num: int) -> tuple[str, ...]:
    return tuple(f"n{index}" for index in range(num))


def drawn(num_hosts: int, num_bad: int, count: int) -> list[Bad]:
    """Draw sets of bad hosts; the sizes determine the seed."""
    random, hosts = (
        np.random.default_rng((_SEED, num_hosts, num_bad)),
        _hosts(num_hosts),
    )
    return [
        frozenset(hosts[i] for i in random.choice(num_hosts, num_bad, replace=False))
        for _ in range(count)
    ]


def _by_prior(num_hosts: int, prior: float, count: int) -> list[Bad]:
    random, hosts = np.random.default_rng((_SEED, num_hosts)), _hosts(num_hosts)
    draws = random.random((count, num_hosts)) < prior
    return [frozenset(hosts[i] for i in np.flatnonzero(row)) for row in draws]


def _bounded(result: Result) -> tuple[str, ...]:
    """Return a row of the table of the required searches, with its bound.

    All searches of the case have the same number of bad hosts.
    """
    case, num_bad = result.case, len(result.case.bad[0])
    bound = least_tests(case.num_hosts, num_bad, case.rates)
    over = sum(num > 3 * bound for num in result.tests)
    return (
        *_row(result),
        f"{bound:.1f}",
        f"{statistics.mean(result.tests) / bound:.2f}",
        f"{max(result.tests) / bound:.2f}",
        str(over),
    )


def _row(result: Result) -> tuple[str, ...]:
    right, num = sum(result.exact), len(result.exact)
    return (
        result.case.name,
        f"{right} of {num} ({right / num:.2%})",
        f"{statistics.mean(result.stated_error):.2%}",
        f"{statistics.mean(result.tests):.1f}",
        str(max(result.tests)),
        f"{statistics.mean(result.rounds):.1f}",
    )


_HEADER = (
    "searches",
    "exact",
    "error stated",
    "tests, mean",
    "largest",
    "rounds, mean",
)
_BOUND_HEADER = ("bound", "mean / bound", "largest / bound", "above 3 x bound")


def required(scale: int) -> Table:
    """Return the table of the required searches."""
    singles = [frozenset({host}) for host in _hosts(48)]
    pairs = [frozenset(pair) for pair in itertools.combinations(_hosts(16), 2)]
    only_misses = ErrorRates(false_negative=0.1)
    three = drawn(96, 3, 1000 // scale)
    cases = [
        Case(name="each host of 48", num_hosts=48, bad=singles),
        Case(name="each pair of 16", num_hosts=16, bad=pairs),
        Case(name="3 of 96, 10% flaky both ways", num_hosts=96, bad=three, rates=FLAKY),
        Case(
            name="3 of 96, a bad host passes 10%",
            num_hosts=96,
            bad=three[: len(three) // 2],
            rates=only_misses,
        ),
        Case(
            name="each host of 48, 10% both ways, 10 times",
            num_hosts=48,
            bad=singles * max(1, 10 // scale),
            rates=FLAKY,
        ),
        Case(
            name="each pair of 16, 10% both ways, 5 times",
            num_hosts=16,
            bad=pairs * max(1, 5 // scale),
            rates=FLAKY,
        ),
    ]
    return Table(
        title="The bad hosts, by tests of groups",
        text="Exact: the set that is named is the set of bad hosts, no host more or "
        "less. Prior 2% a host, confidence 99%, one test at a time after rows and "
        "columns. Bound: log2 of the number of sets of that size, divided by the "
        "capacity of a test (0.531 bits at 10% both ways). A search does not know the "
        "size, so its own bound is higher. A round is what runs at the same time.",
        header=(*_HEADER, *_BOUND_HEADER),
        rows=[_bounded(measure(case)) for case in cases],
    )


def other_counts(scale: int) -> Table:
    """Return the table of other numbers of bad hosts, and other priors."""
    rows = []
    for prior in (0.01, 0.02, 0.05):
        for num_bad in range(5):
            case = Case(
                name=f"{num_bad} of 96, prior {prior:.0%}",
                num_hosts=96,
                bad=drawn(96, num_bad, 200 // scale),
                rates=FLAKY,
                options={"prior": prior},
            )
            result = measure(case)
            bounded = _bounded(result) if num_bad else (*_row(result), "0", "", "", "")
            rows.append(bounded)
    return Table(
        title="The number of bad hosts is not known",
        text="10% flaky both ways, confidence 99%. None of 96 is the null case: the "
        "answer is `none found`. 96 hosts with a prior of 5% are searched in two parts "
        "of 48.",
        header=(*_HEADER, *_BOUND_HEADER),
        rows=rows,
    )


def calibration(scale: int) -> Table:
    """Return the table of assumed and true error rates."""
    truth = _by_prior(96, 0.02, 600 // scale)
    worse = ErrorRates(false_negative=0.25, false_positive=0.25)
    rows = []
    for name, options, rates, stated in (
        ("confidence 90%", {"confidence": 0.9}, FLAKY, None),
        ("confidence 99%", {}, FLAKY, None),
        ("tests err in 25%, 10% is stated", {}, worse, FLAKY),
        ("tests err in 10%, 0 is stated", {}, FLAKY, SURE),
    ):
        count = len(truth) if stated is None else len(truth) // 4
        case = Case(
            name=name,
            num_hosts=96,
            bad=truth[:count],
            rates=rates,
            stated=stated,
            options=options,
        )
        result = measure(case)
        wrong = 1 - statistics.mean(result.exact)
        rows.append(
            (
                name,
                str(count),
                f"{statistics.mean(result.stated_error):.2%}",
                f"{wrong:.2%} +- {math.sqrt(wrong * (1 - wrong) / count):.2%}",
                f"{result.warned / count:.1%}",
            )
        )
    return Table(
        title="Is the stated probability of error the real one?",
        text="96 hosts, each bad with a probability of 2%, as the search is told. Real "
        "errors with their standard error. Warned: searches that said that their "
        "outcomes contradict the answer more often than tests are stated to err.",
        header=("searches", "number", "error stated", "wrong", "warned"),
        rows=rows,
    )


def larger(scale: int) -> Table:
    """Return the table of other ways to test."""
    few = max(2, 100 // scale)
    cases = [
        ("3 of 96, 4 tests at once", 96, drawn(96, 3, few), FLAKY, {"parallel": 4}),
        ("3 of 96, at least 4 hosts", 96, drawn(96, 3, few), FLAKY, {"min_hosts": 4}),
        (
            "3 of 96, exactly 8 hosts",
            96,
            drawn(96, 3, few),
            FLAKY,
            {"min_hosts": 8, "max_hosts": 8},
        ),
        ("8 of 96", 96, drawn(96, 8, few // 4 or 1), FLAKY, {}),
        ("30 of 96", 96, drawn(96, 30, few // 4 or 1), FLAKY, {}),
        ("all of 96", 96, drawn(96, 96, few // 4 or 1), FLAKY, {}),
        ("all of 96, no errors", 96, drawn(96, 96, 1), SURE, {}),
        (
            "12 of 1,250, 32 tests at once",
            1250,
            drawn(1250, 12, max(1, few // 20)),
            FLAKY,
            {"parallel": 32, "prior": 0.01},
        ),
    ]
    results = [
        measure(Case(name=name, num_hosts=n, bad=bad, rates=rates, options=options))
        for name, n, bad, rates, options in cases
    ]
    alone = _one_by_one(few)
    return Table(
        title="Other tests, and many bad hosts",
        text="10% flaky both ways unless stated. More than about 10 bad hosts are "
        "found one by one. `each host alone` is the null model: no groups, each host "
        "is tested until its own probability is high enough.",
        header=_HEADER,
        rows=[*map(_row, results), alone],
    )


def _one_by_one(count: int) -> tuple[str, ...]:
    """Find 3 bad hosts of 96 without testing groups."""
    tests, exact, rounds, errors = [], [], [], []
    for number, bad in enumerate(drawn(96, 3, count)):
        random = np.random.default_rng(_SEED + number)
        is_bad = np.array([host in bad for host in _hosts(96)])
        failed, passed = np.zeros(96, int), np.zeros(96, int)
        turns = 0
        while True:
            found = many.judge(failed, passed, FLAKY)
            tested = failed + passed > 0
            if tested.all() and found.error <= 0.01:
                break
            again, turns = many.doubtful(found, tested, 0.01), turns + 1
            fails = random.random(len(again)) < np.where(is_bad[again], 0.9, 0.1)
            failed[again] += fails
            passed[again] += ~fails
        tests.append(int((failed + passed).sum()))
        exact.append(bool((found.bad == is_bad).all()))
        rounds.append(turns)
        errors.append(found.error)
    case = Case(name="3 of 96, each host alone", num_hosts=96, bad=drawn(96, 3, count))
    return _row(
        Result(
            case=case,
            exact=tuple(exact),
            tests=tuple(tests),
            rounds=tuple(rounds),
            stated_error=tuple(errors),
            warned=0,
            cpu_s=0.0,
        )
    )


def links(scale: int) -> Table:
    """Return the table of bad links."""
    rows = []
    for rates, name in ((SURE, "no errors"), (FLAKY, "10% flaky both ways")):
        problem = Case(name="", num_hosts=16, bad=(), rates=rates).problem
        for num_links, num_bad in ((0, 0), (1, 0), (2, 1), (0, 2)):
            rows.append(_links_row(problem, name, num_links, num_bad, 50 // scale))
    return Table(
        title="Bad links, by tests of pairs",
        text="16 hosts, 120 pairs, in rounds of 8 disjoint pairs; prior 2% a host and "
        "0.1% a link, confidence 99%. Exact: the bad hosts and the bad links between "
        "good hosts, no more and no less. The error is stated over all cases that the "
        "prior expects; most have no bad link, and a bad link is missed more often.",
        header=("hosts and links", *_HEADER[1:]),
        rows=rows,
    )


def _links_row(
    problem: Problem, name: str, num_links: int, num_bad: int, count: int
) -> tuple[str, ...]:
    exact, tests, rounds, errors = [], [], [], []
    for number in range(max(1, count)):
        random = np.random.default_rng((_SEED, num_links, num_bad, number))
        hosts = [problem.hosts[i] for i in random.permutation(16)]
        bad, good = set(hosts[:num_bad]), hosts[num_bad:]
        bad_links = frozenset(
            frozenset(good[2 * i : 2 * i + 2]) for i in range(num_links)
        )
        found, outcomes, turns = find(
            problem, bad, seed=_SEED + number, bad_links=bad_links, links=True
        )
        named = {frozenset(link.hosts) for link in getattr(found, "links", ())}
        exact.append(names_of(found) == bad and named == bad_links)
        tests.append(len(outcomes))
        rounds.append(turns)
        errors.append(found.error_probability)
    return (
        f"{num_bad} bad hosts, {num_links} bad links, {name}",
        f"{sum(exact)} of {len(exact)}",
        f"{statistics.mean(errors):.2%}",
        f"{statistics.mean(tests):.1f}",
        str(max(tests)),
        f"{statistics.mean(rounds):.1f}",
    )


def real() -> Table:
    """Return the table of runs with real processes."""
    python, hosts = sys.executable, ("--hosts", *_hosts(8))
    group_test = (python, "-m", "scripts.health.group_test", "--hosts", "{hosts}")
    pairs = ("--min-hosts", "2", "--max-hosts", "2")
    replay = (
        *(python, "-m", "mjax.health.bisect.replay", "--"),
        *(python, "-m", "scripts.health.corrupt_job", "{hosts}", "{num}", "{work_dir}"),
    )
    at_once = ("--parallel", "4")
    timed = ("--slow", "3", "--min-hosts", "2", *at_once)
    cases: list[tuple[str, dict[str, str], tuple[str, ...], tuple[str, ...]]] = [
        ("n2 slow, n5 wrong", {"SLOW": "n2", "WRONG": "n5"}, timed, group_test),
        ("none", {}, timed, group_test),
        (
            "n6 computes other bits",
            {"CORRUPT": "n6"},
            ("--same-output", *pairs),
            replay,
        ),
        ("none", {}, ("--same-output", *pairs), replay),
    ]
    rows = []
    for name, faults, words, command in cases:
        found = _run_real(faults, (*words, *hosts, "--", *command))
        shown = ", ".join(one["host"] for one in found["bad"]) or "none found"
        test = "training job, compared bitwise" if command is replay else "group_test"
        rows.append(
            (
                test,
                name,
                shown,
                f"{found['error_probability']:.1g}",
                str(found["tests"]),
                str(found["rounds"]),
            )
        )
        print(rows[-1], file=sys.stderr)
    return Table(
        title="Real processes",
        text="8 hosts, each a process of `scripts/health/group_test.py`: fixed "
        "arithmetic, then checksums around a ring. Or, as a test of a group, 3 steps "
        "of `--recipe debug` on as many simulated devices as it has hosts. Groups with "
        "the bad host take a learning rate that differs in its last bit.",
        header=("test", "bad", "named", "error stated", "tests", "rounds"),
        rows=rows,
    )


def _run_real(faults: dict[str, str], words: Iterable[str]) -> dict:
    """Run the command with hosts that have faults; return its answer."""
    changed = {f"{kind}_HOSTS": hosts for kind, hosts in faults.items()}
    before = dict(os.environ)
    os.environ.update(changed)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            bisect(["--run", "--json", *words])
    finally:
        os.environ.clear()
        os.environ.update(before)
    return json.loads(printed.getvalue())


def main(argv: Sequence[str] | None = None) -> int:
    """Run all searches and write the page."""
    parser = argparse.ArgumentParser(prog="python -m scripts.health.bisect_cases")
    parser.add_argument("--quick", action="store_true", help="a tenth; writes nothing")
    args = parser.parse_args(argv)
    parts: list[Callable[[int], Table]] = [
        required,
        other_counts,
        calibration,
        larger,
        links,
    ]
    begun_s = time.process_time()
    tables = [part(10 if args.quick else 1) for part in parts]
    spent_s = time.process_time() - begun_s
    print(f"simulated in {spent_s:.0f} s of CPU", file=sys.stderr)
    tables.append(real())
    if args.quick:
        for table in tables:
            print(table.title, *map(" | ".join, (table.header, *table.rows)), sep="\n")
        return 0
    command = "python -m scripts.health.bisect_cases"
    print(write_page("bisect", "Bad hosts by tests of groups", command, tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
