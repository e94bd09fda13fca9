"""Show which hosts are slow in which phase: `python -m mjax.observe heatmap`.

Input: the spans of a run. Output: slow hosts and a table of hosts and phases on
stdout, or JSON with --json; a page with --out; and with --exclude a file with the names
of slow hosts. The run is not changed. Exit codes: 0 done, 2 bad input.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mjax.cli import exit_codes
from mjax.cli.flags.standard import ArgumentParser
from mjax.observe.detect.stragglers import Channel, Outlier, Report, find
from mjax.observe.heat_page import Heat, page
from mjax.observe.spans import read_run
from mjax.observe.step_times import StepTimes, step_times

LAST = 1000
"""Number of last steps to read. A slow host that was replaced earlier is ignored."""
ROWS = 40
"""Hosts in the table. That many rows fill one screen."""

PHASES: dict[Channel, str] = {
    "compute": "forward and backward",
    "data": "data",
    "host": "before the step",
    "network": "gradient sync",
    "last": "last in the gradient sync",
}
"""Name of each measure, for people."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    args = _parser().parse_args(argv)
    try:
        _check(args)
        files, problems = read_run(args.work_dir)
        if not files:
            raise ValueError(f"no file of spans can be read: {problems[0]}")
        times = step_times(files, args.last)
        report = report_of(times)
        excluded = None
        if args.exclude is not None:
            excluded = exclude(args.exclude, times, report)
        if args.out is not None:
            args.out.write_text(page(heat_of(times, report)), encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_codes.BAD_INPUT
    for problem in (*problems, *times.problems):
        print(f"warning: {problem}", file=sys.stderr)
    if args.json:
        print(json.dumps(as_json(times, report)))
        return exit_codes.DONE
    print("\n".join(as_text(times, report, args.rows)))
    if excluded is not None:
        print(f"{args.exclude}: {len(excluded)} hosts to leave out")
    if args.out is not None:
        print(f"{args.out}: written")
    return exit_codes.DONE


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="python -m mjax.observe heatmap", description=__doc__)
    add = parser.add_argument
    add("--work-dir", type=Path, required=True, help="work dir of the run")
    add("--json", action="store_true", help="write one JSON object to stdout")
    add("--out", type=Path, help="write a page with the heat map to this file")
    add("--exclude", type=Path, help="add the names of slow hosts to this file")
    add("--last", type=int, default=LAST, help=f"number of last steps to read ({LAST})")
    add("--rows", type=int, default=ROWS, help=f"number of hosts to show ({ROWS})")
    return parser


def _check(args: argparse.Namespace) -> None:
    for name in ("last", "rows"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    for name in ("out", "exclude"):
        path = getattr(args, name)
        if path is not None and not path.parent.is_dir():
            raise ValueError(
                f"--{name} {path}: the folder {path.parent} does not exist; make it "
                "or name another one"
            )


def report_of(times: StepTimes, first: int | None = None) -> Report:
    """Find slow hosts.

    Args:
      times: step times of the run.
      first: use only this many first steps.
    """
    return find(
        times.phase_s[:first],
        times.roles,
        times.layout,
        left_out=times.left_out[:first],
    )


def exclude(path: Path, times: StepTimes, report: Report) -> list[str]:
    """Add the slow hosts to a file, one name per line; return all names in the file.

    Raises:
      ValueError: no host of the run would be left, or the file is not a list of host
        names.
    """
    slow = {times.hosts[each.host] for each in report.outliers}
    before: set[str] = set()
    if path.exists():
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"--exclude {path} is not a list of host names: {error}; "
                "use another file"
            ) from error
        before = {line.strip() for line in lines if line.strip()}
        for name in before:
            if any(c.isspace() or c == "," for c in name):
                raise ValueError(
                    f"--exclude {path} has the line {name!r}; write one host name a "
                    "line, or name another file"
                )
    if slow and not set(times.hosts) - slow - before:
        raise ValueError(
            f"--exclude {path} would leave out all hosts of the run "
            f"({', '.join(sorted(set(times.hosts)))}); repair them instead"
        )
    names = sorted(before | slow)
    path.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    return names


