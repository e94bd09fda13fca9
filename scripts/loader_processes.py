"""Show what one reader per host costs, saves and survives.

    python -m scripts.loader_processes

Runs the `debug` recipe as 1, 2 and 4 processes on 8 simulated devices, on a mesh where
every row goes to one device and on one where every device wants every row; kills the
reader of a run with SIGKILL; and runs a reader alone, for its speed and for the time
until a new one has replaced it. Writes docs/benchmarks/loader.md and ends with 1 if a
bound is exceeded.
"""

import dataclasses
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mjax.data.config import DataConfig
from mjax.data.dataset import open_dataset
from mjax.data.host_reader import FIELDS
from mjax.data.ring import COUNTERS, Layout, Ring
from scripts.evidence import (
    REPOSITORY,
    Table,
    read_metrics,
    train_command,
    without_timing,
    write_page,
)
from scripts.loader_alone import BATCH, NUM_SLOTS, SEQ_LEN, recovery, speed, storage

NUM_STEPS, WARM_UP, NUM_DEVICES = 60, 10, 8
WAIT_BOUND = 0.01
"""Of the median step, after warm-up: the issue's."""
RUN = (
    *("--recipe", "debug", "--steps", str(NUM_STEPS), "--log.every", "1"),
    *("--eval.every", str(NUM_STEPS), "--ckpt.every", str(NUM_STEPS)),
)
MESHES = {
    "dp8": ("--zero", "2"),
    "tp8": ("--mesh.tp", "8", "--mesh.tp-across-hosts"),
}
KILLED_AT = (15, 30, 31, 45)
"""Rows in metrics.jsonl when the reader is killed."""


