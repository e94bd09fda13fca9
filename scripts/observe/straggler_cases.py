"""Name the slow hosts of generated runs, and write the page.

    python -m scripts.observe.straggler_cases --first 0 --num 20
    python -m scripts.observe.straggler_cases --report
    python -m scripts.observe.straggler_cases --figure

Input: seeds of `tests.observe.synthetic_stragglers`, or with --report the reported
ones. Output: precision and recall; with --report docs/benchmarks/observe_stragglers.md.
The same figures are given for a simple rule. It gets the number of slow hosts, and
names as many hosts: those with the longest median forward and backward time.
"""

import argparse
import collections
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mjax.observe.detect.stragglers import Outlier
from mjax.observe.heat_page import Heat, svg
from scripts.evidence import REPOSITORY, Table, write_page
from tests.observe import synthetic_severity as severity
from tests.observe.detect.generated_runs import CAUSES, detect
from tests.observe.synthetic_stragglers import (
    HOST_KINDS,
    KINDS,
    NUM_SLOW,
    PHASES,
    HostKind,
    Kind,
    Stragglers,
    by_host,
    make,
)

_FAULTS: Mapping[HostKind, str] = {
    "compute": "slow host",
    "throttled": "GPUs throttled from time to time",
    "nic": "slow network card",
    "loader": "slow data loader",
    "one_gpu": "one slow GPU",
    "hog": "another program takes CPU time, so that threads are dispatched late",
}
_LEGEND = "; ".join(
    f"`{kind}`: {text} ({' or '.join(CAUSES[kind])})" for kind, text in _FAULTS.items()
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One run, its injected faults, and the result."""

    seed: int
    kind: Kind
    slow: dict[int, str]
    """Kind of each slow host."""
    found: dict[int, Outlier]
    simple: set[int]

    @property
    def right(self) -> int:
        """Number of slow hosts that were named."""
        return len(self.slow.keys() & self.found.keys())


def case(kind: Kind, seed: int) -> Case:
    """Generate a run and look for its slow hosts."""
    run = make(kind, seed)
    compute_s = run.phase_s[:, :, 1] + run.phase_s[:, :, 2]
    longest = np.nanmedian(by_host(run.layout, compute_s), axis=(0, 2))
    return Case(
        seed=seed,
        kind=kind,
        slow={each.host: each.kind for each in run.truth.slow_hosts},
        found={each.host: each for each in detect(run).outliers},
        simple=set(np.argsort(-longest)[:NUM_SLOW].tolist()),
    )


def tables(cases: list[Case]) -> list[Table]:
    """Return the tables of the page."""
    slow = [each for each in cases if each.kind == "slow"]
    clean = [each for each in cases if each.kind == "clean"]
    num_slow = sum(len(each.slow) for each in slow)
    right = sum(each.right for each in slow)
    named = sum(len(each.found) for each in slow)
    simple = sum(len(each.simple & each.slow.keys()) for each in slow)
    false = sum(len(each.found) for each in clean)
    confusion = collections.Counter(
        (kind, each.found[host].cause if host in each.found else "missed")
        for each in slow
        for host, kind in each.slow.items()
    )
    causes = sorted({cause for _, cause in confusion})
    agrees = sum(
        number for (kind, cause), number in confusion.items() if cause in CAUSES[kind]
    )
    all_named = (
        named,
        right,
        f"{right / max(named, 1):.3f}",
        f"{right / num_slow:.3f}",
    )
    rule = (len(slow) * NUM_SLOW, simple)
    return [
        Table(
            title="Slow hosts",
            text=f"{len(slow)} runs of 128 hosts, 1,024 ranks, 13 slow hosts each, and "
            f"{len(clean)} runs without a slow host. Target: precision and recall of "
            "at least 0.95. The simple rule names the 13 hosts with the longest "
            "forward and backward time.",
            header=(
                "",
                "slow",
                "named",
                "right",
                "precision",
                "recall",
                "named in clean runs",
            ),
            rows=[
                ("detector", str(num_slow), *map(str, all_named), str(false)),
                (
                    *("simple rule", str(num_slow), *map(str, rule)),
                    *(f"{simple / rule[0]:.3f}", f"{simple / num_slow:.3f}"),
                    str(len(clean) * NUM_SLOW),
                ),
            ],
        ),
        Table(
            title="Causes",
            text=f"The cause named for each slow host: {agrees} of {num_slow} are "
            f"right. Injected faults, and the right cause of each: {_LEGEND}. With "
            "tensor parallelism inside a host, one slow GPU looks like a slow host.",
            header=("injected", *causes),
            rows=[
                (kind, *(str(confusion[kind, cause]) for cause in causes))
                for kind in HOST_KINDS
            ],
        ),
    ]


def draw(run: Stragglers) -> Path:
    """Draw the slow hosts of a run, and the next slowest ones, into docs/figures."""
    report = detect(run)
    slow = {each.host: each for each in report.outliers}
    largest = np.nan_to_num(report.excess).max(axis=1)
    order = [*slow, *(int(h) for h in np.argsort(-largest) if int(h) not in slow)]
    columns = {"compute": {1, 2}, "data": {0}, "network": {4}}
    heat = Heat(
        title="",
        rows=tuple(
            f"node{h:03d}: {slow[h].cause}" if h in slow else f"node{h:03d}"
            for h in order
        ),
        columns=PHASES,
        percent=100 * report.excess[order],
        told=tuple(slow[h].cause if h in slow else "" for h in order),
        marked=tuple(
            frozenset(columns[slow[h].channel] if h in slow else ()) for h in order
        ),
    )
    path = REPOSITORY / "docs" / "figures" / "heatmap.svg"
    path.write_text(svg(heat, most_rows=24), encoding="utf-8")
    return path


def main() -> None:
    """Run the cases of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=severity.TUNING_SEEDS[0])
    parser.add_argument("--num", type=int, default=10)
    parser.add_argument("--report", action="store_true", help="reported seeds")
    parser.add_argument("--figure", action="store_true", help="of the first seed")
    args = parser.parse_args()
    if args.figure:
        print(draw(make("slow", args.first)))
        return
    seeds = range(args.first, args.first + args.num)
    if args.report:
        seeds = severity.STRAGGLER_REPORT_SEEDS
    cases = []
    for kind in KINDS:
        for seed in seeds:
            each = case(kind, seed)
            cases.append(each)
            for host in each.slow.keys() ^ each.found.keys():
                print(kind, seed, host, each.slow.get(host), each.found.get(host))
    command = "python -m scripts.observe.straggler_cases --report"
    for table in tables(cases):
        print(table.title, table.header, *table.rows, sep="\n")
    if args.report:
        write_page(
            "observe_stragglers", "Slow hosts of generated runs", command, tables(cases)
        )
    _print_weakest(cases)


def _print_weakest(cases: list[Case]) -> None:
    """Report how close the named slow hosts are to the limits."""
    found = [e.found[h] for e in cases for h in e.slow.keys() & e.found.keys()]
    for channel in ("compute", "data", "network"):
        some = [each for each in found if each.channel == channel]
        print(
            f"{channel}: at least {min(each.cost for each in some):.3f} of a step, "
            f"z {min(each.z for each in some):.1f}, "
            f"confidence {min(each.confidence for each in some):.3f}"
        )


if __name__ == "__main__":
    main()
