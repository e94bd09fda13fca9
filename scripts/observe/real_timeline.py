"""Check the timeline of a real pipeline run, and the stated error of its clocks.

    python -m scripts.observe.real_timeline

Trains `--recipe debug`, made larger, on four processes with two simulated devices each:
two stages, two replicas, tensor parallelism of two. The clocks of the processes are
shifted, each by its own offset and drift (`scripts/observe/shifted_clocks`). Then it
checks, each against a source that the timeline does not read:

- idle slots that were counted from operations, against the schedule, slot by slot; with
  the schedule of another run the check must fail, without a pipeline it must count 0;
- the executor's own report of each slot (virtual stage and microbatch, by a callback in
  a separate run), against the record of the schedule;
- every arrow of the trace for Perfetto, read back by a parser that shares no code;
- the stated error of the merged clocks, against the true shift, for each rank and step.

Writes docs/benchmarks/observe_timeline.md and docs/figures/timeline_pipeline.png. Ends
with 1 if a check fails. `--read` uses the runs in --work-dir.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.evidence import REPOSITORY, commit
from scripts.observe.processes import Process, coordinated, run

FIRST, STOP, STEPS = 13, 16, 16
"""Numbers of recorded steps and of all steps."""
SHIFTS_NS = (0, 3_000_000_000, -400_000_000, 70_000_000_000_000)
DRIFTS_PPM = (0.0, 50.0, -50.0, 50.0)
"""Drift by rank: clocks that NTP steers stay within the allowed 100 ppm."""
NUM_PROCESSES = len(SHIFTS_NS)
FLAGS = (
    *("--recipe", "debug", "--data.path", "synthetic", "--log.sample-tokens", "0"),
    *("--model.layers", "8", "--model.d-model", "128", "--data.seq-len", "128"),
    *("--model.d-ff", "344"),
    *("--batch.size", "16", "--eval.every", "1000", "--observe.stamps", "True"),
)
PIPELINE = (
    *("--mesh.pp", "2", "--mesh.tp", "2", "--pipeline.chunks", "2"),
    *("--batch.microbatches", "4"),
)
SHIFTED = (
    *("--simulate-devices", "2", "--steps", str(STEPS)),
    *("--profile.steps", f"{FIRST}:{STOP}"),
)
PLAIN = (
    *("--simulate-devices", "4", "--mesh.tp", "2", "--steps", "3"),
    *("--profile.steps", "3:4"),
)
WITNESS = (
    *("--simulate-devices", "4", "--model.d-model", "64", "--data.seq-len", "64"),
    *("--observe.stamps", "False", "--steps", "2"),
)
"""Flags of a smaller run without replicas, which has the same schedule."""
LIMIT_S = 500.0


def run_shifted(folder: Path) -> None:
    """Train on four processes whose clocks are shifted."""
    anchor_ns = time.monotonic_ns()
    (folder / "anchor").write_text(str(anchor_ns))
    inject = REPOSITORY / "scripts" / "observe" / "shifted_clocks"
    flags = (*FLAGS, *PIPELINE, *SHIFTED, "--work-dir", str(folder / "pipeline"))
    flags += (*coordinated(NUM_PROCESSES),)
    run(
        (
            Process(
                log=folder / f"pipeline-{rank}.log",
                flags=(*flags, "--distributed.process-id", str(rank)),
                environment={
                    "PYTHONPATH": f"{inject}:{REPOSITORY}",
                    "CLOCK_SHIFT": f"{SHIFTS_NS[rank]} {DRIFTS_PPM[rank]} {anchor_ns}",
                    "MJAX_HOST": f"node{rank}",
                },
            )
            for rank in range(NUM_PROCESSES)
        ),
        LIMIT_S,
    )


def run_plain(folder: Path) -> None:
    """Train without a pipeline."""
    plain = (*FLAGS, *PLAIN, "--work-dir", str(folder / "plain"))
    run([Process(log=folder / "plain.log", flags=plain)], LIMIT_S)


def run_witness(folder: Path) -> None:
    """Train with an executor that reports each slot."""
    flags = (*FLAGS, *PIPELINE, *WITNESS, "--work-dir", str(folder / "witness"))
    run(
        [
            Process(
                log=folder / "witness.log",
                module=("scripts.observe.real_timeline", "--witness"),
                flags=(str(folder / "witness.jsonl"), "--", *flags),
            )
        ],
        LIMIT_S,
    )


def witness(path: Path, flags: Sequence[str]) -> int:
    """Run the trainer in this process; each slot that runs writes a record."""
    import jax

    from mjax import train
    from mjax.pipeline import tick

    keep, pull = tick.Execution._forward_slot, tick.Execution._backward_slot

    def write(direction: str, *values: Any) -> None:
        row = [int(value) for value in values]
        with path.open("a") as file:
            file.write(json.dumps([direction, *row]) + "\n")

    def wrapped(direction: str, slot: Any) -> Any:
        def run_slot(self: Any, carry: Any, row: Any) -> Any:
            chunk = row[f"{direction}_chunk"]
            place = (row["tick"], self.stage, chunk, row[f"{direction}_microbatch"])
            jax.lax.cond(
                chunk >= 0,
                lambda: jax.debug.callback(write, direction, *place),
                lambda: None,
            )
            return slot(self, carry, row)

        return run_slot

    tick.Execution._forward_slot = wrapped("forward", keep)
    tick.Execution._backward_slot = wrapped("backward", pull)
    return train.main(flags)


def main() -> int:
    """Run, check, write the page; return 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--work-dir", type=Path, default=Path("runs/real_timeline"))
    add("--read", action="store_true", help="the runs are there already")
    add("--run-only", action="store_true", help="check nothing")
    add("--witness", type=Path, help="of this process: the trainer's flags follow --")
    add("flags", nargs="*")
    args = parser.parse_args()
    if args.witness is not None:
        return witness(args.witness, args.flags)
    folder = args.work_dir.resolve()
    if not args.read:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "commit").write_text(commit())
        run_shifted(folder)
        run_plain(folder)
        run_witness(folder)
    if args.run_only:
        return 0
    from scripts.observe.timeline_checks import write

    return write(folder)


if __name__ == "__main__":
    sys.exit(main())