@dataclasses.dataclass(kw_only=True)
class Seen:
    """What was seen of a run from outside."""

    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Of metrics.jsonl."""
    rows_per_step: float | None = None
    """That the reader read; None without a reader."""
    mapped_bytes: int = 0
    """Parts of the token file that the training processes have touched, in all."""
    reader_mapped_bytes: int = 0
    num_left: int = 0
    """Readers and names in /dev/shm that are there after all processes were killed."""
    output: str = ""


def main() -> int:
    """Run everything, write the page, return 1 if a bound is exceeded."""
    load = os.getloadavg()[0]
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "")
        + " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    )
    with tempfile.TemporaryDirectory() as folder:
        tables, holds = [], True
        processes, undisturbed, within = compare_processes(Path(folder))
        tables.append(processes)
        killed, is_equal = kill_in_a_run(Path(folder), undisturbed)
        tables.append(killed)
        holds = within and is_equal
    tables += [storage(), speed(), recovery()]
    tables[0] = dataclasses.replace(
        tables[0],
        text=(
            f"Load average before the start: {load:.1f}; above 2, other jobs shared "
            "the two cores, and the times on this page, of steps and of recovery, are "
            f"too long. {tables[0].text}"
        ),
    )
    command = "python -m scripts.loader_processes"
    print(write_page("loader", "One reader per host", command, tables))
    return int(not holds)


def compare_processes(folder: Path) -> tuple[Table, list[dict[str, Any]], bool]:
    """Train as 1, 2 and 4 processes; return also the rows of 2 with dp8."""
    lines, undisturbed, holds, num_left = [], [], True, 0
    for mesh, flags in MESHES.items():
        for num_processes in (1, 2, 4):
            work_dir = folder / f"{mesh}-{num_processes}"
            seen = watch(work_dir, num_processes, flags)
            share, wait_s, step_s = waits(seen.rows)
            holds &= share < WAIT_BOUND
            if seen.rows_per_step is not None:
                holds &= seen.rows_per_step == BATCH and seen.mapped_bytes == 0
            num_left += seen.num_left
            holds &= num_left == 0
            if (mesh, num_processes) == ("dp8", 2):
                undisturbed = seen.rows
            wanted = BATCH * (num_processes if mesh == "tp8" else 1)
            lines.append(
                [
                    mesh,
                    str(num_processes),
                    str(wanted),
                    "in the process"
                    if seen.rows_per_step is None
                    else f"{seen.rows_per_step:g}",
                    f"{seen.mapped_bytes / 1024:.0f} kB",
                    f"{seen.reader_mapped_bytes / 1024:.0f} kB",
                    f"{wait_s * 1e6:.0f} us",
                    f"{step_s * 1e3:.1f} ms",
                    f"{share:.3%}",
                ]
            )
            print(" | ".join(lines[-1]), flush=True)
    token_bytes = BATCH * (SEQ_LEN + 1) * token_size()
    table = Table(
        title="1, 2 and 4 processes",
        text=(
            f"`python -m mjax.train {' '.join(RUN)}` with {NUM_DEVICES} simulated "
            f"devices in all, `{' '.join(MESHES['dp8'])}` and "
            f"`{' '.join(MESHES['tp8'])}`. A step has {BATCH} rows of {SEQ_LEN} "
            f"tokens: {token_bytes} bytes of the token file. What the processes of the "
            "host hold grows with their number under tensor parallelism, what is read "
            "does not. The number read is the reader's counter in the ring; a process "
            "alone reads by itself, each row once (tests/data/test_loader.py). The "
            "token file is mapped into memory: of it, the kernel says how much each "
            "process has touched (/proc/PID/smaps, with what the kernel maps around a "
            "page that is asked for). After its last step all training processes of a "
            "run get SIGKILL; readers and names in /dev/shm that were left: "
            f"{num_left}. data_wait_s and step_s are the medians of rank 0 over steps "
            f"{WARM_UP + 1} to {NUM_STEPS}; bound of their ratio: {WAIT_BOUND:.0%}."
        ),
        header=(
            *("mesh", "processes", "rows held by them", "rows read a step"),
            *("token file touched by them", "by the reader", "data_wait_s", "step_s"),
            "ratio",
        ),
        rows=lines,
    )
    return table, undisturbed, holds


def kill_in_a_run(
    folder: Path, undisturbed: list[dict[str, Any]]
) -> tuple[Table, bool]:
    """Kill the reader of a run of two processes several times."""
    seen = watch(folder / "killed", 2, MESHES["dp8"], KILLED_AT)
    deaths = [line for line in seen.output.splitlines() if "a new one" in line]
    expected = [without_timing(row) for row in undisturbed]
    num_equal = sum(
        without_timing(row) == other
        for row, other in zip(seen.rows, expected, strict=True)
    )
    longest_s = max(row["data_wait_s"] for row in seen.rows[WARM_UP:])
    step_s = statistics.median(row["step_s"] for row in seen.rows[WARM_UP:])
    is_equal = num_equal == NUM_STEPS and len(deaths) == len(KILLED_AT)
    table = Table(
        title="kill -9 of the reader in a run",
        text=(
            f"The run of two processes with dp8 again; its reader gets SIGKILL when "
            f"rows {', '.join(map(str, KILLED_AT))} are in metrics.jsonl. All fields "
            "of the rows but the timing are compared with the undisturbed run's, "
            f"exactly. The run said `{deaths[0] if deaths else ''}`, and so on."
        ),
        header=("kills", "readers replaced", "equal rows", "longest data_wait_s"),
        rows=[
            [
                str(len(KILLED_AT)),
                str(len(deaths)),
                f"{num_equal} of {NUM_STEPS}",
                f"{longest_s:.2f} s (median step {step_s * 1e3:.1f} ms)",
            ]
        ],
    )
    print(table.rows, flush=True)
    return table, is_equal


def token_size() -> int:
    """Return the bytes of one token in the token file of `debug`."""
    samples = open_dataset(DataConfig(seq_len=SEQ_LEN), seed=0).train.corpora[0]
    return samples.stream.dtype.itemsize  # type: ignore[attr-defined]


def waits(rows: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Return median data_wait_s over median step_s, and both."""
    wait_s, step_s = (
        statistics.median(row[name] for row in rows[WARM_UP:])
        for name in ("data_wait_s", "step_s")
    )
    return wait_s / step_s, wait_s, step_s


