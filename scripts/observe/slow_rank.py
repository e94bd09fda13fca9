"""Slow one of four training processes, and count the steps until it is named.

    python -m scripts.observe.slow_rank --work-dir DIR --slow-rank 2
    python -m scripts.observe.slow_rank --work-dir DIR --slow-rank 2 --read

Input: a rank and its sleep in each step. Output: the work dir of a short run of the
debug recipe, and on stdout the result of the heat map's detector on the first 10, 11,
12, ... steps. Exits with 0 if only that rank is named within 50 steps and still at the
end. `--sleep-s 0` runs without a slow rank; then no rank may be named.

Each process runs this script with `--rank`: it adds the sleep before the compiled step
of its loop and runs the trainer.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mjax.observe.detect.stragglers import MIN_STEPS
from mjax.observe.heatmap import report_of, says
from mjax.observe.spans import read_run
from mjax.observe.step_times import StepTimes, step_times
from scripts.observe.processes import Process, coordinated
from scripts.observe.processes import run as run_all

NUM_PROCESSES = 4
WITHIN = 50
"""Steps within which the slow rank must be named."""
LIMIT_S = 500.0


class _Slow:
    """A program in which every step begins late."""

    def __init__(self, program: Any, sleep_s: float) -> None:
        self._program, self._sleep_s = program, sleep_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def train_step(self, *args: Any) -> Any:
        time.sleep(self._sleep_s)
        return self._program.train_step(*args)


def _train_slowly(sleep_s: float, flags: Sequence[str]) -> int:
    """Run the trainer in this process, each step `sleep_s` later."""
    from mjax import train
    from mjax.run.loop import Loop

    begin = Loop.__post_init__

    def slow(self: Loop) -> None:
        begin(self)
        if sleep_s:
            self.program = _Slow(self.program, sleep_s)  # pyright: ignore[reportAttributeAccessIssue]

    Loop.__post_init__ = slow
    return train.main(flags)


def run(
    work_dir: Path, slow_rank: int, sleep_s: float, steps: int, stamps: bool
) -> None:
    """Train four processes with one device each, one of them slow.

    Raises:
      RuntimeError: one of them failed; the message has its errors.
    """
    flags = ["--recipe", "debug", "--data.path", "synthetic", "--simulate-devices", "1"]
    flags += ["--steps", str(steps), "--model.layers", "2", "--eval.every", "1000"]
    flags += ["--observe.stamps", str(stamps), "--work-dir", str(work_dir)]
    flags += coordinated(NUM_PROCESSES)
    slept_s = [sleep_s if rank == slow_rank else 0.0 for rank in range(NUM_PROCESSES)]
    module = ("scripts.observe.slow_rank", "--rank")
    run_all(
        [
            Process(
                log=Path(f"{work_dir}-{rank}.log"),
                module=(*module, str(rank), "--sleep-s", str(own_s), "--"),
                flags=(*flags, "--distributed.process-id", str(rank)),
            )
            for rank, own_s in enumerate(slept_s)
        ],
        LIMIT_S,
    )


def named(times: StepTimes, num_steps: int) -> dict[str, str]:
    """Return the ranks that are named after the first steps, with reasons."""
    outliers = report_of(times, first=num_steps).outliers
    return {times.units[each.host]: says(times, each) for each in outliers}


def main() -> int:
    """Run, and print the number of steps until the slow rank is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", type=Path, default=Path("runs/slow_rank"))
    parser.add_argument("--slow-rank", type=int, default=2)
    parser.add_argument("--sleep-s", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--no-stamps", action="store_true")
    parser.add_argument("--read", action="store_true", help="the run is there already")
    parser.add_argument(
        "--rank", type=int, help="of this process: the trainer's flags follow --"
    )
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    if args.rank is not None:
        return _train_slowly(args.sleep_s, args.flags)
    if not args.read:
        stamps = not args.no_stamps
        run(args.work_dir, args.slow_rank, args.sleep_s, args.steps, stamps)
    times = step_times(read_run(args.work_dir)[0])
    before, first = None, None
    for num_steps in range(MIN_STEPS, len(times.steps) + 1):
        now = named(times, num_steps)
        is_right = len(now) == 1 and next(iter(now)).endswith(f" rank {args.slow_rank}")
        first = (first or num_steps) if is_right else None
        if now.keys() != before:
            said = [f"{name}: {why}" for name, why in now.items()]
            print(f"{num_steps} steps: {'; '.join(said) or 'nobody'}")
        before = now.keys()
    if not args.sleep_s:
        return 1 if before else 0
    print(f"rank {args.slow_rank} alone is named from step {first} on, target {WITHIN}")
    return 0 if first is not None and first <= WITHIN else 1


if __name__ == "__main__":
    sys.exit(main())
