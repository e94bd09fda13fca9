"""Measure the skew of step dispatch between processes, and the effect of Python's GC.

    python -m scripts.speed.launch_skew --steps 1500

Two processes train the `debug` recipe on this machine, whose clock both read: with
automatic garbage collection and with collection at agreed steps (`--gc-every`),
alternating. Each records the dispatch time of each step. Writes
docs/benchmarks/launch_skew.md. Source: MegaScale, arXiv:2402.15627, section 6.3, where
the launches of ranks drifted apart because of irregular garbage collections.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mjax import train
from mjax.launch.agent import free_port
from mjax.processes.progress import Phase, Writer
from mjax.run import loop
from scripts.evidence import REPOSITORY, Table, commit, write_page

MODES = ("by Python's own schedule", "at agreed steps")
RUN = (
    *("--recipe", "debug", "--model.layers", "2", "--model.window", "16"),
    *("--model.rope", "True"),
    *("--simulate-devices", "1", "--ckpt.every", "100000", "--eval.every", "100000"),
    *("--log.sample-tokens", "0", "--data.path", "synthetic"),
)
FIRST = 100
"""Number of first steps, which are left out."""
ROUNDS = 3


def be_rank(mode: str, out: Path, words: list[str]) -> int:
    """Train as one process, and write the dispatch time of each step."""
    dispatches: list[tuple[int, int]] = []
    mark = Writer.mark

    def note(
        self: Writer, phase: Phase, step: int | None = None, microstep: int = 0
    ) -> None:
        if phase is Phase.STEP and step is not None:
            dispatches.append((step, time.monotonic_ns()))
        mark(self, phase, step, microstep)

    Writer.mark = note
    if mode == MODES[0]:
        loop.collections_every = _never
    code = train.main(words)
    out.write_text(json.dumps(dispatches))
    return code


@contextlib.contextmanager
def _never(every: int) -> Iterator[object]:
    del every
    yield lambda step: None


def skews_ms(mode: str, steps: int, folder: Path) -> np.ndarray:
    """Return the skew of the dispatch of each step between two processes, in ms."""
    port = free_port()
    together = ["--distributed.coordinator", f"localhost:{port}"]
    together += ["--distributed.num-processes", "2", "--steps", str(steps)]
    together += ["--work-dir", str(folder / "run"), "--distributed.process-id"]
    outs = [folder / f"{rank}.json" for rank in range(2)]
    processes = [
        subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "scripts.speed.launch_skew",
                    "--rank",
                    mode,
                    str(out),
                ),
                *(*RUN, *together, str(rank)),
            ],
            cwd=REPOSITORY,
            stdout=subprocess.DEVNULL,
        )
        for rank, out in enumerate(outs)
    ]
    codes = [process.wait(timeout=900) for process in processes]
    if any(codes):
        raise RuntimeError(f"the processes ended with {codes}")
    # The last mark with the number of a step is the one before its dispatch.
    first, second = (dict(json.loads(out.read_text())) for out in outs)
    both = [step for step in first if step in second and step >= FIRST]
    return np.array([abs(first[step] - second[step]) / 1e6 for step in both])


def main() -> int:
    """Measure both ways alternately, and write the page."""
    if sys.argv[1:2] == ["--rank"]:
        return be_rank(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args()
    found: dict[str, list[np.ndarray]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = str(Path(name) / "cache")
        for number in range(ROUNDS):
            for mode in MODES:
                folder = Path(name) / f"{number}-{MODES.index(mode)}"
                folder.mkdir()
                found[mode].append(skews_ms(mode, args.steps, folder))
    rows = []
    for mode, rounds in found.items():
        for number, skews in enumerate(rounds):
            values = [*np.percentile(skews, [50, 99, 99.9]), skews.max()]
            rows.append([mode, str(number), *(f"{value:.2f}" for value in values)])
    table = Table(
        title="Two processes on one machine",
        text=(
            "The table shows the absolute difference, in ms, between the times at "
            f"which two processes dispatch the same step. On commit {commit()}: "
            f"`{' '.join(RUN)}`, {args.steps} steps, of which the first {FIRST} are "
            "left out."
        ),
        header=("garbage is collected", "round", "median", "p99", "p99.9", "largest"),
        rows=rows,
    )
    command = f"python -m scripts.speed.launch_skew --steps {args.steps}"
    title = "Skew of step dispatch between processes"
    print(write_page("launch_skew", title, command, [table]).read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
