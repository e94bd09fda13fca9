"""Measure on one GPU what the project claims about GPUs.

    python -m scripts.gpu.report --out DIR
    python -m scripts.gpu.report --part correctness --part attention --keep
    python -m scripts.gpu.report --rehearse --out DIR    # everything small, on a CPU
    python -m scripts.gpu.report --compile-only          # for a described H200
    python -m scripts.gpu.report --pages-only --out DIR  # rows of another machine

Needs jax for CUDA, flax and optax; tokamax and PyTorch are measured if installed. Each
part writes gpu_<part>.json into DIR after every case, and the page gpu_<part>.md at its
end. Exits with 0 if every case has a result, 1 if one failed, 2 on bad input. A case
that the budget did not reach is not a failure: run again with --keep.
"""

import argparse
import datetime
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mjax.kernels.target import Target
from scripts.evidence import BENCHMARKS_DIR, REPOSITORY
from scripts.gpu import pages, supervise
from scripts.gpu.parts import PARTS
from scripts.gpu.setting import Mode, Part, Row

BUDGET_S = 520.0
"""Time budget: below nine minutes including startup and shutdown."""
_WHY_LENGTH = 200


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    args = _parse(argv)
    mode: Mode = (
        "rehearse" if args.rehearse else "compile" if args.compile_only else "gpu"
    )
    parts = [PARTS[name] for name in dict.fromkeys(args.part or PARTS)]
    budget_s = args.budget_s or (BUDGET_S if mode == "gpu" else 86_400.0)
    # Not time.time(): it jumps when a machine that has just started sets its clock.
    deadline = time.monotonic() + budget_s
    out = Path(args.out or BENCHMARKS_DIR)
    if args.pages_only:
        return _write_pages(parts, out)
    try:
        commit = args.commit or find_commit()
        machine = find_machine(mode)
    except ValueError as error:
        return _refuse(str(error))
    if mode == "compile":
        return _compile_only(parts, deadline)
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
    if mode == "gpu" and generation(machine) != "hopper":
        _say("This is no Hopper GPU: our kernels do not run on it, and have errors.")
    summaries, failed = [], 0
    for part in parts:
        counts = run_part(part, origin, out, deadline=deadline, keep=args.keep)
        failed += counts["error"]
        summaries.append(f"{part.name}: {describe(counts)}")
        if not args.json_only and pages.json_path(out, part).exists():
            failed += _write_pages([part], out)
    _say("\n".join([f"written to {out}:", *summaries]))
    return int(failed > 0)


def stop_by_signal() -> None:
    """Turn SIGTERM into an exception, so that workers are killed first."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)


def run_part(
    part: Part, origin: pages.Origin, out: Path, *, deadline: float, keep: bool
) -> Counter[str]:
    """Run the cases of a part that have no row yet; count their outcomes."""
    try:
        cases = part.module.cases(origin.mode == "rehearse")
    except Exception as error:  # other parts run if one cannot be imported
        _say(f"{part.name}: error: {type(error).__name__}: {error}")
        return Counter(error=1)
    rows = pages.load_rows(out, part, origin) if keep else {}
    rows = {name: row for name, row in rows.items() if name in cases}
    left = {name: case for name, case in cases.items() if name not in rows}
    _say(f"{part.name}: {len(left)} cases to run, {len(rows)} kept")
    counts = Counter(kept=len(rows))

    def on_row(row: Row) -> None:
        counts[row["status"]] += 1
        rows[row["case"]] = row
        # Write to disk first: printing fails if the reader of the output is gone.
        pages.write_rows(out, part, origin, rows)
        if row["status"] != "not run":
            done = counts.total() - counts["kept"]
            _say(f"{part.name} {done}/{len(left)} {progress(row)}")

    supervise.run_cases(part, left, origin.mode, deadline=deadline, on_row=on_row)
    return counts


def _write_pages(parts: Sequence[Part], out: Path) -> int:
    """Write the pages of parts that have rows; return how many could not be written."""
    failed = 0
    for part in parts:
        if not pages.json_path(out, part).exists():
            _say(f"{part.name}: there is no {pages.json_path(out, part)}")
            continue
        try:
            pages.write_page(out, part)
        except Exception as error:  # the rows are on disk, and other parts must run
            _say(f"{part.name}: error: no page: {type(error).__name__}: {error}")
            failed += 1
    return int(failed > 0)


def _compile_only(parts: Sequence[Part], deadline: float) -> int:
    """Compile every program for the described GPU; print the outcome of each case."""
    counts: Counter[str] = Counter()
    seconds = 0.0

    def on_row(row: Row) -> None:
        nonlocal seconds
        counts[row["status"]] += 1
        seconds += row.get("seconds", 0.0)
        _say(f"{part.name}: {progress(row)}")

    for part in parts:
        cases = part.module.cases(False)
        seconds = 0.0
        supervise.run_cases(part, cases, "compile", deadline=deadline, on_row=on_row)
        _say(f"{part.name}: {len(cases)} cases in {seconds:.0f} s")
    _say(describe(counts))
    return int(counts["error"] > 0)


def describe(counts: Counter[str]) -> str:
    """Return the number of cases by outcome."""
    statuses = ("ok", "error", "skipped", "not run", "kept")
    return ", ".join(f"{counts[status]} {status}" for status in statuses)


def progress(row: Row) -> str:
    """Return one line about a row: its case, outcome and first numbers."""
    text = f"{row['case']}: {row['status']}"
    if row["status"] != "ok":
        # The whole text is in the file.
        return f"{text}: {row['why'][:_WHY_LENGTH]}"
    for field, unit in (("median_ms", "ms"), ("step_ms", "ms"), ("mfu", "MFU")):
        if row.get(field) is not None:
            text += f", {row[field]:.4g} {unit}"
    for label, count in row.get("bytes", {}).items():
        text += f", {label} {count / 2**30:.2f} GiB".replace("  ", " ")
    return f"{text} ({row['seconds']:.0f} s)"


def find_machine(mode: Mode) -> Row:
    """Return the answer of `worker.probe` about the device that the mode needs.

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


def generation(machine: Row) -> str:
    """Return the generation of the GPU of a machine."""
    kind = machine["device_kind"]
    return Target(platform=machine["platform"], device_kind=kind).generation


def find_commit() -> str:
    """Return the commit that is checked out, with a mark if files differ from it.

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
    parser.add_argument(
        "--json-only", action="store_true", help="leave the pages to --pages-only"
    )
    parser.add_argument("--commit", help="to be written down; default: asks git")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--rehearse", action="store_true", help="run everything small on a CPU"
    )
    modes.add_argument(
        "--compile-only", action="store_true", help="compile for a described H200"
    )
    modes.add_argument(
        "--pages-only", action="store_true", help="write the pages of --out; no GPU"
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
    stop_by_signal()
    sys.exit(main(sys.argv[1:]))