def watch(
    work_dir: Path,
    num_processes: int,
    flags: tuple[str, ...],
    kill_at: tuple[int, ...] = (),
) -> Seen:
    """Run one training, look at its reader, and kill that when rows are written."""
    command = train_command(*RUN, *flags, "--work-dir", str(work_dir))
    command += ["--simulate-devices", str(NUM_DEVICES // num_processes)]
    if num_processes > 1:
        with socket.create_server(("localhost", 0)) as probe:
            port = probe.getsockname()[1]
        command += ["--distributed.coordinator", f"localhost:{port}"]
        command += ["--distributed.num-processes", str(num_processes)]
    log = work_dir.with_suffix(".log")
    processes, seen, names = [], Seen(), set(os.listdir("/dev/shm"))
    with log.open("w") as out:
        for index in range(num_processes):
            own = ["--distributed.process-id", str(index)] if num_processes > 1 else []
            quiet = None if index == 0 else subprocess.DEVNULL
            processes.append(
                subprocess.Popen(
                    [*command, *own],
                    cwd=REPOSITORY,
                    stdout=quiet or out,
                    stderr=quiet or subprocess.STDOUT,
                )
            )
        try:
            look_on(seen, processes, work_dir, list(kill_at))
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
    seen.output = log.read_text()
    if len(seen.rows) < NUM_STEPS:
        raise RuntimeError(f"{' '.join(command)} ended early: {seen.output}")
    time.sleep(1.0)  # a reader notices by itself that its process is gone
    readers = [path for path in Path("/proc").glob("[0-9]*") if is_orphan(path)]
    seen.num_left = len(readers) + len(set(os.listdir("/dev/shm")) - names)
    return seen


def look_on(
    seen: Seen,
    processes: list[subprocess.Popen[bytes]],
    work_dir: Path,
    kill_at: list[int],
) -> None:
    """Look at a run and its reader until its last row; kill the reader on the way."""
    has_looked = False
    while len(seen.rows) < NUM_STEPS and processes[0].poll() is None:
        time.sleep(0.05)
        seen.rows = read_metrics(work_dir)
        pid = find_reader(processes[0].pid)
        if pid is not None:
            ratio = rows_per_step(pid, len(processes))
            seen.rows_per_step = ratio or seen.rows_per_step
            if kill_at and len(seen.rows) >= kill_at[0]:
                os.kill(pid, signal.SIGKILL)
                kill_at.pop(0)
                continue
        if not has_looked and len(seen.rows) >= NUM_STEPS // 2:
            has_looked = True
            seen.mapped_bytes = sum(touched(process.pid) for process in processes)
            seen.reader_mapped_bytes = touched(pid) if pid is not None else 0


def is_orphan(path: Path) -> bool:
    """Say whether a process is a reader whose parent is gone."""
    try:
        is_reader = b"mjax.data.host_reader" in (path / "cmdline").read_bytes()
        return is_reader and "\nPPid:\t1\n" in (path / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def touched(pid: int) -> int:
    """Return how many bytes of a file of training tokens a process has mapped in."""
    num_bytes, is_tokens = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            is_tokens = line.endswith("/train.tokens")
        elif is_tokens and line.startswith("Rss:"):
            num_bytes += int(line.split()[1]) * 1024
    return num_bytes


def find_reader(parent: int) -> int | None:
    """Return the process id of a process' reader."""
    try:
        for task in Path(f"/proc/{parent}/task").iterdir():
            for child in (task / "children").read_text().split():
                if b"host_reader" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None


def rows_per_step(pid: int, num_processes: int) -> float | None:
    """Return how many rows a step the readers of a run have read, from their ring."""
    layout = Layout(
        num_slots=NUM_SLOTS,
        num_rows=BATCH,
        row_words=len(FIELDS) * SEQ_LEN,
        num_consumers=num_processes,
    )
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if "mjax-rows" in os.readlink(link):
                descriptor = os.open(link, os.O_RDWR)
                ring = Ring(descriptor, layout)
                os.close(descriptor)
                before, now = None, counts(ring)
                while now != before:  # not between a step and its count
                    time.sleep(0.002)
                    before, now = now, counts(ring)
                return now[0] / now[1] if now[1] else None
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None


def counts(ring: Ring) -> tuple[int, int]:
    """Return the rows and the steps that were read."""
    num_rows = int(ring.counters[COUNTERS.index("rows")])
    return num_rows, int(ring.steps.max()) + 1


if __name__ == "__main__":
    sys.exit(main())
