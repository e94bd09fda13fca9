"""Run the reader of a host without training: what it reads, how fast, until when.

Enters: nothing but the `stdlib` corpus. Leaves: tables for docs/benchmarks/loader.md,
see `loader_processes`.
"""

import contextlib
import functools
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from mjax.data import host_socket
from mjax.data.config import DataConfig
from mjax.data.dataset import open_dataset
from mjax.data.host_reader import FIELDS, Block, Reading, open_stream
from mjax.data.host_rows import HostRows, follow, lead
from mjax.data.ring import COUNTERS
from scripts.evidence import Table

BATCH, SEQ_LEN, NUM_SLOTS = 8, 64, 2
"""Of the `debug` recipe, and of the loader."""
NUM_KILLS = 20


def storage() -> Table:
    """Read the same steps from storage for 1, 2 and 4 consumers."""
    lines, num_steps = [], 100
    with tempfile.TemporaryDirectory() as folder:
        config = DataConfig(seq_len=SEQ_LEN, cache_dir=folder)
        open_dataset(config, seed=0)
        (tokens,) = Path(folder).rglob("train.tokens")
        for num_consumers in (1, 2, 4):
            forget(tokens)
            wishes = [[(0, BATCH)]] * num_consumers
            with share(config, BATCH, wishes) as everyone:
                with ThreadPoolExecutor(num_consumers) as pool:
                    list(pool.map(read_steps, everyone, [num_steps] * num_consumers))
                counters = everyone[0].counters()
            lines.append(
                [
                    *(str(num_consumers), str(num_consumers * num_steps * BATCH)),
                    *(str(counters["rows"]), f"{counters['disk_bytes'] / 1e6:.1f} MB"),
                    str(counters["major_faults"]),
                ]
            )
            print(" | ".join(lines[-1]), flush=True)
        size = tokens.stat().st_size
    return Table(
        title="From storage",
        text=(
            f"One reader and 1, 2 and 4 consumers (threads of this process, the reader "
            f"does not know) that all want all {BATCH} rows of {num_steps} steps. "
            f"Before each, the token file of `stdlib` ({size / 1e6:.1f} MB) is dropped "
            "from the page cache. Bytes that the kernel fetched from storage for the "
            "reader (read_bytes of /proc/self/io, with what it read ahead), and page "
            "faults that waited for them. The reader may be some steps ahead at the "
            "end."
        ),
        header=("consumers", "rows given", "rows read", "from storage", "major faults"),
        rows=lines,
    )


def read_steps(rows: HostRows, num_steps: int) -> None:
    """Read all rows of some steps, from 0 on."""
    for step in range(num_steps):
        rows.read(step, [(0, BATCH)])


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def speed() -> Table:
    """Let a reader run as fast as it can, with one consumer that only copies."""
    lines = []
    for seq_len, batch_size in ((64, 8), (2048, 8), (2048, 64), (8192, 64)):
        config = DataConfig(seq_len=seq_len)
        with share(config, batch_size, [[(0, batch_size)]]) as [rows]:
            steps = iter(range(1_000_000))
            read_for(rows, batch_size, steps, 1.0)
            before, cpu_s, started_s = (
                rows.counters(),
                time.thread_time(),
                time.monotonic(),
            )
            num_read = read_for(rows, batch_size, steps, 5.0)
            wall_s, cpu_s = time.monotonic() - started_s, time.thread_time() - cpu_s
            after = rows.counters()
        spent = {name: after[name] - before[name] for name in COUNTERS}
        per_core = spent["rows"] * seq_len / (spent["cpu_us"] * 1e-6)
        copied = num_read * batch_size * seq_len
        lines.append(
            [
                str(seq_len),
                str(batch_size),
                f"{per_core / 1e6:.1f} million",
                f"{copied / cpu_s / 1e6:.0f} million",
                f"{copied / wall_s / 1e6:.1f} million",
            ]
        )
        print(" | ".join(lines[-1]), flush=True)
    return Table(
        title="A reader alone",
        text=(
            "`stdlib` as bytes, documents isolated, one consumer in this process that "
            "copies every row and drops it; 5 seconds after one of warm-up, files in "
            "the page cache. Tokens per second of CPU time: of the reader (choosing "
            "the samples, reading, packing, checksums, writing), and of the consumer "
            "(copying, checking). The last column is what came through."
        ),
        header=(
            *("tokens a row", "rows a step", "read / CPU s", "copied / CPU s"),
            "through / s",
        ),
        rows=lines,
    )


