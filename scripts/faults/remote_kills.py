"""Kill a run that uploads checkpoints, delete its work dir, and resume from the store.

    python -m scripts.faults.remote_kills

Runs the `debug` recipe with --ckpt.remote on a slow S3 server (moto) on this machine;
both use `.venv-stores` (make env-stores). The run is killed with SIGKILL while an
object arrives at the server, and started again, mostly with an empty work dir. Then
steps are timed with and without an upload at the same time. Writes
docs/benchmarks/remote_checkpoints.md and ends with 1 if a bit differs from the
undisturbed run, if a start did not resume from the newest committed step, or if a step
in the store does not verify.
"""

import contextlib
import dataclasses
import json
import os
import queue
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etils import epath

from mjax.ckpt.saved_step import SavedStep
from scripts.evidence import REPOSITORY, Table, read_metrics, write_page
from scripts.faults.s3_server import BUCKET, CREDENTIALS

PYTHON = str(REPOSITORY / ".venv-stores" / "bin" / "python")
STEPS, EVERY, DELAY_S = 240, 20, 0.05
RUN = (
    *("--recipe", "debug", "--simulate-devices", "2", "--steps", str(STEPS)),
    *("--log.sample-tokens", "0", "--eval.every", "100000"),
    *("--ckpt.every", str(EVERY)),
)
LIMIT_S = 120.0
"""Time limit for the start of the server."""
KILLS = ((3, True), (14, True), (9, False), (16, True), (12, True))
"""For each kill: the number of objects that begin to arrive before the run is killed,
counted from its start, and whether its work dir is deleted."""


class Server:
    """The S3 server of one test."""

    def __init__(self, delay_s: float) -> None:
        self._process = subprocess.Popen(
            [PYTHON, "-m", "scripts.faults.s3_server", "--delay-s", str(delay_s)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        while not (port := self._lines.get(timeout=LIMIT_S)).strip().isdecimal():
            pass
        endpoint = f"http://127.0.0.1:{int(port)}"
        self.environment = {**os.environ, **CREDENTIALS, "AWS_ENDPOINT_URL": endpoint}

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)

    def arriving(self, process: subprocess.Popen[bytes], number: int) -> str:
        """Wait for a number of objects of steps; return the name of the last one.

        Returns "" if the process ended before they arrived.
        """
        while not self._lines.empty():  # lines about the previous start
            self._lines.get()
        line = ""
        while number and process.poll() is None:
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=0.1)
                number -= "/steps/" in line
        return "" if number else line.split()[1]

    def close(self) -> None:
        """Kill the server, and with it its buckets."""
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def serving(delay_s: float) -> Iterator[Server]:
    """Run a server."""
    server = Server(delay_s)
    try:
        yield server
    finally:
        server.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leg:
    """One start of the run."""

    killed_at: str
    """Name of the object that was arriving; "" if the run ended by itself."""
    is_lost: bool
    """Whether the work dir was deleted afterwards."""
    resumed_from: int
    """The restored step; 0 if none was restored."""
    expected_from: int
    """The newest step that was committed, in the store or in the work dir."""
    is_copied: bool
    """Whether that step came from the store."""
    losses: dict[int, float]
    code: int


def command(work_dir: Path, *more: str) -> list[str]:
    """Return the command of the run."""
    return [PYTHON, "-m", "mjax.train", *RUN, "--work-dir", str(work_dir), *more]


def committed(server: Server, url: str, work_dir: Path) -> int:
    """Return the newest step of store and work dir."""
    done = subprocess.run(
        [PYTHON, "-m", "mjax.ckpt", "ls", url, "--json"],
        cwd=REPOSITORY,
        env=server.environment,
        capture_output=True,
        text=True,
    )
    there = json.loads(done.stdout)["steps"] if done.returncode == 0 else []
    steps = [int(entry["name"]) for entry in there if entry["state"] == "good"]
    folder = work_dir / "checkpoints"
    if folder.exists():
        steps += [int(p.name) for p in folder.iterdir() if p.name.isdecimal()]
    return max(steps, default=0)


def start(
    server: Server, url: str, work_dir: Path, kill: tuple[int, bool] | None
) -> Leg:
    """Start the run; kill it when a number of objects of steps have begun to arrive."""
    expected = committed(server, url, work_dir)
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command(work_dir, "--ckpt.remote", url),
            cwd=REPOSITORY,
            env=server.environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        arriving = ""
        if kill is not None:
            arriving = server.arriving(process, kill[0])
            process.send_signal(signal.SIGKILL)
        code = process.wait()
        output.seek(0)
        said = output.read()
    if kill is None and code != 0:
        print(said, file=sys.stderr)
    found = re.search(r"resuming after step (\d+), from (.*);", said)
    rows = read_metrics(work_dir) if (work_dir / "metrics.jsonl").exists() else []
    leg = Leg(
        killed_at=arriving,
        is_lost=kill is not None and kill[1],
        resumed_from=int(found[1]) if found else 0,
        expected_from=expected,
        is_copied=found is not None and "copied from s3://" in found[2],
        losses={int(row["step"]): row["loss"] for row in rows},
        code=code,
    )
    if leg.is_lost:
        shutil.rmtree(work_dir)
    return leg


def sums(folder: Path) -> dict[str, list[tuple[object, int]]]:
    """Return the checksums of all pieces of a saved state."""
    pieces = SavedStep(epath.Path(folder)).pieces
    return {name: [(p.box, p.crc32c) for p in some] for name, some in pieces.items()}