def as_json(times: StepTimes, report: Report) -> dict[str, Any]:
    """Return the object that --json writes."""
    return {
        "steps": [int(times.steps[0]), int(times.steps[-1])],
        "has_stamps": times.has_stamps,
        "usual_s": report.usual_s,
        "outliers": [_outlier(times, each) for each in report.outliers],
        "phases": list(times.phases),
        "hosts": [
            {
                "host": times.hosts[unit],
                "unit": name,
                "excess": [
                    None if np.isnan(value) else round(float(value), 5)
                    for value in report.excess[unit]
                ],
            }
            for unit, name in enumerate(times.units)
        ],
    }


def _outlier(times: StepTimes, found: Outlier) -> dict[str, Any]:
    fields = dataclasses.asdict(found)
    return {
        **fields,
        "host": times.hosts[found.host],
        "unit": times.units[found.host],
        "phase": PHASES[found.channel],
        "ranks": sorted({times.ranks[column] for column in found.ranks}),
        "devices": [times.devices[column] for column in found.ranks],
        "since_step": int(times.steps[found.since_step]),
    }


def says(times: StepTimes, found: Outlier) -> str:
    """Describe a slow host in one line."""
    return (
        f"{found.cause}, {PHASES[found.channel]}: {found.cost:.1%} of a step "
        f"more than its peers ({found.ratio:.2f} times), {found.pattern} since step "
        f"{times.steps[found.since_step]}, confidence {found.confidence:.2f}"
    )


def _usual(times: StepTimes) -> str:
    """Return the name of the quantity that is 100%."""
    return "the usual compute of a step" if times.has_stamps else "a usual step"


def _order(report: Report) -> list[int]:
    """Return the indexes of units: slow ones first, then by decreasing excess."""
    slow = [each.host for each in report.outliers]
    largest = np.nan_to_num(report.excess, nan=-np.inf).max(axis=1)
    return slow + [int(u) for u in np.argsort(-largest, kind="stable") if u not in slow]


def as_text(times: StepTimes, report: Report, most_rows: int) -> list[str]:
    """Return the lines for people."""
    kind = "hosts" if times.units == times.hosts else "processes"
    lines = [
        f"steps {times.steps[0]} to {times.steps[-1]}, {len(times.units)} {kind}, "
        f"{'times of devices (stamps)' if times.has_stamps else 'times of hosts only'}"
    ]
    if not times.has_stamps:
        lines.append(
            "slow GPUs are not visible without stamps, which Hopper and Blackwell GPUs "
            "write by default (--observe.stamps)"
        )
    if len(times.units) < 3:
        lines.append("two processes have no majority: no host is named")
    lines.append("slow:" if report.outliers else "no host is slow")
    for each in report.outliers:
        lines.append(f"  {times.units[each.host]}: {says(times, each)}")
    shown = _order(report)[:most_rows]
    width = max(len(times.units[unit]) for unit in shown)
    lines.append(
        f"more than the peers, in % of {_usual(times)} ({report.usual_s:.3g} s):"
    )
    lines.append(" " * width + "".join(f" {phase:>9}" for phase in times.phases))
    for unit in shown:
        cells = "".join(
            f" {'-' if np.isnan(value) else f'{100 * value:+.1f}':>9}"
            for value in report.excess[unit]
        )
        lines.append(f"{times.units[unit]:<{width}}{cells}")
    if len(times.units) > len(shown):
        lines.append(f"{len(times.units) - len(shown)} more: raise --rows")
    return lines


def heat_of(times: StepTimes, report: Report) -> Heat:
    """Return the input of the page."""
    order = _order(report)
    told = {each.host: says(times, each) for each in report.outliers}
    slow_phases = {each.host: _phases_of(times, each) for each in report.outliers}
    return Heat(
        title=f"Steps {times.steps[0]} to {times.steps[-1]}; 100% is {_usual(times)}, "
        f"{report.usual_s:.3g} s",
        rows=tuple(times.units[unit] for unit in order),
        columns=times.phases,
        percent=100 * report.excess[order],
        told=tuple(told.get(unit, "") for unit in order),
        marked=tuple(slow_phases.get(unit, frozenset()) for unit in order),
    )


def _phases_of(times: StepTimes, found: Outlier) -> frozenset[int]:
    """Return the columns of the slow phase."""
    role = "sync" if found.channel in ("network", "last") else found.channel
    return frozenset(p for p, own in enumerate(times.roles) if own == role)
