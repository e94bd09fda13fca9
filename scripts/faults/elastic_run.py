"""A run that loses one of four hosts, continues with three, and grows back.

    python -m scripts.faults.elastic_run

Four simulated hosts with a rank each and no spare train the `debug` recipe, with a
batch and widths that 12 divides. The agent of one host is stopped, and the run shrinks.
Then that agent continues, and the run grows. All rows are compared with those of an
undisturbed run.
Writes docs/benchmarks/elastic_run.md; ends with 1 if a loss differs by more than 1e-5
or a step is missing.
"""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

from mjax.run.metrics import read_computed
from scripts.evidence import Table, commit, write_page
from scripts.faults.launch_faults import XLA_FLAGS
from scripts.faults.launched import Launched

HOSTS, STEPS, TOLERANCE = 4, 120, 1e-5
RUN = (
    *("--recipe", "debug", "--model.layers", "2", "--model.window", "16"),
    *("--model.rope", "True"),
    *("--model.d-model", "96", "--model.heads", "12", "--model.d-ff", "384"),
    *("--model.vocab-multiple", "96", "--batch.size", "12", "--simulate-devices", "1"),
    *("--ckpt.every", "4", "--eval.every", "40", "--steps", str(STEPS)),
    *("--precision.compute", "float32"),
)
OWN = ("--min-hosts", "3", "--restart.shrink-s", "3")


def play(folder: Path) -> tuple[Launched, list[int]]:
    """Run the launch; return it, and the number of hosts of each generation."""
    launched = Launched(folder / "run", HOSTS, 0, [*RUN], OWN)
    try:
        launched.wait_for_row(10)
        host = launched.hosts()[1]
        pid = launched.agent_pid(host)
        os.kill(pid, signal.SIGSTOP)
        launched.wait_for(lambda: len(launched.hosts()) == 3, "fewer hosts")
        first = launched.last_step()
        launched.wait_for_row(first + 10)
        os.kill(pid, signal.SIGCONT)
        launched.wait_for(lambda: len(launched.hosts()) == 4, "more hosts")
        if launched.process.wait(timeout=600) != 0:
            raise RuntimeError((launched.work_dir / "launch.log").read_text()[-2000:])
    finally:
        launched.end()
    hosts = [len(e["data"]["hosts"]) for e in launched.events("generation")]
    return launched, hosts


def main() -> int:
    """Run the launch and an undisturbed run, and compare their rows."""
    os.environ["XLA_FLAGS"] = XLA_FLAGS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        alone = Launched(folder / "alone", HOSTS, 0, [*RUN])
        try:
            if alone.process.wait(timeout=900) != 0:
                raise RuntimeError((alone.work_dir / "launch.log").read_text()[-2000:])
        finally:
            alone.end()
        expected = {row["step"]: row for row in read_computed(alone.work_dir)}
        launched, hosts = play(folder)
        rows = {row["step"]: row for row in read_computed(launched.work_dir)}
        starts = [
            json.loads(path.read_text())
            for path in sorted((launched.work_dir / "starts").iterdir())
        ]
    missing = sorted(expected.keys() - rows.keys())
    worst = max(abs(rows[step]["loss"] - expected[step]["loss"]) for step in rows)
    table = Table(
        title="From four hosts to three and back",
        text=(
            f"`{' '.join(RUN)}`, launched with `{' '.join(OWN)}`, commit {commit()}. "
            f"{len(expected)} rows; missing {missing}; the largest difference of a "
            f"loss from the undisturbed run is {worst:.1e} (bound {TOLERANCE:g}). "
            f"Data: the same batches in all {STEPS} steps, because a batch is a "
            "function of seed and step."
        ),
        header=["generation", "hosts", "first step", "flags that differ"],
        rows=[
            [
                *(str(start["generation"]), str(len(start["processes"]))),
                str(start["start_step"]),
                " ".join(_differing(start["argv"])),
            ]
            for start in starts
        ],
    )
    page = write_page(
        "elastic_run", "Elastic runs", "python -m scripts.faults.elastic_run", [table]
    )
    print(page.read_text())
    return int(bool(missing) or worst > TOLERANCE or hosts != [4, 3, 4])


def _differing(argv: list[str]) -> list[str]:
    found = []
    for flag in ("--batch.microbatches", "--mesh.dp"):
        if flag in argv:
            found += [flag, argv[argv.index(flag) + 1]]
    return found


if __name__ == "__main__":
    sys.exit(main())
