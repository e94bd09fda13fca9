"""Measure what progress words, heartbeats and a driver cost a training step.

    python -m scripts.faults.watch_cost --windows 60

The demo recipe trains under a launch of one host. The agent and the driver are
stopped for some steps and continue for some, in turns, so both kinds of steps are of
one process and one compiled program. The marks of the progress word occur in both, so
they are timed separately. Writes docs/benchmarks/watch_cost.md.
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mjax.processes.progress import Phase, Writer
from scripts.evidence import Table, commit, read_metrics, write_page
from scripts.faults.launched import Launched

STEPS, LEFT_OUT = 20, 2
"""Steps of a window, and the number of its first steps that do not count."""
MARKS = 2
"""Number of marks per step: one before its launch, and one after."""
NUM_MARKS = 100_000


def mark_us(folder: Path) -> float:
    """Return the microseconds of one mark."""
    writer = Writer(folder / "word")
    began_s = time.perf_counter()
    for number in range(NUM_MARKS):
        writer.mark(Phase.STEP, number)
    return (time.perf_counter() - began_s) / NUM_MARKS * 1e6


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def watch(folder: Path, windows: int) -> tuple[list[tuple[bool, float]], float]:
    """Return (watched or not, seconds per step) of each window, and the CPU share."""
    num_steps = (windows + 2) * STEPS
    flags = ["--recipe", "demo", "--steps", str(num_steps), "--eval.every", "100000"]
    flags += ["--ckpt.every", "100000", "--log.sample-tokens", "0"]
    launched = Launched(folder / "run", 1, 0, flags, ["--restart.lost-s", "3600"])
    found: list[tuple[bool, float]] = []
    used_s = lasted_s = 0.0
    try:
        launched.wait_for_row(STEPS)
        watchers = [launched.process.pid, launched.agent_pid("host-0")]
        for number in range(windows):
            is_watched = number % 2 == 0
            signal_all(watchers, signal.SIGCONT if is_watched else signal.SIGSTOP)
            first = last_row(launched)["step"]
            began = time.monotonic(), sum(map(cpu_s, watchers))
            while last_row(launched)["step"] < first + STEPS:
                time.sleep(0.02)
            if is_watched:
                lasted_s += time.monotonic() - began[0]
                used_s += sum(map(cpu_s, watchers)) - began[1]
            rows = read_metrics(launched.work_dir)
            steps = range(first + 1 + LEFT_OUT, first + STEPS + 1)
            times = [row["step_s"] for row in rows if row["step"] in steps]
            found.append((is_watched, statistics.median(times)))
        signal_all(watchers, signal.SIGCONT)
    finally:
        launched.end()
    return found, used_s / lasted_s


def signal_all(pids: list[int], number: int) -> None:
    """Send a signal to processes."""
    for pid in pids:
        os.kill(pid, number)


def last_row(launched: Launched) -> dict[str, Any]:
    """Return the last row of the run."""
    return read_metrics(launched.work_dir)[-1]


def main() -> int:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--windows", type=int, default=60)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found, share = watch(Path(name), args.windows)
        mark = mark_us(Path(name))
    watched = [step_s for is_watched, step_s in found if is_watched]
    alone = [step_s for is_watched, step_s in found if not is_watched]
    ratios = sorted(a / b for a, b in zip(watched, alone, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4)
    step_s = statistics.median(alone)
    marks = MARKS * mark * 1e-6 / step_s
    table = Table(
        title="The demo, watched and not",
        text=(
            f"On commit {commit()}: {len(ratios)} pairs of windows of {STEPS} steps, "
            f"without the first {LEFT_OUT} steps of each; a window counts by its "
            "median."
        ),
        header=("what", "value"),
        rows=[
            ["step, not watched, ms", f"{step_s * 1e3:.2f}"],
            ["watched / not watched, median of pairs", f"{middle:.4f}"],
            ["the same, quartiles", f"{low:.4f} to {high:.4f}"],
            ["CPU of agent and driver, share of a core", f"{share:.2%}"],
            ["a mark of the progress word, µs", f"{mark:.2f}"],
            [f"{MARKS} marks, share of a step", f"{marks:.4%}"],
        ],
    )
    command = f"python -m scripts.faults.watch_cost --windows {args.windows}"
    path = write_page("watch_cost", "What it costs to be watched", command, [table])
    print(path.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
