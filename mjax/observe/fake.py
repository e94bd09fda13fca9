"""`python -m mjax.observe fake`: what explains the time of a step?

    python -m mjax.observe fake --work-dir runs/a [--steps 120] [--out-dir DIR]
                                [--rungs no-saves,fake-data] [--dry-run] ...

Input: the work dir of a run. Output: a folder with short runs that repeat the run,
each with one thing removed (see `rungs`), and a table of the gain of each. The command
names the removed part that explains the time, or says that none does. The run's own
folders are only read. Exit codes: 0 done, 1 some run failed, 2 bad input.

The short runs are started one after the other as `python -m mjax.train`, or as `python
-m mjax.launch` if the run had several processes on this machine. For a run on several
machines only the commands are printed; after you have run them, `--compare-only`
compares their results.
"""

import argparse
import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mjax.cli.flags.standard import ArgumentParser
from mjax.observe import (
    compared_times,
    fake_runs,
    output,
    records,
    run_differences,
    rung_times,
)
from mjax.observe.fake_runs import Plan
from mjax.observe.records import Record
from mjax.observe.rung_times import Compared, Ladder
from mjax.observe.rungs import FIRST, NAMES

STEPS = 120
"""Steps of each short run. A run has 7 blocks of 16 steps, plus the steps left out."""
LIMIT_S = 3600.0
_FAILED = 1
_PAUSING = ("no-saves", "no-evals")


def compare(
    found: Plan, out_dir: Path, failed: Mapping[str, str], least: float
) -> tuple[Ladder, list[str]]:
    """Read the results of the short runs; return their comparison, and problems.

    Raises:
      ValueError: the baseline run has no records.
    """
    read: dict[str, Record] = {}
    why, problems = dict(failed), []
    for name in found.commands:
        if name in why:
            continue
        try:
            read[name] = records.read(out_dir / name, "--out-dir")
        except ValueError as error:
            why[name] = str(error)
            continue
        problems += read[name].problems
        if (read[name].summary or {}).get("exit") != 0:
            why[name] = f"{out_dir / name} did not exit with code 0"
            del read[name]
    ladder = rung_times.compare(found.ladder, read, why, least=least)
    return ladder, [*problems, *_unlike(found.record, read[FIRST])]


def _unlike(run: Record, short: Record) -> list[str]:
    """Describe differences between a run and a short run that should not exist."""
    said = []
    for group in run_differences.groups(run, short):
        names = [*group.differing]
        if group.name == "hosts":
            names = [name for name in names if name == "device"]
        if group.name in ("code", "versions", "environment", "hosts") and names:
            shown = run_differences.shown_names(names)
            said.append(
                f"the short runs differ from the run in {group.name} ({shown}); their "
                "result may not hold for it"
            )
    return said


# ------------------------------------------------------------------------------ output


def as_json(
    args: argparse.Namespace, found: Plan, ladder: Ladder, problems: Sequence[str]
) -> dict[str, Any]:
    """Return the object that --json prints."""
    rows = [
        {**dataclasses.asdict(one), "command": found.commands.get(one.name)}
        for one in ladder.rungs
    ]
    return {
        "format": "mjax-fake",
        "version": 1,
        "work_dir": str(args.work_dir),
        "out_dir": str(args.out_dir),
        "steps": args.steps,
        "least": args.least,
        "drift": ladder.drift,
        "explains": ladder.explains,
        "summary": summary(ladder, args.least),
        "rungs": rows,
        "problems": [*problems],
    }


def summary(ladder: Ladder, least: float) -> str:
    """Describe in one line which rung explains the time of a step."""
    if ladder.explains is not None:
        one = next(one for one in ladder.rungs if one.name == ladder.explains)
        return (
            f"{one.name} explains the most: without {one.less}, a step takes "
            f"{_change(one)}"
        )
    unsure = [one for one in ladder.rungs if one.verdict == "too few steps"]
    if unsure:
        blocks = max(one.block or 0 for one in unsure) * compared_times.FEWEST_BLOCKS
        names = ", ".join(one.name for one in unsure)
        return (
            f"not known: too few steps for {names}; give --steps "
            f"{blocks + compared_times.WARM_UP + 1}"
        )
    drift = abs(ladder.drift or 0.0)
    needed = max(least, 2 * drift)
    return (
        "none of the removed parts explains the time of a step: none gains "
        f"{needed:.0%} of it beyond noise"
    )


def _change(one: Compared) -> str:
    """Describe how much less, or more, time a step takes, with the interval."""
    assert one.gain is not None
    word, sign = ("less", 1) if one.gain >= 0 else ("more", -1)
    if one.gain_low is None or one.gain_high is None:
        return f"{sign * one.gain:.1%} {word}"
    low, high = sorted((sign * one.gain_low, sign * one.gain_high))
    return f"{sign * one.gain:.1%} {word} ({low:.1%} to {high:.1%})"


