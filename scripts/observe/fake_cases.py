"""Real runs with a known fault: does `python -m mjax.observe fake` name the cause?

    python -m scripts.observe.fake_cases --out-dir DIR [--cases slow-loader,healthy]
    python -m scripts.observe.fake_cases --out-dir DIR --write

Input: names of cases. Output: for each a short run of the demo recipe, the short runs
that `fake` derives from it, and its report as JSON in DIR/CASE.json; with `--write`
docs/benchmarks/observe_fake.md from these reports. Exits with 0 if each case is
explained by its fault only, and the healthy one by nothing.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.evidence import REPOSITORY, Table, commit, write_page

STEPS = 200
SLEEP_S = 0.2
LIMIT_S = 580.0
_RUNGS = "fake-data,no-saves"
_BASE = (
    *("--recipe", "demo", "--simulate-devices", "1", "--eval.every", "1000"),
    *("--eval.batches", "1", "--log.sample-tokens", "0", "--data.path", "synthetic"),
    *("--batch.size", "4"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A run with one fault."""

    name: str
    fault: str
    flags: tuple[str, ...]
    expected: str | None
    """Rung that must explain it; None if no rung may."""
    sleep_s: float = 0.0
    """Sleep of the loader before each batch."""


CASES = (
    Case(
        name="slow-loader",
        fault=f"the loader sleeps {SLEEP_S} s before each batch",
        flags=("--ckpt.every", "8"),
        expected="fake-data",
        sleep_s=SLEEP_S,
    ),
    Case(
        name="save-each-step",
        fault="a checkpoint is saved after each step (--ckpt.every 1)",
        flags=("--ckpt.every", "1"),
        expected="no-saves",
    ),
    Case(
        name="healthy",
        fault="none; a checkpoint is saved every 8 steps",
        flags=("--ckpt.every", "8"),
        expected=None,
    ),
)


def run(case: Case, out_dir: Path) -> dict[str, Any]:
    """Train, analyse the run, and return the report of `fake`."""
    environment = dict(os.environ)
    if case.sleep_s:
        folder = REPOSITORY / "scripts" / "observe" / "slow_loader"
        paths = [str(folder), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        environment["SLOW_LOADER_S"] = str(case.sleep_s)

    def python(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
        return done.stdout

    work_dir = out_dir / case.name
    flags = [*_BASE, *case.flags, "--steps", "8", "--optim.warmup-steps", "8"]
    python("-m", "mjax.train", *flags, "--work-dir", str(work_dir))
    words = ["--work-dir", str(work_dir), "--steps", str(STEPS), "--rungs", _RUNGS]
    return json.loads(python("-m", "mjax.observe", "fake", *words, "--json"))


def tables(reports: Sequence[tuple[Case, dict[str, Any]]]) -> list[Table]:
    """Return the tables of the page."""
    return [
        Table(
            title="Cause",
            text="Real runs of the demo recipe with --batch.size 4 on one simulated "
            f"device, on commit {commit()}. Each was analysed by `python -m "
            f"mjax.observe fake --rungs {_RUNGS} --steps {STEPS}`; other work ran on "
            "the machine.",
            header=["case", "fault", "must explain it", "explains it", "drift"],
            rows=[
                (
                    case.name,
                    case.fault,
                    case.expected or "nothing",
                    report["explains"] or "nothing",
                    f"{report['drift']:+.1%}",
                )
                for case, report in reports
            ],
        ),
        Table(
            title="Rungs",
            text="Times are those of steps; the gain of no-saves and no-evals counts "
            "the pauses between steps too. Intervals are of 95%, by blocks of steps.",
            header=[
                *("case", "run", "ms a step", "median", "data, ms"),
                *("gain", "p", "verdict"),
            ],
            rows=[
                _row(case, one) for case, report in reports for one in report["rungs"]
            ],
        ),
    ]


def _row(case: Case, one: dict[str, Any]) -> tuple[str, ...]:
    own = one["measured"]
    if own is None:
        return (case.name, one["name"], *[""] * 5, one["reason"])
    names = ("mean_s", "median_s", "data_wait_s")
    mean, median, data = (f"{own[name] * 1e3:.1f}" for name in names)
    if own["median_low_s"] is not None:
        low, high = (own[f"median_{end}_s"] * 1e3 for end in ("low", "high"))
        median += f" ({low:.1f} to {high:.1f})"
    gain, p, verdict = "", "", "to compare with"
    if one["gain"] is not None:
        gain = f"{one['gain']:.1%}"
        if one["gain_low"] is not None:
            gain += f" ({one['gain_low']:.1%} to {one['gain_high']:.1%})"
        p = "" if one["p"] is None else f"{one['p']:.2g}"
        verdict = one["verdict"]
    times = (mean, median, data)
    return (case.name, one["name"], *times, gain, p, verdict)


def main() -> int:
    """Run or write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out-dir", type=Path, required=True)
    parser.add_argument("--cases", default=",".join(case.name for case in CASES))
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    args.out_dir.mkdir(parents=True, exist_ok=True)
    chosen = [case for case in CASES if case.name in args.cases.split(",")]
    reports = []
    for case in chosen:
        path = args.out_dir / f"{case.name}.json"
        if not args.write:
            path.write_text(json.dumps(run(case, args.out_dir), indent=1))
        report = json.loads(path.read_text())
        reports.append((case, report))
        print(f"{case.name}: {report['summary']}")
    if args.write:
        write_page(
            "observe_fake",
            "Short runs with one thing less: is the cause found?",
            "python -m scripts.observe.fake_cases --out-dir DIR --write",
            tables(reports),
        )
    is_right = all(report["explains"] == case.expected for case, report in reports)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
