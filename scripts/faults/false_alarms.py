"""Watch a healthy run for a while; any reported fault is a false alarm.

    python -m scripts.faults.false_alarms --minutes 20

A launch of two hosts trains the `debug` recipe with evaluations and saves. Halfway, an
update changes the number of microbatches, so the step is compiled again. Writes
docs/benchmarks/false_alarms.md and ends with 1 if the launch has reported a hang,
a lost host or a failure; the restart of the update itself does not count.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.evidence import REPOSITORY, Table, commit, write_page
from scripts.faults.launch_faults import XLA_FLAGS
from scripts.faults.launched import Launched

HOSTS = 2
RUN = (
    *("--recipe", "debug", "--model.layers", "2", "--model.window", "16"),
    *("--model.rope", "True"),
    *("--simulate-devices", "1", "--ckpt.every", "20", "--eval.every", "50"),
    *("--steps", "1000000"),
)
UPDATE = ("--batch.microbatches", "2")
ALARMS = ("hang", "failure", "evict", "gave_up")


def update(work_dir: Path) -> None:
    """Update the number of microbatches of the run."""
    words = ["update", "--work-dir", str(work_dir), "--reason", "another step"]
    command = [sys.executable, "-m", "mjax.launch", *words, "--", *UPDATE]
    subprocess.run(command, check=True, cwd=REPOSITORY, capture_output=True)


def main() -> int:
    """Run, watch, write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = XLA_FLAGS
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = str(Path(name) / "cache")
        launched = Launched(Path(name) / "run", HOSTS, 0, [*RUN])
        try:
            launched.wait_for_row(1)
            began_s, half_s = time.monotonic(), args.minutes * 30
            time.sleep(half_s)
            before = launched.last_step()
            update(launched.work_dir)
            launched.wait_for(lambda: launched.generation == 2, "the update")
            launched.wait_for_row(before + 1)
            time.sleep(max(0.0, began_s + 2 * half_s - time.monotonic()))
            steps, lasted_s = launched.last_step(), time.monotonic() - began_s
            launched.stop()
        finally:
            launched.end()
        events = launched.events(*ALARMS)
        starts = [event["data"] for event in launched.events("under_way")]
        saves = len(launched.events("save"))
    alarms = [event for event in events if event["data"].get("cause") != "preempted"]
    table = Table(
        title="A run that is well",
        text=(
            f"On commit {commit()}: {HOSTS} hosts with a rank each, `{' '.join(RUN)}`, "
            "compiled without LLVM's passes. Halfway through, `launch update -- "
            f"{' '.join(UPDATE)}` recompiles the step. The limit of a step is 4 s. An "
            f"alarm is an event of the kinds {', '.join(ALARMS)} that the update does "
            "not explain."
        ),
        header=("minutes", "steps", "saves", "compile s, by generation", "alarms"),
        rows=[
            [
                *(f"{lasted_s / 60:.1f}", str(steps), str(saves)),
                ", ".join(f"{start['spent_s']['compile']:.1f}" for start in starts),
                str(len(alarms)),
            ]
        ],
    )
    command = f"python -m scripts.faults.false_alarms --minutes {args.minutes:g}"
    print(write_page("false_alarms", "False alarms", command, [table]))
    for event in alarms:
        print(event)
    return int(bool(alarms) or len(starts) != 2)


if __name__ == "__main__":
    sys.exit(main())