def page(ladder: Ladder, least: float, steps: int) -> str:
    """Return the table and one line for each rung, for people."""
    head = ["run", "ms a step", "median", "95%", "data ms", "tokens/s", "MFU"]
    rows = [head]
    for one in ladder.rungs:
        if (own := one.measured) is None:
            continue
        mean, median = (f"{of_s * 1e3:.2f}" for of_s in (own.mean_s, own.median_s))
        ends = "-"
        if own.median_low_s is not None and own.median_high_s is not None:
            ends = f"{own.median_low_s * 1e3:.2f}-{own.median_high_s * 1e3:.2f}"
        mfu = "-" if own.mfu is None else f"{own.mfu:.1%}"
        row = [one.name, mean, median, ends, f"{own.data_wait_s * 1e3:.2f}"]
        rows.append([*row, f"{own.tokens_per_s:,.0f}", mfu])
    lines = [*output.aligned(rows, left=1), ""]
    lines += [f"{one.name}: {_line(one, ladder)}" for one in ladder.rungs]
    lines += ["", f"{summary(ladder, least)} ({steps} steps a run)"]
    return "\n".join(map(output.printable, lines)) + "\n"


def _line(one: Compared, ladder: Ladder) -> str:
    """Describe the gain of a rung."""
    if one.measured is None:
        return f"not run: {one.reason}"
    if one.gain is None:
        if one.name == FIRST:
            return "baseline"
        return f"baseline; {ladder.drift or 0.0:+.1%} compared with the first"
    said = f"without {one.less}, a step takes {_change(one)}"
    if one.name in _PAUSING:
        said += ", including the pauses between steps"
    if one.outside_layers is not None:
        return f"{said}; {one.outside_layers:.0%} of it does not depend on the layers"
    return f"{said}; {one.verdict}"


def _print_commands(found: Plan) -> None:
    for rung in found.ladder:
        if rung.name in found.commands:
            print(shlex.join(["python", *found.commands[rung.name]]))
        else:
            print(f"# {rung.name}: {rung.reason}")


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="python -m mjax.observe fake",
        description="Make short runs, each with one thing removed, and compare them.",
    )
    add = parser.add_argument
    add("--work-dir", type=Path, required=True, help="work dir of the run")
    add(
        "--out-dir", type=Path, help="folder for the short runs; default: WORK_DIR-fake"
    )
    add("--steps", type=int, default=STEPS, help=f"steps of each short run ({STEPS})")
    add("--rungs", default=",".join(NAMES), help=f"some of {','.join(NAMES)}")
    add(
        "--least",
        type=float,
        default=rung_times.LEAST,
        help="fraction of a step that a rung must save to explain its time "
        f"({rung_times.LEAST:g})",
    )
    add(
        "--limit-s",
        type=float,
        default=LIMIT_S,
        help=f"limit of each run ({LIMIT_S:g})",
    )
    add("--dry-run", action="store_true", help="only print the commands")
    add("--compare-only", action="store_true", help="compare the runs in --out-dir")
    add("--json", action="store_true", help="print one JSON object")
    add("--out", type=Path, help="also write the JSON object to this file")
    return parser


def _checked(args: argparse.Namespace) -> tuple[str, ...]:
    """Check the flags; return the names of the chosen rungs.

    Raises:
      ValueError: a flag is out of range.
    """
    names = tuple(name for name in args.rungs.split(",") if name)
    for name in names:
        if name not in NAMES:
            raise ValueError(f"--rungs must be some of {', '.join(NAMES)}, got {name}")
    fewest = compared_times.WARM_UP + 2
    if args.steps < fewest:
        raise ValueError(
            f"--steps must be at least {fewest}, got {args.steps}; the first "
            f"{compared_times.WARM_UP} and the last one are left out"
        )
    if not 0 < args.least < 1:
        raise ValueError(f"--least must be above 0 and below 1, got {args.least:g}")
    if not args.limit_s > 0:
        raise ValueError(f"--limit-s must be positive, got {args.limit_s:g}")
    return names


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    args = _parser().parse_args(argv)
    if args.out_dir is None:
        args.out_dir = args.work_dir.with_name(f"{args.work_dir.name}-fake")
    try:
        names = _checked(args)
        output.check_folder(args.work_dir)
        fake_runs.check_out_dir(args.out_dir, args.work_dir, has_runs=args.compare_only)
        found = fake_runs.plan(
            args.work_dir, args.out_dir, steps=args.steps, names=names
        )
        if args.dry_run:
            _print_commands(found)
            return 0
        failed: dict[str, str] = {}
        if found.elsewhere and not args.compare_only:
            print(
                f"{found.elsewhere}; start these commands in the same way as the run, "
                "then repeat this one with --compare-only:\n"
            )
            _print_commands(found)
            return 0
        if not args.compare_only:
            failed = fake_runs.run_all(found, args.out_dir, args.limit_s)
        ladder, problems = compare(found, args.out_dir, failed, args.least)
        problems = [*found.record.problems, *problems]
        content = as_json(args, found, ladder, problems)
        text = json.dumps(content, indent=1) + "\n"
        if args.out is not None:
            output.write(args.out, text)
    except ValueError as error:
        return output.refuse(error)
    output.warn(problems)
    print(text if args.json else page(ladder, args.least, args.steps), end="")
    return (
        _FAILED
        if any(
            o.verdict == "not run" and o.name in found.commands for o in ladder.rungs
        )
        else 0
    )