def kill_runs(folder: Path) -> tuple[list[Leg], list[str]]:
    """Kill a run repeatedly; return its starts, and the problems found."""
    problems = []
    with serving(DELAY_S) as server:
        undisturbed = folder / "undisturbed"
        subprocess.run(
            command(undisturbed),
            cwd=REPOSITORY,
            env=server.environment,
            check=True,
            capture_output=True,
        )
        right = {int(row["step"]): row["loss"] for row in read_metrics(undisturbed)}
        url, work_dir = f"s3://{BUCKET}/runs/killed", folder / "killed"
        legs = [start(server, url, work_dir, kill) for kill in (*KILLS, None)]
        verified = subprocess.run(
            [PYTHON, "-m", "mjax.ckpt", "verify", url],
            cwd=REPOSITORY,
            env=server.environment,
            capture_output=True,
            text=True,
        )
        if verified.returncode:
            problems.append(f"the store does not verify: {verified.stdout}")
    for number, leg in enumerate(legs, 1):
        wrong = [step for step, loss in leg.losses.items() if right[step] != loss]
        if wrong:
            problems.append(f"start {number}: losses of steps {wrong} differ")
        if leg.resumed_from != leg.expected_from:
            problems.append(f"start {number} went on from {leg.resumed_from}")
    # If the store has the last step, the last start has no steps to run.
    reached = max(legs[-1].losses, default=legs[-1].resumed_from)
    if any(not leg.killed_at for leg in legs[:-1]):
        problems.append("a start ended before it could be killed")
    if legs[-1].code or reached != STEPS:
        problems.append("the last start did not reach the last step")
    last = [root / "checkpoints" / str(STEPS) for root in (undisturbed, work_dir)]
    if sums(last[0]) != sums(last[1]):
        problems.append("the last states differ")
    return legs, problems


def time_steps() -> list[dict[str, Any]]:
    """Time steps with and without an upload at the same time."""
    with serving(0.0) as server:
        done = subprocess.run(
            [PYTHON, "-m", "scripts.faults.remote_steps"],
            cwd=REPOSITORY,
            env=server.environment,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        legs, problems = kill_runs(Path(folder))
    pairs = time_steps()
    ratios = [
        statistics.median(pair["during_s"]) / statistics.median(pair["after_s"])
        for pair in pairs
    ]
    write_page(
        "remote_checkpoints",
        "Checkpoints in an object store",
        "python -m scripts.faults.remote_kills",
        [_of_kills(legs, problems), _of_steps(pairs, ratios)],
    )
    for problem in problems:
        print(f"wrong: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _of_kills(legs: list[Leg], problems: list[str]) -> Table:
    num_lost = sum(leg.is_lost for leg in legs)
    verdict = "; ".join(problems) or (
        "Every start went on from the newest step that was committed, all losses and "
        "the state after the last step have the bits of the undisturbed run, and every "
        "step in the store verifies."
    )
    return Table(
        title="Killed while it uploads",
        text=(
            f"A run of {STEPS} steps, saved every {EVERY}, at an S3 server of moto "
            f"that waits {DELAY_S} s before it takes an object. It is killed (SIGKILL) "
            f"while an object of a step arrives, {len(legs) - 1} times; {num_lost} "
            f"times its work dir is deleted. {verdict}"
        ),
        header=["start", "killed while", "work dir", "went on from", "steps taken"],
        rows=[
            [
                str(number),
                f"`{_short(leg.killed_at)}` arrived" if leg.killed_at else "not killed",
                "lost" if leg.is_lost else "kept",
                _origin(leg),
                str(len(leg.losses)),
            ]
            for number, leg in enumerate(legs, 1)
        ],
    )


def _short(name: str) -> str:
    parts = name.split("/")
    return "/".join([*parts[parts.index("steps") :][:2], "...", parts[-1][:20]])


def _origin(leg: Leg) -> str:
    if not leg.resumed_from:
        return "the start"
    where = "the store" if leg.is_copied else "the work dir"
    return f"step {leg.resumed_from}, of {where}"


def _of_steps(pairs: list[dict[str, Any]], ratios: list[float]) -> Table:
    medians = [
        [1e3 * statistics.median(pair[name]) for pair in pairs]
        for name in ("during_s", "after_s")
    ]
    num_bytes = pairs[0]["num_bytes"]
    cpu = [pair["upload_cpu_s"] / num_bytes * 1e9 for pair in pairs]
    rows = [
        ["step beside an upload, ms", *_spread(medians[0])],
        ["step without, ms", *_spread(medians[1])],
        ["ratio of a pair", *_spread(ratios)],
        ["upload, s", *_spread([pair["upload_s"] for pair in pairs])],
        ["CPU seconds of the process for 1 GB", *_spread(cpu)],
        [
            "training thread, to wake the uploader, ms",
            *_spread([1e3 * pair["called_s"] for pair in pairs]),
        ],
    ]
    return Table(
        title="Steps beside an upload",
        text=(
            f"{len(pairs)} pairs in one process: a state of {num_bytes / 1e6:.0f} MB "
            "is uploaded to a moto server while steps are timed, then as many are "
            "timed without. The step, the upload and the server share one core or two, "
            "so a ratio above 1 is the share of the upload and of the server; the step "
            "waits for neither. On a GPU, whose steps need little of the host, it was "
            "not measured."
        ),
        header=["", "median", "smallest", "largest"],
        rows=rows,
    )


def _spread(values: list[float]) -> list[str]:
    return [f"{pick(values):.3g}" for pick in (statistics.median, min, max)]


if __name__ == "__main__":
    sys.exit(main())
