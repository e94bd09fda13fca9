"""Check that stamps and the profiler measure the same parts of a step.

    python -m scripts.observe.stamp_agreement

Trains `--recipe debug`, made larger, on one CPU device, with stamps and with windows of
the profiler over some steps. In each recorded step both measure its parts by
independent means: callbacks placed by data dependences, and events of XLA's runtime
placed by scope names. Writes docs/benchmarks/stamp_agreement.md; ends with 1 if the
medians of a part differ by more than a tenth.
"""

import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from mjax.observe.spans import read_run
from mjax.observe.windows import folders
from mjax.observe.windows.read import read
from scripts.evidence import Table, write_page

FIRST, STOP = 6, 26
MOST = 0.1
FLAGS = (
    *("--recipe", "debug", "--simulate-devices", "1", "--data.path", "synthetic"),
    *("--model.d-model", "256", "--model.layers", "8", "--batch.size", "16"),
    *("--model.d-ff", "680"),
    *("--observe.stamps", "True", "--log.sample-tokens", "0"),
    *("--steps", str(STOP), "--profile.steps", f"{FIRST}:{STOP}"),
)
STAMPS = {
    "forward": ("forward",),
    "loss, backward, norm": ("backward", "norm"),
}
"""Part of a step -> its spans from stamps."""
PHASES = {
    "forward": ("forward",),
    "loss, backward, norm": ("loss", "backward", "grad_norm"),
}
"""Part of a step -> its phases in a window of the profiler."""


def main() -> int:
    """Write the page; return 1 if a part differs."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mjax.train", *FLAGS, "--work-dir", folder]
        subprocess.run(command, check=True)
        stamped, recorded = _stamped(Path(folder)), _recorded(Path(folder))
    rows, is_far = [], False
    for part in STAMPS:
        ours, theirs = (
            [found[step][part] * 1e3 for step in range(FIRST, STOP)]
            for found in (stamped, recorded)
        )
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        ratio = statistics.median(ours) / statistics.median(theirs)
        is_far |= abs(ratio - 1) > MOST
        rows.append(
            [
                part,
                f"{statistics.median(ours):.1f}",
                f"{statistics.median(theirs):.1f}",
                f"{ratio:.3f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
            ]
        )
    table = Table(
        title="One CPU device",
        text=f"Milliseconds, medians of {STOP - FIRST} recorded steps of "
        f"`{' '.join(FLAGS)}`. On CPU the first stamp after the forward pass comes "
        "before the loss; on a GPU after it. The optimizer ends with the metrics on "
        "the host, in a recorded step after the window: it is not compared.",
        header=("part", "stamps", "profiler", "ratio of medians", "ratios of steps"),
        rows=rows,
    )
    name = "python -m scripts.observe.stamp_agreement"
    print(write_page("stamp_agreement", "Stamps beside the profiler", name, [table]))
    return 1 if is_far else 0


def _stamped(work_dir: Path) -> dict[int, dict[str, float]]:
    """Return the seconds of each part by step, from the spans of the device."""
    files, problems = read_run(work_dir)
    assert not problems, problems
    found: dict[int, dict[str, float]] = {}
    for line in files[0].lines:
        spans: dict[str, float] = defaultdict(float)
        for span in line.spans:
            if span.stream == "device:0":
                spans[span.name] += (span.end_ns - span.start_ns) / 1e9
        found[line.step] = {
            part: sum(spans[name] for name in names) for part, names in STAMPS.items()
        }
    return found


def _recorded(work_dir: Path) -> dict[int, dict[str, float]]:
    """Return the seconds of each part by step, from the windows of the profiler.

    Idle time counts towards the next part.
    """
    found: dict[int, dict[str, float]] = {}
    for folder in folders.find(work_dir)[0]:
        reading = read(folder)
        events = reading.by_device[0]
        part_of = {phase: part for part, names in PHASES.items() for phase in names}
        ends_ns: dict[str, float] = {}
        for placed in events:
            part = part_of.get(placed.phase, "")
            ends_ns[part] = max(ends_ns.get(part, 0.0), placed.event.stop_ns)
        begin_ns = min(placed.event.start_ns for placed in events)
        seconds = {}
        for part in PHASES:
            seconds[part] = (ends_ns[part] - begin_ns) / 1e9
            begin_ns = ends_ns[part]
        found[reading.window.step] = seconds
    return found


if __name__ == "__main__":
    sys.exit(main())
