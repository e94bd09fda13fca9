"""Show that a killed run continues bitwise, and on another mesh within rounding.

    python -m scripts.faults.resume

Runs the `debug` recipe as a command: once undisturbed; several times killed with
SIGKILL at a random step (chosen by --seed) and started again; and several times stopped
after a checkpoint and continued on another mesh. Writes docs/benchmarks/resume.md and
ends with 1 if a row differs by more than allowed.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mjax.run.metrics import read_computed
from scripts.evidence import (
    REPOSITORY,
    Table,
    largest_difference,
    read_metrics,
    run_training,
    train_command,
    write_page,
)

MESH_BOUND = 1e-5
NUM_STEPS = 60
CKPT_EVERY = 7
MOVE_AT, MOVED_STEPS = 35, 20
"""Step of the checkpoint from which a run continues on another mesh; a multiple of
CKPT_EVERY."""

RUN = (
    *("--recipe", "debug", "--steps", str(NUM_STEPS)),
    *("--ckpt.every", str(CKPT_EVERY), "--ckpt.keep", "100", "--eval.every", "20"),
)
HOME = ("--simulate-devices", "8", "--mesh.tp", "2", "--zero", "2")
MESHES = {
    "dp8": ("--simulate-devices", "8", "--zero", "3"),
    "dp2 x tp4": ("--simulate-devices", "8", "--mesh.tp", "4", "--zero", "1"),
    "dp_shard2 x dp_replicate2 x tp2": (
        *("--simulate-devices", "8", "--mesh.tp", "2", "--mesh.dp-shard", "2"),
        *("--zero", "2"),
    ),
    "one device": ("--simulate-devices", "1", "--zero", "0"),
}


def main() -> int:
    """Run everything, write the page, return 1 if a run differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=4, help="runs that are killed")
    parser.add_argument("--seed", type=int, default=0, help="of the steps of the kills")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = Path(folder) / "undisturbed"
        run_training(*RUN, *HOME, "--work-dir", str(undisturbed))
        rng = random.Random(args.seed)
        steps = sorted(rng.sample(range(2, NUM_STEPS - 2), args.kills))
        kills, all_equal = kill_and_resume(Path(folder), undisturbed, steps)
        moves, worst = move(Path(folder), undisturbed)
    command = f"python -m scripts.faults.resume --kills {args.kills} --seed {args.seed}"
    print(write_page("resume", "Resuming", command, [kills, moves]))
    return int(not (all_equal and worst <= MESH_BOUND))


def kill_and_resume(
    folder: Path, undisturbed: Path, steps: list[int]
) -> tuple[Table, bool]:
    """Kill one run per step; return the table, and whether all rows are the same."""
    expected = read_computed(undisturbed)
    rows, all_equal = [], True
    for step in steps:
        work_dir = folder / f"killed-{step}"
        flags = (*RUN, *HOME, "--work-dir", str(work_dir))
        written = kill_after(step, flags, work_dir)
        saved = newest_step(work_dir)
        run_training(*flags)
        got = read_computed(work_dir)
        num_equal = sum(a == b for a, b in zip(got, expected, strict=False))
        is_equal = got == expected
        all_equal &= is_equal
        verdict = "bitwise equal" if is_equal else "DIFFERENT"
        rows.append(
            [
                str(step),
                str(written),
                str(saved),
                f"{num_equal} of {NUM_STEPS}",
                verdict,
            ]
        )
        print(" | ".join(rows[-1]), flush=True)
    fields = ", ".join(f"`{name}`" for name in expected[-1])
    table = Table(
        title="kill -9 at a random step",
        text=(
            f"Recipe `debug`, {NUM_STEPS} steps, `--ckpt.every {CKPT_EVERY}`, dp4 x "
            "tp2 on 8 simulated devices, `--zero 2`. The process gets SIGKILL as soon "
            "as the row of the drawn step is in metrics.jsonl; then the same command "
            "runs to the end. Every row is compared exactly with that of the "
            f"undisturbed run, in all fields but the timing: {fields}."
        ),
        header=(
            *("killed at row", "rows on disk", "resumed after step", "equal rows"),
            "verdict",
        ),
        rows=rows,
    )
    return table, all_equal


def move(folder: Path, undisturbed: Path) -> tuple[Table, float]:
    """Continue on other meshes; return the table and the largest loss difference."""
    window = range(MOVE_AT + 1, MOVE_AT + MOVED_STEPS + 1)
    expected = [row for row in read_metrics(undisturbed) if row["step"] in window]
    worst, rows = 0.0, []
    for name, flags in MESHES.items():
        work_dir = folder / f"moved to {name}"
        shutil.copytree(undisturbed, work_dir)
        for saved in (work_dir / "checkpoints").iterdir():
            if saved.name.isdigit() and int(saved.name) > MOVE_AT:
                shutil.rmtree(saved)
        run_training(*RUN, *flags, "--work-dir", str(work_dir))
        got = read_metrics(work_dir)
        loss = largest_difference(got, expected, "loss")
        norm = largest_difference(got, expected, "grad_norm")
        worst = max(worst, loss)
        rows.append([name, flags[-1], f"{loss:.1e}", f"{norm:.1e}"])
        print(" | ".join(rows[-1]), flush=True)
    table = Table(
        title="Resume on another mesh",
        text=(
            "The undisturbed run above, cut off after its checkpoint at step "
            f"{MOVE_AT} (dp4 x tp2, `--zero 2`) and continued by the same command with "
            "other mesh flags. The largest relative differences from the undisturbed "
            f"run over the next {MOVED_STEPS} steps; of the loss at most "
            f"{MESH_BOUND:g}: found {worst:.1e}."
        ),
        header=("continued on", "`--zero`", "loss difference", "grad_norm difference"),
        rows=rows,
    )
    return table, worst


def kill_after(step: int, flags: tuple[str, ...], work_dir: Path) -> int:
    """Start a run, kill it when `step` rows are written; return the rows on disk."""
    with subprocess.Popen(
        train_command(*flags),
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        while process.poll() is None and len(read_metrics(work_dir)) < step:
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
        code = process.wait()
    if code != -signal.SIGKILL:
        raise RuntimeError(f"the run ended with {code} before row {step} was seen")
    return len(read_metrics(work_dir))


def newest_step(work_dir: Path) -> int:
    """Return the newest committed step, 0 if there is none."""
    names = [path.name for path in (work_dir / "checkpoints").iterdir()]
    return max((int(name) for name in names if name.isdigit()), default=0)


if __name__ == "__main__":
    sys.exit(main())