def recovery() -> Table:
    """Kill a reader at random times, and wait for the first step of the next one."""
    rng, waits_s = random.Random(0), []
    wanted: list[Block] = [(0, BATCH)]
    config = DataConfig(seq_len=SEQ_LEN)
    with share(config, BATCH, [wanted]) as [rows]:
        assert rows.keeper is not None
        stream = open_dataset(config, seed=0).train
        step = 0
        for _ in range(NUM_KILLS):
            end_s = time.monotonic() + rng.uniform(0.05, 0.3)
            while time.monotonic() < end_s:
                check(rows.read(step, wanted), stream, step)
                step += 1
            os.kill(rows.keeper.pid, signal.SIGKILL)
            killed_s = time.monotonic()
            before = rows.counters()["readers"]
            while rows.counters()["readers"] == before:
                check(rows.read(step, wanted), stream, step)
                step += 1
            waits_s.append(time.monotonic() - killed_s)
        num_readers = rows.counters()["readers"]
        resident = status_bytes(rows.keeper.pid, "VmHWM")
    assert num_readers == NUM_KILLS + 1
    waits_s.sort()
    row = [
        *(str(NUM_KILLS), f"{step} of {step}"),
        *(f"{statistics.median(waits_s):.2f} s", f"{waits_s[-1]:.2f} s"),
        f"{resident / 1e6:.0f} MB",
    ]
    print(" | ".join(row), flush=True)
    return Table(
        title="From kill -9 to the next row",
        text=(
            "One consumer reads as fast as it can, so the ring is nearly empty when "
            "the reader gets SIGKILL at a random time (seed 0). The time ends with the "
            "first step of the new reader; most of it is the start of Python and its "
            "imports. Every row of every step is compared with the stream itself."
        ),
        header=("kills", "equal steps", "median", "longest", "memory of a reader"),
        rows=[row],
    )


def check(read: dict[Any, dict[str, np.ndarray]], stream: Any, step: int) -> None:
    """End the script if a step is not what it must be."""
    expected = stream.rows(step, BATCH)
    for name in FIELDS:
        np.testing.assert_array_equal(read[0, BATCH][name], expected[name])


def plan_reading(config: DataConfig, batch_size: int) -> Reading:
    """Say what a reader reads of a corpus, from its first step on."""
    fingerprint = open_dataset(config, seed=0).fingerprint
    return Reading(
        reopen=functools.partial(open_stream, config, seed=0, fingerprint=fingerprint),
        batch_size=batch_size,
        seq_len=config.seq_len,
        start_step=0,
        num_slots=NUM_SLOTS,
    )


@contextlib.contextmanager
def share(
    config: DataConfig, batch_size: int, wishes: list[list[Block]]
) -> Iterator[list[HostRows]]:
    """Start a reader of a corpus with several consumers, all in this process."""
    plan = plan_reading(config, batch_size)
    with host_socket.listen() as listener, ThreadPoolExecutor(8) as pool:
        at = host_socket.address(listener)
        others = [pool.submit(follow, wish, at) for wish in wishes[1:]]
        first = lead(wishes[0], plan, host_socket.accept(listener, len(others)))
        everyone = [first, *(other.result() for other in others)]
    try:
        yield everyone
    finally:
        for rows in reversed(everyone):
            rows.close()


def read_for(
    rows: HostRows, batch_size: int, steps: Iterator[int], seconds: float
) -> int:
    """Read steps for some time; return how many."""
    end_s, num_read = time.monotonic() + seconds, 0
    while time.monotonic() < end_s:
        rows.read(next(steps), [(0, batch_size)])
        num_read += 1
    return num_read


def status_bytes(pid: int, name: str) -> int:
    """Return a figure of /proc/PID/status in bytes, 0 if the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    words = [line.split() for line in lines if line.startswith(f"{name}:")]
    return int(words[0][1]) * 1024 if words else 0
