"""Measure on one GPU what the project claims about GPUs.

    python -m scripts.gpu.report --out DIR
    python -m scripts.gpu.report --part correctness --part attention --keep
    python -m scripts.gpu.report --rehearse --out DIR    everything small, on a CPU
    python -m scripts.gpu.report --compile-only          for a described H200

Needs jax for CUDA, flax and optax; tokamax and PyTorch are measured where they are
installed. Each part writes gpu_<part>.md and gpu_<part>.json into DIR, after every case
anew. Ends with 0 if every case has a result, 1 if one failed, 2 on bad input. A case
for which the budget was too short is no failure: run again with --keep.
"""

import argparse
import datetime
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.evidence import BENCHMARKS_DIR, REPOSITORY
from scripts.gpu import pages, supervise
from scripts.gpu.parts import PARTS
from scripts.gpu.setting import Mode, Part, Row

BUDGET_S = 520.0
"""Below nine minutes, with what it takes to start and to end."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    args = _parse(argv)
    mode: Mode = (
        "rehearse" if args.rehearse else "compile" if args.compile_only else "gpu"
    )
    parts = [PARTS[name] for name in dict.fromkeys(args.part or PARTS)]
    budget_s = args.budget_s or (BUDGET_S if mode == "gpu" else 86_400.0)
    deadline = time.time() + budget_s
    try:
        commit = args.commit or find_commit()
        machine = find_machine(mode)
    except ValueError as error:
        return _refuse(str(error))
    if mode == "compile":
        return _compile_only(parts, deadline)
    out = Path(args.out or BENCHMARKS_DIR)
    if mode == "rehearse" and args.out is None:
        out = Path(tempfile.mkdtemp(prefix="gpu-report-"))
    origin = pages.Origin(
        mode=mode,
        commit=commit,
        date=datetime.date.today().isoformat(),
        command=" ".join(["python -m scripts.gpu.report", *argv]),
        machine=machine,
    )
    _say(origin.describe())
    failed = 0
    for part in parts:
        failed += run_part(part, origin, out, deadline=deadline, keep=args.keep)
    _say(f"written to {out}: " + ", ".join(f"gpu_{part.name}.md" for part in parts))
    return int(failed > 0)


def run_part(
    part: Part, origin: pages.Origin, out: Path, *, deadline: float, keep: bool
) -> int:
    """Run the cases of a part that have no row yet; return how many failed."""
    small = origin.mode == "rehearse"
    try:
        cases = part.module.cases(small)
    except Exception as error:  # a part that cannot be imported spoils no other
        _say(f"{part.name}: error: {type(error).__name__}: {error}")
        return 1
    rows = pages.load_rows(out, part, origin) if keep else {}
    rows = {name: row for name, row in rows.items() if name in cases}
    left = {name: case for name, case in cases.items() if name not in rows}
    _say(f"{part.name}: {len(left)} cases to run, {len(rows)} kept")
    count = failed = 0

    def on_row(row: Row) -> None:
        nonlocal count, failed
        count += 1
        failed += row["status"] == "error"
        rows[row["case"]] = row
        _say(f"{part.name} {count}/{len(left)} {progress(row)}")
        pages.write(out, part, origin, rows, small=small)

    supervise.run_cases(part, left, origin.mode, deadline=deadline, on_row=on_row)
    return failed


def _compile_only(parts: Sequence[Part], deadline: float) -> int:
    """Compile every program for the described GPU; print what became of each case."""
    counts = dict.fromkeys(("ok", "error", "skipped", "not run"), 0)

    def on_row(row: Row) -> None:
        counts[row["status"]] += 1
        _say(f"{part.name}: {progress(row)}")

    for part in parts:
        cases = part.module.cases(False)
        supervise.run_cases(part, cases, "compile", deadline=deadline, on_row=on_row)
    _say(", ".join(f"{n} {status}" for status, n in counts.items()))
    return int(counts["error"] > 0)


def progress(row: Row) -> str:
    """Return one line about a row: its case, how it ended, its first numbers."""
    text = f"{row['case']}: {row['status']}"
    if row["status"] != "ok":
        return f"{text}: {row['why']}"
    for field, unit in (("median_ms", "ms"), ("step_ms", "ms"), ("mfu", "MFU")):
        if row.get(field) is not None:
            text += f", {row[field]:.4g} {unit}"
    for label, count in row.get("bytes", {}).items():
        text += f", {label} {count / 2**30:.2f} GiB".replace("  ", " ")
    return f"{text} ({row['seconds']:.0f} s)"


def find_machine(mode: Mode) -> Row:
    """Return what `worker.probe` says of the device that the mode needs.

    Raises:
      ValueError: there is no such device.
    """
    try:
        machine = supervise.probe(mode)
        seen = machine["device_kind"]
    except RuntimeError as error:
        machine, seen = None, f"none ({error})"
    if machine is None or (mode == "gpu" and machine["platform"] != "gpu"):
        raise ValueError(
            f"an NVIDIA GPU that jax can use is needed, and jax sees {seen}. Without "
            "one, gpu_report has --rehearse and --compile-only, tune_attention has "
            "--prune-only and --write-only"
        )
    return machine


def find_commit() -> str:
    """Return the commit that is checked out, marked if files differ from it.

    Raises:
      ValueError: this is no git checkout.
    """
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    except OSError:
        done = None
    if done is None or done.returncode != 0:
        raise ValueError(
            f"{REPOSITORY} is no git checkout, so the commit is not known: give it "
            "with --commit"
        )
    return done.stdout.strip()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_report", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--part",
        action="append",
        choices=PARTS,
        help="run this part; may be given several times; default: all",
    )
    parser.add_argument("--out", help="folder of the files; default: docs/benchmarks")
    parser.add_argument(
        "--budget-s",
        type=positive,
        help="seconds from which on no case is begun, for all parts together; default: "
        f"{BUDGET_S:.0f} on a GPU, else a day",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep good rows of an earlier call with the same commit and device",
    )
    parser.add_argument("--commit", help="to be written down; default: asks git")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--rehearse", action="store_true", help="run everything small on a CPU"
    )
    modes.add_argument(
        "--compile-only", action="store_true", help="compile for a described H200"
    )
    return parser.parse_args(argv)


def positive(text: str) -> float:
    """Read a flag that is a positive, finite number."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be positive and finite, got {text}")
    return number


def _say(text: str) -> None:
    print(text, flush=True)


def _refuse(message: str) -> int:
    print(f"gpu_report: error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
