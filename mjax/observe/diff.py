"""`python -m mjax.observe diff RUN_A RUN_B`: why does B differ from A?

    python -m mjax.observe diff runs/a runs/b [--json] [--out FILE]

Input: two work dirs; A is the baseline. Output: the first eight questions about a slow
run, each answered in one line from the records of the runs, or with the name of the
missing record; the differences; and the times of each phase. Exit codes: 0 done, 2 bad
input.

Source of the questions: the list for slow runs in Imbue's guide to the infrastructure
of a 70B model (https://imbue.com/research/70b-infrastructure/), in our own words.
"""

import collections
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mjax.cli.flags.standard import ArgumentParser
from mjax.observe import compared_times, output, records, run_differences
from mjax.observe.compared_times import Difference
from mjax.observe.records import Record
from mjax.observe.run_differences import Group, Losses

_FEWEST_STEPS = 20
"""Minimum number of steps for a correlation. With fewer, noise alone reaches 0.5."""
_CLOCKS = 0.01
"""Largest relative difference at which two measurements of a step's time agree. Not
measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diff:
    """Two runs, compared."""

    a: Record
    b: Record
    groups: Sequence[Group]
    losses: Losses
    times: Sequence[Difference]

    @property
    def problems(self) -> tuple[str, ...]:
        """Reading problems of both runs, for people."""
        return self.a.problems + self.b.problems


def diff(path_a: Path, path_b: Path) -> Diff:
    """Compare two runs.

    Raises:
      ValueError: a path is not the work dir of a run, or both are the same.
    """
    a, b = records.read(path_a, "RUN_A"), records.read(path_b, "RUN_B")
    if path_a.resolve() == path_b.resolve():
        raise ValueError(f"RUN_A and RUN_B are both {path_a}; give two runs")
    return Diff(
        a=a,
        b=b,
        groups=run_differences.groups(a, b),
        losses=run_differences.losses(a, b),
        times=compared_times.compare(
            compared_times.phases(a), compared_times.phases(b)
        ),
    )


# ------------------------------------------------------------------------ the questions


def questions(found: Diff) -> list[tuple[str, str]]:
    """Answer the eight questions."""
    answers: list[tuple[str, Callable[[Diff], str]]] = [
        ("Has it worked before?", _worked),
        ("What has changed since?", _changed),
        ("Are the hosts healthy?", _healthy),
        ("Is everything else the same?", _same),
        ("Can it be reproduced?", _reproduced),
        ("What does it correlate with?", _goes_with),
        ("Is it measured correctly?", _measured),
        ("Does it remain with less data, fewer saves, a smaller model?", _with_less),
    ]
    return [(question, answer(found)) for question, answer in answers]


def _worked(found: Diff) -> str:
    said = []
    speeds = [_number(record.summary, "tokens_per_s") for record in (found.a, found.b)]
    for letter, record, speed in zip("AB", (found.a, found.b), speeds, strict=True):
        if record.summary is None:
            said.append(
                f"{letter}: not known, summary.json is missing: it has not ended"
            )
            continue
        exit_code = record.summary.get("exit")
        tokens = "no" if speed is None else f"{speed:,.0f}"
        steps = record.summary.get("steps")
        said.append(
            f"{letter} ended with {exit_code} at step {steps}, {tokens} tokens/s"
        )
    if speeds[0] and speeds[1] is not None:
        said.append(f"B is {speeds[1] / speeds[0] - 1:+.1%}")
    return "; ".join(said)


def _changed(found: Diff) -> str:
    said = [
        f"{group.name} ({run_differences.shown_names([*group.differing])})"
        for group in found.groups
        if group.differing
    ]
    for letter, record in (("A", found.a), ("B", found.b)):
        said += [f"{letter}: {line}" for line in run_differences.changes_within(record)]
    missing = [name for group in found.groups for name in group.missing]
    if missing:
        said.append(f"not known: {', '.join(dict.fromkeys(missing))} is missing")
    return "; ".join(said) or "nothing that is recorded"


def _healthy(found: Diff) -> str:
    return "; ".join(
        f"{letter}: {_health(record)}"
        for letter, record in zip("AB", (found.a, found.b), strict=True)
    )


def _health(record: Record) -> str:
    slow = [
        f"rank {of.header.rank} on {of.header.host}"
        for of in record.files
        for line in of.lines
        if line.event is not None and line.event.severity != "info"
    ]
    said = []
    if slow:
        shown = run_differences.shown_names(_counted(slow))
        said.append(f"warnings in the spans ({shown})")
    if record.events is None:
        said.append(
            "events.jsonl is missing: run under python -m mjax.launch with "
            "--check-command, or python -m mjax.health check on the hosts"
        )
        return ", ".join(said)
    bad = [event for event in record.events if event.severity in ("warning", "error")]
    if bad:
        of = [f"{event.kind} of {event.host or 'the run'}" for event in bad]
        said.append(f"{len(bad)} events ({run_differences.shown_names(_counted(of))})")
    return ", ".join(said) or "no error in events.jsonl"


def _counted(names: Sequence[str]) -> list[str]:
    counts = collections.Counter(names)
    return [
        f"{num} x {name}" if num > 1 else name for name, num in counts.most_common()
    ]


def _same(found: Diff) -> str:
    words = {True: "yes", False: "no", None: "not known"}
    said = ", ".join(f"{group.name} {words[group.is_same]}" for group in found.groups)
    missing = [name for group in found.groups for name in group.missing]
    more = f"; {', '.join(dict.fromkeys(missing))} is missing" if missing else ""
    return said + more


def _reproduced(found: Diff) -> str:
    for letter, record in (("A", found.a), ("B", found.b)):
        if not record.rows:
            return f"not known: metrics.jsonl of {letter} is missing, or has no rows"
    compared = found.losses
    if not compared.num_shared:
        return "not known: the two metrics.jsonl have no step in common"
    if compared.first_step is None:
        return f"losses are the same, bit by bit, in {compared.num_shared} steps"
    first, second = compared.values or (None, None)
    return (
        f"losses differ first at step {compared.first_step}: {first} in A, {second} in "
        f"B; {compared.num_shared} steps are in both"
    )


def _goes_with(found: Diff) -> str:
    series = compared_times.phases(found.b)
    wall = series.pop("step_s", None)
    if wall is None or not found.b.files:
        what = "metrics.jsonl" if wall is None else "spans/"
        return f"not known: {what} of B is missing"
    if len(wall) < _FEWEST_STEPS:
        return f"not known: B has {len(wall)} steps, {_FEWEST_STEPS} are needed"
    with_ = {name: x for name, x in series.items() if len(x) == len(wall)}
    with_["the number of the step"] = np.arange(len(wall), dtype=np.float64)
    strength = {
        name: compared_times.rank_correlation(wall, x) for name, x in with_.items()
    }
    ordered = sorted(strength, key=lambda name: -abs(strength[name]))[:3]
    said = ", ".join(f"{name} {strength[name]:+.2f}" for name in ordered)
    return f"in B the step time correlates with (rank correlation): {said}"


def _measured(found: Diff) -> str:
    said = []
    for letter, record in (("A", found.a), ("B", found.b)):
        off = _clock_difference(record)
        if off is None:
            said.append(f"{letter}: not known, spans/ or metrics.jsonl is missing")
        else:
            fits = "agree" if off <= _CLOCKS else "DO NOT agree"
            said.append(f"{letter}: metrics.jsonl and spans {fits} ({off:.2%})")
    return "; ".join(said)


def _clock_difference(record: Record) -> float | None:
    """Return the largest relative difference of a step's time in metrics and spans.

    None if no step is in both.
    """
    spans_s: dict[int, float] = {}
    for of in record.files:
        if of.header.rank == 0:  # rank 0 writes the metrics
            for line in of.lines:
                for span in line.spans:
                    if span.stream == "step":
                        spans_s[line.step] = (span.end_ns - span.start_ns) / 1e9
    pairs = [
        (own, spans_s[step])
        for step, row in record.rows.items()
        if (own := _number(row, "step_s")) and step in spans_s
    ]
    if not pairs:
        return None
    return max(abs(own / other - 1) if other else 1.0 for own, other in pairs)


def _with_less(found: Diff) -> str:
    if not found.b.files:
        return "not known: spans/ of B is missing"
    total_ns: dict[str, int] = collections.defaultdict(int)
    for of in found.b.files:
        for line in of.lines:
            for span in line.spans:
                if span.stream == "host" and line.step > 0:
                    total_ns[span.kind] += span.end_ns - span.start_ns
    whole_ns = sum(total_ns.values()) or 1
    named = (("data", "waiting for data"), ("ckpt", "saves"), ("eval", "evaluations"))
    parts = ", ".join(f"{name} {total_ns[kind] / whole_ns:.1%}" for kind, name in named)
    return (
        f"of the time between B's first and last step: {parts}; removing a part gains "
        "at most its share. To measure the real gains: python -m mjax.observe fake "
        f"--work-dir {found.b.path}"
    )


def _number(values: Mapping[str, Any] | None, name: str) -> float | None:
    value = (values or {}).get(name)
    return float(value) if isinstance(value, int | float) else None


# ------------------------------------------------------------------------------ output


def as_json(found: Diff) -> dict[str, Any]:
    """Return the object that --json prints."""
    return {
        "format": "mjax-diff",
        "version": 1,
        "a": str(found.a.path),
        "b": str(found.b.path),
        "questions": [
            {"question": question, "answer": answer}
            for question, answer in questions(found)
        ],
        "groups": [
            {
                "name": group.name,
                "same": group.is_same,
                "differing": {n: [*both] for n, both in group.differing.items()},
                "missing": [*group.missing],
            }
            for group in found.groups
        ],
        "losses": dataclasses.asdict(found.losses),
        "times": [dataclasses.asdict(one) for one in found.times],
        "problems": [*found.problems],
    }


def page(found: Diff) -> str:
    """Return the answers and tables for people."""
    lines = [f"A {found.a.path}", f"B {found.b.path}", ""]
    for number, (question, answer) in enumerate(questions(found), start=1):
        lines.append(output.printable(f"{number}. {question} {answer}"))
    rows = [["differs", "name", "A", "B"]]
    rows += [
        [group.name, name, run_differences.shown(a), run_differences.shown(b)]
        for group in found.groups
        for name, (a, b) in group.differing.items()
    ]
    if len(rows) > 1:
        lines += ["", *output.aligned(rows, left=4)]
    rows = [["ms a step", "A", "B", "", "A p95", "B p95", "median", "tail", "block"]]
    for one in found.times:
        times = (one.median_a, one.median_b, one.p95_a, one.p95_b)
        a, b, p95_a, p95_b = (f"{of_s * 1e3:.2f}" for of_s in times)
        change = f"{one.median_b / one.median_a - 1:+.1%}" if one.median_a else "-"
        row = [one.name, a, b, change, p95_a, p95_b, one.median, one.tail]
        rows.append([*row, str(one.block)])
    if len(rows) > 1:
        lines += ["", *output.aligned(rows, left=1)]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    parser = ArgumentParser(
        prog="python -m mjax.observe diff",
        description="Show what differs between two runs, and which phase takes longer.",
    )
    add = parser.add_argument
    add("run_a", metavar="RUN_A", type=Path, help="work dir of the baseline run")
    add(
        "run_b",
        metavar="RUN_B",
        type=Path,
        help="work dir of the run that differs",
    )
    add("--json", action="store_true", help="print one JSON object")
    add("--out", type=Path, help="also write the JSON object to this file")
    args = parser.parse_args(argv)
    try:
        found = diff(args.run_a, args.run_b)
        text = json.dumps(as_json(found), indent=1) + "\n"
        if args.out is not None:
            output.write(args.out, text)
    except ValueError as error:
        return output.refuse(error)
    output.warn(found.problems)
    print(text if args.json else page(found), end="")
    return 0
